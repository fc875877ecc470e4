"""Sub-networks with fewer units per layer (Diao et al., 2021, "HeteroFL")."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def held_units(width: int, rate: float, first: int = 0) -> Tensor:
    r"""Return the mask of :math:`\lceil r\, d \rceil` units of a layer of :math:`d`, ``[width]``.

    Args:
        width: Number of units :math:`d`.
        rate: Share of the units :math:`r`, above 0 and at most 1.
        first: Index of the first unit; the units after the last one are the first ones.

    Example:
        >>> held_units(5, 0.5).int(), held_units(5, 0.5, first=4).int()
        (tensor([1, 1, 1, 0, 0], dtype=torch.int32), tensor([1, 1, 0, 0, 1], dtype=torch.int32))
    """
    # Rounded, so that a share of 0.07 of 100 units is seven units.
    return (torch.arange(width) - first) % width < math.ceil(rate * width - 1e-9)


def held_entries(shape: Sequence[int], rows: Tensor, columns: Tensor | None = None) -> Tensor:
    """Return the mask of the entries of a tensor whose row and column are those of held units.

    Args:
        shape: Shape of the tensor: a weight, ``[out, in, ...]``, or one value per unit, ``[out]``.
        rows: Mask of the units of the layer.
        columns: Mask of the units of the layer before; None if the tensor has no such axis. If the
            axis is a multiple of the units, as after the maps of a convolution were flattened,
            each unit has as many entries in succession.

    Example:
        >>> held_entries([2, 4], torch.tensor([True, False]), torch.tensor([False, True])).int()
        tensor([[0, 0, 1, 1],
                [0, 0, 0, 0]], dtype=torch.int32)
    """
    held = torch.ones(torch.Size(shape), dtype=torch.bool)
    for axis, units in enumerate([rows] if columns is None else [rows, columns]):
        each = units.repeat_interleave(shape[axis] // len(units))
        held &= each.reshape(-1, *[1] * (len(shape) - axis - 1))
    return held


def mean_over_holders(start: Tensor, total: Tensor, count: Tensor) -> Tensor:
    r"""Add to each entry the mean update of the clients that hold it.

    .. math:: x_i + \frac{1}{|\{k: i \in H_k\}|} \sum_{k: i \in H_k} \Delta_{ki},

    and :math:`x_i` for entries that no client holds.

    Args:
        start: Entries :math:`x`, ``[P]``.
        total: Sums of the updates of the holders, ``[P]`` in float64; 0 without a holder.
        count: Numbers of holders, ``[P]`` in float64.

    Example:
        >>> sums, counts = torch.tensor([[6.0, 4.0, 0.0], [3.0, 1.0, 0.0]]).double()
        >>> mean_over_holders(torch.ones(3), sums, counts)
        tensor([3., 5., 1.])
    """
    return (total / count.clamp(min=1)).add_(start).to(start.dtype)
