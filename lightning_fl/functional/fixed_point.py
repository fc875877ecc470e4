r"""Sums of fixed-point integers modulo :math:`2^b`, as in secure aggregation.

A client clips the entries of a vector :math:`x` to :math:`[-c, c]` and sends

.. math:: q = \operatorname{round}\bigl(w x / u\bigr) \bmod 2^b, \qquad u = w_{\max} c / q_{\max},
    \qquad q_{\max} = \lfloor (2^{b-1} - 1) / M \rfloor,

where :math:`w \le w_{\max}` is its weight and :math:`M` the largest number of clients. The sum of
:math:`M` integers of at most :math:`q_{\max}` is less than :math:`2^{b-1}`, so that it never wraps
around, and :math:`u` times the sum differs from :math:`\sum_k w_k x_k` by at most
:math:`u / 2` for each client.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_fl.errors import FederationError
from lightning_fl.functional.summation import VectorSum


def largest_integer(bits: int, clients: int) -> int:
    r"""Return the largest integer that each client may send, :math:`q_{\max}`.

    Args:
        bits: Number :math:`b` of bits of the sum.
        clients: Largest number :math:`M` of clients.

    Raises:
        FederationError: If the sum would wrap around.

    Example:
        >>> largest_integer(8, clients=10)  # 10 * 12 < 2**7
        12
    """
    largest: int = (2 ** (bits - 1) - 1) // clients
    if not largest:
        raise FederationError(
            f"a sum of {clients} clients does not fit into {bits} bits: it needs at least"
            f" {clients.bit_length() + 1}, and 10 more for an error of a thousandth"
        )
    return largest


class FixedPointSum(VectorSum):
    r"""Add vectors as integers modulo :math:`2^b`, and read their sum.

    Args:
        length: Length of the vectors.
        device: Their device.
        clip: Bound :math:`c` on the entries.
        bits: Number :math:`b` of bits, at most 53.
        max_weight: Largest weight :math:`w_{\max}`.
        clients: Largest number :math:`M` of addends.

    Raises:
        FederationError: If ``bits`` are too few for the clients.

    Example:
        >>> total = FixedPointSum(2, clip=1.0, bits=16, max_weight=1.0, clients=2)
        >>> total.add(torch.tensor([[0.25, 3.0], [0.5, 0.5]]))
        >>> total.value(), total.unit == 1 / 16383
        (tensor([0.7500, 1.5000], dtype=torch.float64), True)
    """

    def __init__(
        self,
        length: int,
        device: torch.device | str = "cpu",
        *,
        clip: float,
        bits: int,
        max_weight: float,
        clients: int,
    ) -> None:
        super().__init__(length, device)
        self.clip, self.max_weight = clip, max_weight
        self._mask, self._half = 2**bits - 1, 2 ** (bits - 1)
        self._largest = largest_integer(bits, clients)
        #: Value of the integer 1, :math:`u`.
        self.unit = max_weight * clip / self._largest
        self._sum = torch.zeros(length, dtype=torch.int64, device=device)
        #: Numbers of clipped and of all entries, and sums of squares: of the errors of rounding,
        #: and of what was rounded.
        self.figures = VectorSum(4, device)

    def add(self, rows: Tensor, weights: Tensor | None = None) -> None:
        """Add the integers of weighted rows, ``[k, P]``.

        Raises:
            FederationError: If a weight is larger than ``max_weight``.
        """
        weights = rows.new_ones(len(rows)) if weights is None else weights
        if (largest := float(weights.abs().amax())) > self.max_weight:
            raise FederationError(
                f"an update has the weight {largest:g}, and max_weight={self.max_weight:g}: set"
                f" max_weight={largest:g} or more"
            )
        for row, weight in zip(rows, weights.to(self._sum.device, torch.float64), strict=True):
            clipped = row.double().clamp(-self.clip, self.clip) * weight
            sent = (clipped / self.unit).round().clamp(-self._largest, self._largest)
            self._sum = (self._sum + sent.long()) & self._mask
            error = sent * self.unit - clipped
            numbers = (row.abs() > self.clip).sum(), row.new_tensor(len(row), dtype=torch.int64)
            squares = error.square().sum(), clipped.square().sum()
            self.figures.add(torch.stack([each.double() for each in (*numbers, *squares)])[None])

    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        signed = torch.where(self._sum >= self._half, self._sum - self._mask - 1, self._sum)
        yield slice(self.length), signed.double() * self.unit

    def merge(self, other: VectorSum) -> None:
        """Add the addends of another sum."""
        assert isinstance(other, FixedPointSum)
        self._sum = (self._sum + other._sum) & self._mask
        self.figures.merge(other.figures)

    def all_reduced(self, group: Any = None) -> VectorSum:
        """Return the sum over all processes; see :meth:`VectorSum.all_reduced`."""
        total = self._sum.clone()
        torch.distributed.all_reduce(total, group=group)
        made = copy.copy(self)
        made._sum, made.figures = total & self._mask, self.figures.all_reduced(group)
        return made

    def reset(self) -> None:
        """Remove all addends."""
        self._sum = torch.zeros_like(self._sum)
        self.figures.reset()

    def to(self, device: torch.device | str) -> None:
        """Move the sum to a device."""
        self.device, self._sum = device, self._sum.to(device)
        self.figures.to(device)
