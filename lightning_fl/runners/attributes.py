"""Changes that a training step makes to plain Python attributes of a module."""

from __future__ import annotations

import copy
import inspect
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import lru_cache
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
    submodules, and of objects of the user's own classes, with slots, too. It also includes the
    attributes of the user's classes of modules.

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
        self._owners = list[tuple[str, MutableMapping[str, Any]]]()
        kinds = dict[type, str]()
        for name, part in module.named_modules():
            self._owners.append((name, vars(part)))
            kinds.update((kind, name) for kind in classes_of_user(type(part)) if kind not in kinds)
        self._owners += [(name, _OfClass(kind)) for kind, name in kinds.items()]
        self._before = [dict(own) for _, own in self._owners]
        #: Parameters, buffers, and the attributes of children, which have names of their own.
        self._known = {id(t) for t in [*module.parameters(), *module.buffers()]}
        self._known |= {id(own) for _, own in self._owners}
        values = [value for own in self._before for value in own.values()]
        self._contents = {
            id(value): (value, _saved(value), _version(value))
            for value in _mutable(values, set(self._known))
        }

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
                if own.get(key, self) is not before[key]:
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

    An object is represented by the dictionary of its attributes, and by itself if it has slots.

    Args:
        values: The values.
        seen: The ``id`` of objects to leave out; the objects found are added.
    """
    return (value for value in _reached(values, seen) if _is_mutable(value))


def _reached(values: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """Yield values and what is inside them; see :func:`_mutable`."""
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        kind: Any = type(value)
        if id(value) in seen:
            continue
        if _is_mutable(value):
            seen.add(id(value))
        yield value
        if isinstance(value, list | set | deque | tuple):
            waiting.extend(value)
        if isinstance(value, dict):
            waiting.extend(value.values())
        if isinstance(value, nn.Module):
            is_open = id(vars(value)) not in seen and _num_bytes(value) <= MAX_BYTES
        else:
            is_open = isinstance(value, LRScheduler) or _is_of_the_user(kind)
        if is_open:
            waiting.extend(_in_slots(value).values())
            waiting.append(getattr(value, "__dict__", None))


def _is_mutable(value: Any) -> bool:
    """Return whether a value can change in place, without the objects that it holds."""
    kind: Any = type(value)
    return issubclass(kind, _MUTABLE) or (_is_of_the_user(kind) and bool(_slots(kind)))


@lru_cache
def _is_of_the_user(kind: type) -> bool:
    """Return whether the objects of a class have attributes, and the class is one of the user."""
    is_code = issubclass(kind, type | ModuleType | FunctionType | MethodType)
    is_code |= issubclass(kind, _GENERATORS)
    has_attributes = kind.__dictoffset__ != 0
    is_of_the_user = len(classes_of_user(kind)) == len(kind.__mro__)
    return (has_attributes or bool(_slots(kind))) and not is_code and is_of_the_user


@lru_cache
def _slots(kind: type) -> tuple[str, ...]:
    """Return the names of the slots of a class and its bases."""
    with_slots = [vars(each) for each in kind.__mro__ if "__slots__" in vars(each)]
    items = [item for own in with_slots for item in own.items()]
    return tuple(name for name, value in items if inspect.ismemberdescriptor(value))


def _in_slots(value: Any) -> dict[str, Any]:
    """Return what the slots of an object hold, without empty ones."""
    kind: Any = type(value)
    return {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}


def classes_of_user(kind: type) -> list[type]:
    """Return a class and its bases, without those of frameworks."""
    return [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in FRAMEWORKS]


class _OfClass(MutableMapping[str, Any]):
    """View the attributes of a class, without its methods and properties.

    Args:
        kind: The class.
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __getitem__(self, name: str) -> Any:
        return vars(self.kind)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.kind, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.kind, name)

    def __iter__(self) -> Iterator[str]:
        own = list(vars(self.kind).items())
        return (n for n, v in own if not (n.startswith("__") or hasattr(type(v), "__get__")))

    def __len__(self) -> int:
        return sum(1 for _ in self)


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
    if isinstance(value, np.ndarray) and value.nbytes > MAX_BYTES:
        return None
    return copy.copy(_content(value))


def _content(value: Any) -> Any:
    """Return a container or an array itself, and what another object holds in its slots."""
    return value if isinstance(value, _MUTABLE) else _in_slots(value)


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
    if _version(value) != version:
        return True
    if saved is None:
        return False
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
    return _items(_content(value)) != _items(saved)


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
    elif isinstance(value, list | deque):
        value.clear()
        value.extend(saved)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(saved)
    else:
        for name in _in_slots(value):
            object.__delattr__(value, name)
        for name, content in saved.items():
            object.__setattr__(value, name, content)


def _items(container: Any) -> list[int]:
    """Return the identities of the items of a container."""
    values = container.values() if isinstance(container, dict) else container
    keys = container.keys() if isinstance(container, dict) else ()
    return [*map(hash, keys), *map(id, values)]
