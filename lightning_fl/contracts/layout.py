"""Layout of the exchanged tensors in the flat vector of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class VectorLayout:
    """Names, shapes and positions of the tensors in a flat vector.

    Parameters come first, then floating-point buffers.

    Args:
        shapes: Shapes by name, in the order of the vector.
        num_parameters: Number of entries that belong to parameters. The others belong to buffers.
        num_counters: Number of entries of integer buffers, which are exchanged separately.
        dtype: Data type of the vector.

    Example:
        >>> layout = VectorLayout({"w": torch.Size([2, 1]), "mean": torch.Size([3])}, 2)
        >>> layout.size, layout.num_parameters
        (5, 2)
        >>> layout.split(torch.arange(5.0)[None])["mean"]
        tensor([[2., 3., 4.]])
    """

    shapes: Mapping[str, torch.Size]
    num_parameters: int
    num_counters: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def sizes(self) -> list[int]:
        """Number of entries of each tensor in the vector."""
        return [shape.numel() for shape in self.shapes.values()]

    @property
    def size(self) -> int:
        """Length of the vector."""
        return sum(self.sizes)

    @property
    def has_buffers(self) -> bool:
        """Whether buffers are exchanged, in the vector or separately."""
        return self.size > self.num_parameters or self.num_counters > 0

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the tensors of several vectors, as views where possible.

        Args:
            rows: Vectors of all tensors or of the parameters only, ``[k, P]``.

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
            parts[name] = part.reshape(len(rows), *self.shapes[name])
        return parts
