r"""Reproducible summation, independent of the order and grouping of the addends.

This is pre-rounded ("indexed") summation (Demmel and Nguyen, 2013, 2015; ReproBLAS). A fixed grid
divides the exponent range of float64 into bins of :data:`BITS` bits. Each addend is split at the
grid into slices. The slices of a bin are integer multiples of the unit of the bin, so float64 adds
them exactly in any order. Each coordinate keeps the :data:`BINS` bins below its largest addend so
far. A larger addend shifts the bins up, and the lowest bins are discarded. The result is
:math:`\sum_k \operatorname{round}_u(x_k)`, where :math:`u` is the unit of the lowest bin for the
largest of *all* addends. It is a function of the set of addends, independent of their order,
grouping and distribution over processes.

For :math:`n` addends the error is at most :math:`n 2^{-64} \max_k |x_k|` plus one rounding of the
total, which is less than for a plain float64 sum. The range includes the largest and the subnormal
numbers. A non-finite addend makes the total of its coordinate NaN.

A sum is a single float64 tensor, ``[BINS + 1, ...]``, and can be the state of a metric: the bins,
scaled so that the unit of the top bin is 1, and the scale, a power of two. Its memory is
independent of the number of addends. A :class:`VectorSum` has the same value, and keeps few addends
as they are, which takes less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor

#: Number of bits per bin. Sums of up to ``2 ** (53 - BITS)`` addends, two million, are exact.
BITS = 32
#: Number of bins per coordinate. A total has at least ``BITS * (BINS - 1)`` bits below the largest
#: addend.
BINS = 3
#: Number of elements to add at once on a CPU, limited by its cache, and on other devices.
PIECE, DEVICE_PIECE = 2**17, 2**22
#: Number of rows that are added together.
ROWS = 20
#: Number of rows that a compiled sum adds in one pass, and least number of columns.
GRAPH_ROWS, GRAPH_COLUMNS = 5, 2**12
#: Largest size of rows that wait for others, in bytes.
WAITING = 2**27

#: Bound on scaled addends: half the unit of the next higher bin, so that this bin rounds to 0.
_LIMIT = 2.0 ** (BITS - 1)
#: Adding and subtracting it rounds to multiples of a bin's unit, half to even.
_ANCHORS = [1.5 * 2.0 ** (52 - i * BITS) for i in range(BINS)]
#: Scale of zero, that of the lowest window. Its lowest unit is the smallest subnormal number.
_SCALE_OF_ZERO = 2.0**1010


def empty_sum(shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """Return the sum of no addends.

    Args:
        shape: Shape of the addends.
        device: Device of the sum.

    Returns:
        The empty sum, ``[BINS + 1, *shape]``, in float64.
    """
    total = torch.zeros(BINS + 1, *shape, dtype=torch.float64, device=device)
    total[-1] = _SCALE_OF_ZERO
    return total


class VectorSum:
    """Hold a sum of vectors: as its bins, or as the addends as long as they are half as large.

    Bins take eight times the memory of a float32 vector. For few clients, their updates are
    smaller, and the total is the same, bit for bit. Small addends also wait for others, since one
    addition of many rows is faster.

    Args:
        length: Length of the vectors.
        device: Their device.
    """

    def __init__(self, length: int, device: torch.device | str = "cpu") -> None:
        self.length, self.device = length, device
        self._bins: Tensor | None = None
        #: Copies of rows, with their weights.
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def add(self, rows: Tensor, weights: Tensor | None = None) -> None:
        """Add weighted rows, ``[k, P]``."""
        weights = rows.new_ones(len(rows)) if weights is None else weights
        every = [*self._waiting, (rows, weights)]
        size, count = sum(each.nbytes for each, _ in every), sum(len(each) for each, _ in every)
        is_small = self._bins is None and size <= (BINS + 1) * 8 * self.length // 2
        most = min(ROWS, WAITING * count // max(size, 1))
        if is_small or count < (most // GRAPH_ROWS * GRAPH_ROWS or most):
            self._waiting.append((rows.clone(), weights.clone()))
        else:
            self._waiting = every
            self.bins()

    def bins(self) -> Tensor:
        """Return the sum as a tensor, ``[BINS + 1, P]``."""
        if self._bins is None:
            self._bins = empty_sum((self.length,), self.device)
        for columns in self._columns():
            self._add_waiting(self._bins[:, columns], columns)
        self._waiting = []
        return self._bins

    def value(self) -> Tensor:
        """Return the total in float64, ``[P]``."""
        value = torch.empty(self.length, dtype=torch.float64, device=self.device)
        for columns, piece in self._pieces():
            value[columns] = piece
        return value

    def mean_plus(self, start: Tensor, divisor: Tensor) -> Tensor:
        """Return ``start`` plus the total over ``divisor``, rounded once to the dtype of ``start``.

        Args:
            start: Vector, ``[P]``.
            divisor: One number.
        """
        end = torch.empty_like(start)
        for columns, piece in self._pieces():
            end[columns] = piece.div_(divisor).add_(start[columns])
        return end

    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the total in pieces, each with its place."""
        whole = None if self._bins is None else self.bins()
        for columns in self._columns():
            if whole is None:
                bins = empty_sum((columns.stop - columns.start,), self.device)
                self._add_waiting(bins, columns)
            else:
                bins = whole[:, columns]
            yield columns, _value(bins)

    def _columns(self) -> Iterator[slice]:
        width = PIECE if torch.device(self.device).type == "cpu" else DEVICE_PIECE
        for start in range(0, self.length, width):
            yield slice(start, min(start + width, self.length))

    def _add_waiting(self, bins: Tensor, columns: slice) -> None:
        pairs = [(rows[:, columns], weights) for rows, weights in self._waiting]
        if len(pairs) > 1 and sum(rows.nbytes for rows, _ in pairs) <= WAITING:
            # Rows that are added together stay in the cache.
            pairs = [(torch.cat([rows for rows, _ in pairs]), torch.cat([w for _, w in pairs]))]
        for rows, weights in pairs:
            add_rows(bins, rows, weights)

    def merge(self, other: VectorSum) -> None:
        """Add the addends of another sum."""
        self._bins = merged_sums(torch.stack([self.bins(), other.bins()]))

    def all_reduced(self, group: Any = None) -> VectorSum:
        """Return the sum over all processes. All processes must call this method.

        Args:
            group: Process group. None means all processes.
        """
        made = VectorSum(self.length, self.device)
        made._bins = all_reduced(self.bins(), group)
        return made

    def free(self) -> None:
        """Free the addends that wait; call :meth:`reset` before the sum is used again."""
        self._waiting = []

    def reset(self) -> None:
        """Remove all addends; the memory of bins is used again."""
        self.free()
        if self._bins is not None:
            self._bins[:-1], self._bins[-1] = 0, _SCALE_OF_ZERO

    def to(self, device: torch.device | str) -> None:
        """Move the sum to a device."""
        self.device = device
        if self._bins is not None:
            self._bins = self._bins.to(device)


def add_rows(total: Tensor | VectorSum, rows: Tensor, weights: Tensor | None = None) -> None:
    r"""Add :math:`\sum_k w_k x_k` to a sum, in place.

    Args:
        total: Sum, ``[BINS + 1, P]``, or a :class:`VectorSum`.
        rows: Addends :math:`x`, ``[k, P]``, of any floating-point dtype.
        weights: Weights :math:`w`, ``[k]``. None means weights of 1. Products are rounded to
            float64.

    Example:
        >>> total = empty_sum((1,))
        >>> for value in (1e16, 1.0, -1e16):
        ...     add_rows(total, torch.tensor([[value]], dtype=torch.float64))
        >>> sum_value(total)
        tensor([1.], dtype=torch.float64)
    """
    if isinstance(total, VectorSum):
        total.add(rows, weights)
        return
    factors = total.new_ones(len(rows)) if weights is None else weights.to(total)
    on_cpu = total.device.type == "cpu"
    graph = _graph if on_cpu and total.shape[1] >= GRAPH_COLUMNS else None
    size = ROWS if graph is None else GRAPH_ROWS
    for start in range(0, len(rows), size):
        some, weight = rows[start : start + size], factors[start : start + size]
        add = _add_piece if graph is None or len(some) < GRAPH_ROWS else graph
        width = max((PIECE if on_cpu else DEVICE_PIECE) // (1 if add is graph else len(some)), 1)
        for state, piece in zip(total.split(width, 1), some.split(width, 1), strict=True):
            add(state, piece, weight)


def _add_piece(total: Tensor, rows: Tensor, factors: Tensor) -> None:
    rest = rows.to(total, copy=True).mul_(factors[:, None]).mul_(total[-1])
    at = _too_large(rest)
    if at is not None:
        addends = rows[:, at].to(total) * factors[:, None]
        total[:, at] = _rescaled(total[:, at], _scale_for(addends.abs().amax(0)))
        rest[:, at] = addends * total[-1, at]
    rounded, ones = torch.empty_like(rest), torch.ones_like(factors)
    for unit_bin, anchor in zip(total[:-1], _ANCHORS, strict=True):
        torch.add(rest, anchor, out=rounded).sub_(anchor)
        unit_bin += ones @ rounded if len(rounded) > 1 else rounded[0]
        if anchor != _ANCHORS[-1]:
            rest -= rounded


#: What adds :data:`GRAPH_ROWS` rows on a CPU, if sums are compiled.
_graph: Callable[[Tensor, Tensor, Tensor], None] | None = None


def compile_sums() -> None:
    """Compile the sums of this process on the CPU: a third of the time, and the same bits."""
    global _graph
    _graph = _graph or torch.compile(_add_few, dynamic=True)


def _add_few(total: Tensor, rows: Tensor, factors: Tensor) -> None:
    """Do what :func:`_add_piece` does, in operations that one pass over the memory can make."""
    rest = [row.to(total) * factor for row, factor in zip(rows, factors, strict=True)]
    scale = torch.minimum(_scale_for(reduce(torch.maximum, map(torch.abs, rest))), total[-1])
    bins = list(_shifted(total, scale))
    rest = [addend * scale for addend in rest]
    for i, anchor in enumerate(_ANCHORS):
        rounded = [(addend + anchor) - anchor for addend in rest]
        bins[i] = sum(rounded, bins[i])
        rest = [addend - part for addend, part in zip(rest, rounded, strict=True)]
    total.copy_(torch.stack([*bins, scale]))


def _too_large(rest: Tensor) -> Tensor | slice | None:
    """Return the columns in which an addend needs other bins, or None.

    Few do. On other devices than a CPU they are all columns, since it would wait for the answer.
    """
    if rest.device.type != "cpu" or not rest.numel():
        return slice(None)
    low, high = map(float, rest.aminmax())
    if -_LIMIT < low <= high < _LIMIT:
        return None
    columns = (~(rest.abs().amax(0) < _LIMIT)).nonzero()[:, 0]
    return columns if len(columns) < rest.shape[1] // 8 else slice(None)


def _scale_for(addend: Tensor) -> Tensor:
    """Return the scale for which the top bin holds the addend, for each coordinate."""
    exponents = (addend.view(torch.int64) >> 52) & 0x7FF  # biased, of the bits of float64
    position = ((exponents + 52) >> 5).clamp(min=2)
    return ((2097 - BITS * position) << 52).view(torch.float64)


def _rescaled(total: Tensor, scale: Tensor) -> Tensor:
    """Return a sum with its bins shifted up to a scale, unless its own scale is lower."""
    scale = torch.minimum(scale, total[-1])
    if total.device.type != "cpu":  # where Python would wait for the indices of the columns
        return torch.stack([*_shifted(total, scale), scale])
    moved = torch.cat([total[:-1], scale[None]])
    at = (scale != total[-1]) & total[:-1].any(0)
    moved[:-1, at] = torch.stack([*_shifted(total[:, at], scale[at])])
    return moved


def _shifted(total: Tensor, scale: Tensor) -> Iterator[Tensor]:
    """Yield the bins of a sum, shifted up to a scale."""
    ratio = scale / total[-1]  # 2 ** -BITS to the power of the number of shifted bins
    for i in range(BINS):
        moved = torch.zeros_like(scale)
        for up in range(i + 1):
            shifts = ratio == 2.0 ** (-BITS * up)
            moved = moved + torch.where(shifts, total[i - up] * ratio, 0.0)
        yield moved


def merged_sums(totals: Tensor) -> Tensor:
    """Return the sum of several sums.

    Args:
        totals: Sums, ``[n, BINS + 1, ...]``.
    """
    scale = totals[:, -1].amin(0)
    moved = torch.stack([_rescaled(total, scale) for total in totals])
    return torch.cat([moved[:, :-1].sum(0), scale[None]])


def all_reduced(total: Tensor, group: Any = None) -> Tensor:
    """Return the sum over all processes. All processes must call this function.

    Args:
        total: Sum of this process, ``[BINS + 1, ...]``.
        group: Process group. None means all processes.
    """
    scale = total[-1].clone()
    torch.distributed.all_reduce(scale, torch.distributed.ReduceOp.MIN, group)
    total = _rescaled(total, scale)
    torch.distributed.all_reduce(total[:-1], group=group)
    return total


def sum_value(total: Tensor | VectorSum) -> Tensor:
    """Return the value of a sum in float64, ``[...]``.

    Args:
        total: Sum, ``[BINS + 1, ...]``, or a :class:`VectorSum`.
    """
    return total.value() if isinstance(total, VectorSum) else _value(total)


def _value(total: Tensor) -> Tensor:
    top, middle, low = total[:-1].unbind()
    # The total of the bins is independent of the order, but its split is not: propagate carries.
    unit = 2.0**-BITS
    carry = (low / unit).floor() * unit
    low, middle = low - carry, middle + carry
    carry = middle.floor()
    middle, top = middle - carry, top + carry
    high = top + middle
    return (high + (middle - (high - top) + low)) / total[-1]
