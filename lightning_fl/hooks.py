"""Attributes and methods of one object that are replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

Method = Callable[..., Any]


@contextmanager
def attributes_set(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of one object, past what ``nn.Module`` does with them; then restore them.

    Args:
        owner: The object.
        attributes: Values by name.
    """
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)


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
    method = getattr(owner, name)
    replacement = wraps(method)(make(method))
    # Lightning looks through one decorator for a method's arguments: not through ours and a user's.
    replacement.__dict__["__wrapped__"] = getattr(method, "__wrapped__", method)
    with attributes_set(owner, {name: replacement}):
        yield
