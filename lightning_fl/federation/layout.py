"""Where each exchanged tensor lies in the flat vector of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class VectorLayout:
    """Names, shapes and places of the tensors in a vector: parameters first, then floating buffers.

    A complex tensor takes two places for each of its entries.

    Args:
        shapes: Shapes by name, in the order of the vector. A complex tensor has a last axis of 2.
        num_parameters: Length of the part that parameters take; buffers have the rest.
        complex_names: Names of the complex tensors.
        num_counters: Entries of integer buffers, which are exchanged beside the vector.
        dtype: Of the vector.

    Example:
        >>> layout = VectorLayout({"w": torch.Size([2, 1]), "mean": torch.Size([3])}, 2)
        >>> layout.size, layout.num_parameters
        (5, 2)
        >>> layout.split(torch.arange(5.0)[None])["mean"]
        tensor([[2., 3., 4.]])
    """

    shapes: Mapping[str, torch.Size]
    num_parameters: int
    complex_names: frozenset[str] = frozenset()
    num_counters: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def sizes(self) -> list[int]:
        """Length of each tensor's part of the vector."""
        return [shape.numel() for shape in self.shapes.values()]

    @property
    def size(self) -> int:
        """Length of the vector."""
        return sum(self.sizes)

    @property
    def has_buffers(self) -> bool:
        """Whether buffers are exchanged, in the vector or beside it."""
        return self.size > self.num_parameters or self.num_counters > 0

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the tensors of several vectors, as views where possible.

        Args:
            rows: Vectors of all tensors, or of the parameters alone, ``[k, P]``.

        Returns:
            Stacked tensors by name, ``[k, *shape]``.
        """
        sizes, names, size = [], [], 0
        for name, shape in self.shapes.items():
            if size < rows.shape[1]:
                names.append(name)
                sizes.append(shape.numel())
                size += shape.numel()
        parts = {}
        for name, part in zip(names, rows.split(sizes, dim=1), strict=True):
            stack = part.reshape(len(rows), *self.shapes[name])
            is_complex = name in self.complex_names
            # A copy: entries in the middle of a vector need not begin at an even place.
            parts[name] = torch.view_as_complex(stack.clone()) if is_complex else stack
        return parts
