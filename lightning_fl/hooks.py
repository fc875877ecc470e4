"""Names of hooks, overridden methods, and temporary replacement of attributes and methods."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

Method = Callable[..., Any]
#: Hooks of a module or data module that transfer a batch to the device.
TRANSFER_HOOKS = (
    *("on_before_batch_transfer", "on_after_batch_transfer"),
    "transfer_batch_to_device",
)
#: Hooks of a callback around a Lightning batch.
BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")
#: Hooks of a callback that see gradients.
GRADIENT_HOOKS = (
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    "on_before_zero_grad",
)
#: Hooks of a callback in a training step.
CALLBACK_HOOKS = (*BATCH_HOOKS, *GRADIENT_HOOKS)
#: Hooks of a module in a step, after the transfer of its batch.
HOOKS_AFTER_TRANSFER = (
    *CALLBACK_HOOKS,
    *("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
    "lr_scheduler_step",
)
#: Per-step hooks of a module, which vectorized training does not call.
STEP_HOOKS = (*TRANSFER_HOOKS, *HOOKS_AFTER_TRANSFER)


def overrides(owner: Any, name: str, base: type) -> bool:
    """Return whether an object overrides a method of a base class.

    Unlike Lightning's ``is_overridden``, it finds a replacement made with ``functools.wraps``, too.
    """
    return name in vars(owner) or getattr(type(owner), name) is not getattr(base, name)


def call_hook(owner: Any, name: str) -> None:
    """Call an optional hook, such as ``on_client_start`` of a module."""
    if callable(hook := getattr(owner, name, None)):
        hook()


@contextmanager
def quiet(logger: str, level: int = logging.WARNING) -> Iterator[None]:
    """Hide messages of a logger below a level within a ``with`` block.

    Args:
        logger: Name of the logger.
        level: Lowest level that is shown.
    """
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(max(before, level))
    try:
        yield
    finally:
        log.setLevel(before)


class attributes_set:  # noqa: N801  # torch 2.6 does not compile a function with contextmanager
    """Set attributes of one object within a ``with`` block.

    They are set in its ``__dict__``, without ``nn.Module.__setattr__``.

    Args:
        owner: The object.
        attributes: Values by name.
    """

    def __init__(self, owner: Any, attributes: Mapping[str, Any]) -> None:
        self.owner, self.attributes = owner, attributes
        own = owner.__dict__
        self.before = {name: own[name] for name in attributes if name in own}

    def __enter__(self) -> None:
        for name, value in self.attributes.items():
            object.__setattr__(self.owner, name, value)

    def __exit__(self, *error: object) -> None:
        for name in self.attributes:
            if name in self.before:
                object.__setattr__(self.owner, name, self.before[name])
            elif name in self.owner.__dict__:
                object.__delattr__(self.owner, name)


@contextmanager
def properties_set(owner: Any, getters: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
    """Replace properties of one object within a ``with`` block.

    A property cannot be set on an object, so the object temporarily gets a subclass of its class.

    Args:
        owner: The object.
        getters: Functions of the object by name of the property.

    Example:
        >>> class Counter:
        ...     @property
        ...     def steps(self): return 3
        >>> counter = Counter()
        >>> with properties_set(counter, {"steps": lambda own: 5}):
        ...     counter.steps
        5
        >>> counter.steps
        3
    """
    kind = type(owner)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": None}
    properties = {name: property(getter) for name, getter in getters.items()}
    owner.__class__ = type(kind.__name__, (kind,), {**names, **properties})
    try:
        yield
    finally:
        owner.__class__ = kind


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Method], Method]) -> Iterator[None]:
    """Replace a method of one object within a ``with`` block.

    Args:
        owner: The object. Other objects of its class are not affected.
        name: Name of the method.
        make: Function that returns the replacement, given the original method.

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
    # Lightning unwraps only one decorator to inspect arguments, and the user may have added one.
    replacement.__dict__["__wrapped__"] = getattr(method, "__wrapped__", method)
    with attributes_set(owner, {name: replacement}):
        yield
