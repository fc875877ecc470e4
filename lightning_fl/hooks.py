"""Methods of one object that are replaced while a fit lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

Method = Callable[..., Any]


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Method], Method]) -> Iterator[None]:
    """Replace a method of one object, past what ``nn.Module`` does with attributes.

    Args:
        owner: The object. Others of its class keep their method.
        name: Name of the method.
        make: Returns the replacement, given the method.

    Example:
        >>> class Greeter:
        ...     def greet(self): return "hello"
        >>> greeter = Greeter()
        >>> with replaced(greeter, "greet", lambda greet: lambda: greet().upper()):
        ...     greeter.greet()
        'HELLO'
        >>> greeter.greet(), vars(greeter)
        ('hello', {})
    """
    attributes = vars(owner)
    method, is_own = getattr(owner, name), name in attributes
    replacement = wraps(method)(make(method))
    # Lightning looks through one decorator for a method's arguments: not through ours and a user's.
    replacement.__dict__["__wrapped__"] = getattr(method, "__wrapped__", method)
    attributes[name] = replacement
    try:
        yield
    finally:
        if is_own:
            attributes[name] = method
        else:
            attributes.pop(name, None)
