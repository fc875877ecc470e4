"""Detection of reads and writes of a module's tensors, and of random numbers with a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(TorchDispatchMode):
    """Record the tensors that operations read and write, also through views and aliases.

    Random numbers that do not come from torch's generator with its current seed are noted, too.

    Args:
        tensors: The tensors to watch, by name.

    Example:
        >>> with Watch({"w": (w := torch.ones(2))}) as watch:
        ...     _ = w.data.mul_(2)
        >>> watch.written
        {'w'}
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = dict(tensors)
        self._memories = {name: _memory(tensor) for name, tensor in tensors.items()}
        self._names = {memory: name for name, memory in self._memories.items() if memory}
        self.read: set[str] = set()
        self._changed: set[str] = set()
        self._seed = torch.initial_seed()
        #: Whether random numbers were drawn from another generator, or after another seed was set.
        self.has_own_seed = False

    @property
    def written(self) -> set[str]:
        """Names of the tensors that were written to, or got a new ``data``."""
        before = self._memories
        return self._changed | {n for n, t in self._tensors.items() if _memory(t) != before[n]}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record the tensors among the arguments, and run the operation."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            is_given = any(isinstance(v, torch.Generator) for v in (*args, *kwargs.values()))
            self.has_own_seed |= is_given or torch.initial_seed() != self._seed
        values = zip(func._schema.arguments, args, strict=False)
        named = ((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs)
        for argument, value in [*values, *named]:
            alias = argument.alias_info
            if alias is not None and not alias.is_write:  # a view; its use is recorded later
                continue
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor) and (name := self._names.get(_memory(tensor))):
                    (self.read if alias is None else self._changed).add(name)
        return func(*args, **kwargs)


def _memory(tensor: Tensor) -> int:
    """Return a number of a tensor's storage; 0 for a layout without one, such as sparse.

    Not the address of its data, which some devices do not have.
    """
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0
