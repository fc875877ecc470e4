"""Changes that a training step makes to plain Python attributes of a module."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.utils._pytree import tree_leaves

#: Attributes in which ``nn.Module`` stores parameters, buffers and children.
_OF_TORCH = vars(nn.Module()).keys()


class Attributes:
    """Take a snapshot of the plain attributes of a module and its children.

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
        self._before = [dict(own) for _, own in self._owners]
        values = [value for own in self._before for value in own.values()]
        self._contents = {id(c): (c, copy.copy(c)) for c in _containers(values)}

    def restore(self) -> None:
        """Undo all changes since the snapshot."""
        for (_, own), objects in zip(self._owners, self._before, strict=True):
            for key in own.keys() - objects.keys():
                del own[key]
            own.update(objects)
        for container, content in self._contents.values():
            container.clear()
            (container.extend if isinstance(content, list) else container.update)(content)

    def changed(self) -> list[str]:
        """Return the names of the attributes that were replaced or hold different objects."""
        return [
            f"{name}.{key}".strip(".")
            for (name, own), objects in zip(self._owners, self._before, strict=True)
            for key, value in own.items()
            if key not in _OF_TORCH
            and (objects.get(key, self) is not value or self._is_other_inside(value))
        ]

    def _is_other_inside(self, value: Any) -> bool:
        return any(
            id(c) not in self._contents or _items(c) != _items(self._contents[id(c)][1])
            for c in _containers([value])
        )

    def mapped(self) -> list[str]:
        """Return the names of the attributes that hold a tensor leaked from ``vmap``."""
        return [
            f"{name}.{key}".strip(".")
            for name, own in self._owners
            for key, value in own.items()
            if any(isinstance(t, Tensor) and is_batchedtensor(t) for t in tree_leaves(value))
        ]


@contextmanager
def left_alone(module: nn.Module) -> Iterator[Attributes]:
    """Undo changes of a module's plain attributes at the end of a ``with`` block."""
    attributes = Attributes(module)
    try:
        yield attributes
    finally:
        attributes.restore()


def _items(container: Any) -> list[int]:
    """Return the identities of the items of a list, a dictionary or a set."""
    values = container.values() if isinstance(container, dict) else container
    keys = container.keys() if isinstance(container, dict) else ()
    return [*map(hash, keys), *map(id, values)]


def _containers(values: Iterable[Any], seen: set[int] | None = None) -> Iterator[Any]:
    """Yield the lists, dictionaries and sets among values, and those inside them."""
    seen = set() if seen is None else seen
    for value in values:
        if type(value) in (list, dict, set) and id(value) not in seen:
            seen.add(id(value))
            yield value
            yield from _containers(value.values() if type(value) is dict else value, seen)
