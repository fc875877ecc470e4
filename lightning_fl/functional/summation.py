r"""Sums that do not depend on the order or the grouping of their addends.

This is pre-rounded ("indexed") summation (Demmel and Nguyen, 2013, 2015; ReproBLAS). One grid, the
same for all sums, cuts the exponents of float64 into bins of :data:`BITS` bits. Each addend is cut
at the grid into slices. The slices of a bin are whole multiples of the bin's unit, which float64
adds exactly, in any order. A coordinate keeps the :data:`BINS` bins below the largest addend that
it has met. A larger addend moves them up, and the lowest are dropped whole. What remains is
:math:`\sum_k \operatorname{round}_u(x_k)` with the unit :math:`u` of the lowest bin that the
largest of *all* addends leaves: a function of the set of addends alone, however they are ordered,
grouped, or spread over processes.

For :math:`n` addends the error is at most :math:`n 2^{-64} \max_k |x_k|` and one rounding of the
total, which is less than a plain float64 sum's. The largest and the subnormal numbers are summed
as well as others. An addend that is not finite makes the total of its coordinate NaN.

A sum is one tensor, ``[BINS + 1, ...]`` in float64: the bins, scaled so that the unit of the top
bin is 1, and the scale, a power of two. So it can be the state of a metric. Its memory does not
grow with the number of addends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Bits of a bin. Sums of up to ``2 ** (53 - BITS)`` addends, two million, are exact.
BITS = 32
#: Bins of a coordinate. A total has at least ``BITS * (BINS - 1)`` bits below the largest addend.
BINS = 3
#: Elements that are added at once on a CPU, where they have to stay in the cache, and elsewhere.
PIECE, DEVICE_PIECE = 2**16, 2**22

#: Addends are below half the unit of the next bin: all of them, or nothing, is rounded away there.
_LIMIT = 2.0 ** (BITS - 1)
#: The scale of zero: that of the lowest window, whose lowest unit is the smallest subnormal number.
_SCALE_OF_ZERO = 2.0**1010


def empty_sum(shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """Return the sum of no addends.

    Args:
        shape: Of the addends.
        device: Where the sum is kept.

    Returns:
        ``[BINS + 1, *shape]`` in float64.
    """
    total = torch.zeros(BINS + 1, *shape, dtype=torch.float64, device=device)
    total[-1] = _SCALE_OF_ZERO
    return total


def add_rows(total: Tensor, rows: Tensor, weights: Tensor | None = None) -> None:
    r"""Add :math:`\sum_k w_k x_k` to a sum, in place.

    On a CPU the few coordinates whose bins have to move up are looked for. Elsewhere all are
    treated alike, which needs no value of the device.

    Args:
        total: The sum, ``[BINS + 1, P]``.
        rows: :math:`x`, ``[k, P]``, of any floating dtype.
        weights: :math:`w`, ``[k]``; None weighs each row with 1. A product is rounded to float64.

    Example:
        >>> total = empty_sum((1,))
        >>> for value in (1e16, 1.0, -1e16):
        ...     add_rows(total, torch.tensor([[value]], dtype=torch.float64))
        >>> sum_value(total)
        tensor([1.], dtype=torch.float64)
    """
    if not rows.numel():
        return
    on_cpu = total.device.type == "cpu"
    width = PIECE if on_cpu else DEVICE_PIECE
    rounded = total.new_empty(min(width, total.shape[1]))
    for k, row in enumerate(rows):
        for state, piece in zip(total.split(width, 1), row.split(width), strict=True):
            addend = piece.to(torch.float64, copy=True)
            if weights is not None:
                addend *= weights[k]
            rest = addend * state[-1]
            for at in _too_large(rest) if on_cpu else [slice(None)]:
                state[:, at] = _moved(state[:, at], _scale_for(addend[at]))
                rest[at] = addend[at] * state[-1, at]
            _add_slices(state, rest, rounded[: len(rest)])


def _too_large(rest: Tensor) -> list[Any]:
    """Return an index of the coordinates whose bins have to move up; none where there is none."""
    low, high = map(float, rest.aminmax())
    if -_LIMIT < low <= high < _LIMIT:
        return []
    found = (~(rest.abs() < _LIMIT)).nonzero()[:, 0]
    return [found if len(found) < len(rest) // 8 else slice(None)]


def _add_slices(state: Tensor, rest: Tensor, rounded: Tensor) -> None:
    """Add a scaled addend, ``[P]``, which is used up, to the bins."""
    for i, unit_bin in enumerate(state[:-1]):
        # Adding and subtracting it rounds to whole multiples of the bin's unit, half to even.
        anchor = 1.5 * 2.0 ** (52 - i * BITS)
        torch.add(rest, anchor, out=rounded).sub_(anchor)
        unit_bin += rounded
        if i + 1 < BINS:
            rest -= rounded


def _scale_for(addend: Tensor) -> Tensor:
    """Return the scale at which the top bin holds an addend, for each coordinate."""
    exponents = (addend.view(torch.int64) >> 52) & 0x7FF  # biased, of the bits of float64
    position = ((exponents + 52) >> 5).clamp(min=2)
    return ((2097 - BITS * position) << 52).view(torch.float64)


def _moved(total: Tensor, scale: Tensor) -> Tensor:
    """Return a sum with its bins moved up to a scale; where its own is lower, that stays."""
    scale = torch.minimum(scale, total[-1])
    ratio = scale / total[-1]  # 1, or 2 ** -BITS for each bin that they move
    moved = torch.zeros_like(total)
    moved[-1] = scale
    for i in range(BINS):
        for up in range(i + 1):
            moved[i] += torch.where(ratio == 2.0 ** (-BITS * up), total[i - up] * ratio, 0.0)
    return moved


def merged_sums(totals: Tensor) -> Tensor:
    """Return the sum of all addends of several sums, ``[n, BINS + 1, ...]``."""
    scale = totals[:, -1].amin(0)
    moved = torch.stack([_moved(total, scale) for total in totals])
    return torch.cat([moved[:, :-1].sum(0), scale[None]])


def all_reduced(total: Tensor, group: Any = None) -> Tensor:
    """Return the sum of the addends of all processes; all have to call it.

    Args:
        total: This process's sum, ``[BINS + 1, ...]``.
        group: Of processes; None is all.
    """
    scale = total[-1].clone()
    torch.distributed.all_reduce(scale, torch.distributed.ReduceOp.MIN, group)
    total = _moved(total, scale)
    bins = total[:-1].contiguous()
    torch.distributed.all_reduce(bins, group=group)
    return torch.cat([bins, total[-1:]])


def sum_value(total: Tensor) -> Tensor:
    """Return the value of a sum in float64, ``[...]``."""
    top, middle, low = total[:-1].unbind()
    # What the bins hold is the same for any order, how it is split between them is not: carry.
    unit = 2.0**-BITS
    carry = (low / unit).floor() * unit
    low, middle = low - carry, middle + carry
    carry = middle.floor()
    middle, top = middle - carry, top + carry
    high = top + middle
    return (high + (middle - (high - top) + low)) / total[-1]
