"""Changes that a training step makes to plain Python attributes of a module."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from lightning_fl.runners.tensors import is_equal

#: Attributes in which ``nn.Module`` stores parameters and buffers, and others that do not change.
#: The mode, children and hooks are looked at.
_OF_TORCH = {
    name
    for name in vars(nn.Module())
    if name not in ("training", "_modules") and not name.endswith("_hooks")
}
#: Packages whose classes, and classes derived from them, are not looked into, as a Trainer's.
FRAMEWORKS = {"torch", "lightning", "pytorch_lightning", "lightning_fl"}
#: Random generators, which have a state to save.
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
#: What can change in place.
_MUTABLE = (list, dict, set, deque, Tensor, np.ndarray, *_GENERATORS)
#: Maximum size of a tensor, an array or a network that is copied.
MAX_BYTES = 2**26


class Attributes:
    """Take a snapshot of the plain attributes of a module and its children.

    It includes what the attributes hold: lists, dictionaries, sets, tensors, arrays, random
    generators, and the attributes of schedulers, of metrics, of small networks that are no
    submodules, and of objects of the user's own classes. It also includes what the user's classes
    of modules hold themselves.

    Args:
        module: The module.

    Example:
        >>> module = nn.Identity()
        >>> module.seen = []
        >>> attributes = Attributes(module)
        >>> module.seen.append(1)
        >>> attributes.changed()
        ['seen']
        >>> attributes.restore()
        >>> module.seen
        []
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners = [(name, vars(m)) for name, m in module.named_modules()]
        self._owners += [(name, _held_by(type(m))) for name, m in module.named_modules()]
        self._before = [dict(own) for _, own in self._owners]
        #: Parameters, buffers, and the attributes of children, which have names of their own.
        self._known = {id(t) for t in [*module.parameters(), *module.buffers()]}
        self._known |= {id(own) for _, own in self._owners}
        values = [value for own in self._before for value in own.values()]
        self._contents = {
            id(value): (value, _saved(value), _version(value))
            for value in _mutable(values, set(self._known))
        }

    @property
    def is_complete(self) -> bool:
        """Whether all changes can be undone; large tensors and arrays are not copied."""
        return all(saved is not None for _, saved, _ in self._contents.values())

    def restore(self, names: Collection[str] | None = None) -> None:
        """Undo changes since the snapshot.

        Args:
            names: Names of the attributes, as from :meth:`changed`; None means all.
        """
        values = []
        for (owner, own), before in zip(self._owners, self._before, strict=True):
            for key in {**own, **before}:
                if names is not None and _full_name(owner, key) not in names:
                    continue
                if key not in before:
                    del own[key]
                    continue
                own[key] = before[key]
                values.append(before[key])
        for value in _mutable(values, set(self._known)):  # looks into containers as restored here
            _, saved, version = self._contents[id(value)]
            if saved is not None and _is_changed(value, saved, version):
                _put_back(value, saved)
                self._contents[id(value)] = value, saved, _version(value)

    def changed(self) -> list[str]:
        """Return the names of the attributes that were replaced or whose content has changed."""
        return [
            _full_name(name, key)
            for (name, own), objects in zip(self._owners, self._before, strict=True)
            for key, value in own.items()
            if key not in _OF_TORCH
            and (objects.get(key, self) is not value or self._has_changed_inside(value))
        ]

    def _has_changed_inside(self, value: Any) -> bool:
        return any(
            id(each) not in self._contents or _is_changed(*self._contents[id(each)])
            for each in _mutable([value], set(self._known))
        )

    def mapped(self) -> list[str]:
        """Return the names of the attributes that hold a tensor leaked from ``vmap``."""
        return [
            _full_name(name, key)
            for name, own in self._owners
            for key, value in own.items()
            if any(
                isinstance(each, Tensor) and is_batchedtensor(each)
                for each in _mutable([value], set(self._known))
            )
        ]


@contextmanager
def left_alone(module: nn.Module) -> Iterator[Attributes]:
    """Undo changes of a module's plain attributes at the end of a ``with`` block."""
    attributes = Attributes(module)
    try:
        yield attributes
    finally:
        attributes.restore()


def _full_name(owner: str, key: str) -> str:
    return f"{owner}.{key}".strip(".")


def metrics_of(module: nn.Module) -> list[Metric]:
    """Return the metrics of a module: its children, and those that attributes hold."""
    values = [vars(part) for part in module.modules()]
    found = [value for value in _reached(values, set()) if isinstance(value, Metric)]
    return list({id(metric): metric for metric in found}.values())


def _mutable(values: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """Yield what can change in place among values, and inside them.

    An object is represented by the dictionary of its attributes.

    Args:
        values: The values.
        seen: The ``id`` of objects to leave out; the objects found are added.
    """
    return (value for value in _reached(values, seen) if isinstance(value, _MUTABLE))


def _reached(values: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """Yield values and what is inside them; see :func:`_mutable`."""
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        if isinstance(value, _MUTABLE):
            seen.add(id(value))
        yield value
        if isinstance(value, list | set | deque | tuple):
            waiting.extend(value)
        if isinstance(value, dict):
            waiting.extend(value.values())
        if isinstance(value, nn.Module):
            is_open = id(vars(value)) not in seen and _num_bytes(value) <= MAX_BYTES
        else:
            is_open = isinstance(value, LRScheduler) or _is_of_the_user(value)
        if is_open:
            waiting.append(vars(value))


def _is_of_the_user(value: Any) -> bool:
    """Return whether a value is an object with attributes, of a class of the user."""
    is_code = isinstance(value, type | ModuleType | FunctionType | MethodType)
    is_code |= isinstance(value, _GENERATORS)
    is_of_the_user = len(classes_of_user(type(value))) == len(type(value).__mro__)
    return hasattr(value, "__dict__") and not is_code and is_of_the_user


def classes_of_user(kind: type) -> list[type]:
    """Return a class and its bases, without those of frameworks."""
    return [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in FRAMEWORKS]


def _held_by(kind: type) -> dict[str, Any]:
    """Return what can change in place among the attributes of a class."""
    values = [item for each in classes_of_user(kind) for item in vars(each).items()]
    return {name: value for name, value in values if isinstance(value, _MUTABLE)}


def _num_bytes(module: nn.Module) -> int:
    """Return the size of the parameters and buffers of a module."""
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def _saved(value: Any) -> Any:
    """Return a copy of a value's content; None for large tensors and arrays."""
    if isinstance(value, Tensor):  # nbytes is not defined for sparse tensors
        is_large = value.numel() * value.element_size() > MAX_BYTES
        return None if is_large else value.detach().clone()
    if isinstance(value, _GENERATORS):
        return _state(value)
    return None if isinstance(value, np.ndarray) and value.nbytes > MAX_BYTES else copy.copy(value)


def _state(generator: Any) -> Any:
    """Return the state of a random generator."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return generator.get_state()
    is_pythons = isinstance(generator, random.Random)
    return generator.getstate() if is_pythons else generator.bit_generator.state


def _version(value: Any) -> int:
    """Return the number of writes to a tensor; 0 for others."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _is_changed(value: Any, saved: Any, version: int) -> bool:
    """Return whether a value was written to or holds other objects than its copy."""
    if saved is None or _version(value) != version:
        return _version(value) != version
    if isinstance(value, Tensor):  # a write through value.data has no version; a GPU would wait
        is_same = value.shape == saved.shape and value.dtype == saved.dtype
        is_plain = value.layout == torch.strided and value.device.type == "cpu"
        return not is_same or (is_plain and not is_equal([value.detach()], [saved]))
    if isinstance(value, np.ndarray):
        return bool(value.tobytes() != saved.tobytes())
    if isinstance(value, _GENERATORS):
        now = _state(value)
        is_tensor = isinstance(now, Tensor)
        return not torch.equal(now, saved) if is_tensor else repr(now) != repr(saved)
    return _items(value) != _items(saved)


def _put_back(value: Any, saved: Any) -> None:
    """Restore a value's content from its copy."""
    if isinstance(value, Tensor):
        value.detach().copy_(saved)
    elif isinstance(value, np.ndarray):
        value[...] = saved
    elif isinstance(value, torch.Generator | np.random.RandomState):
        value.set_state(saved)
    elif isinstance(value, random.Random):
        value.setstate(saved)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = saved
    else:
        value.clear()
        (value.extend if isinstance(value, list | deque) else value.update)(saved)


def _items(container: Any) -> list[int]:
    """Return the identities of the items of a container."""
    values = container.values() if isinstance(container, dict) else container
    keys = container.keys() if isinstance(container, dict) else ()
    return [*map(hash, keys), *map(id, values)]
