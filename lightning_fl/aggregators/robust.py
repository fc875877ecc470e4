"""Rules that hold out against clients who send anything."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.aggregators.fedavg import FedAvg
from lightning_fl.federation.context import Federation
from lightning_fl.functional.robust import (
    clipped,
    coordinate_median,
    geometric_median,
    krum_scores,
    trimmed_mean,
)
from lightning_fl.types import ClientUpdate, FederationError, describe


class RobustAggregator(Aggregator):
    """Move the server to a center of the clients' updates, of which some may be anything.

    All updates of a round are kept until it ends. A child class says which center.
    """

    ids: list[Tensor] | Tensor
    deltas: list[Tensor] | Tensor
    weights: list[Tensor] | Tensor

    def allocate(self, server: Tensor) -> None:
        """Declare the updates of the round."""
        for name in ("ids", "deltas", "weights"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, clients: ClientUpdate) -> None:
        """Keep updates until all are there."""
        device = clients.delta.device
        self.ids.append(clients.clients.to(device))  # type: ignore[union-attr]
        self.deltas.append(clients.delta.clone())  # type: ignore[union-attr]
        self.weights.append(clients.num_samples.to(device))  # type: ignore[union-attr]

    def compute(self) -> Tensor:
        """Return server plus center; the server itself when nobody returned."""
        if not (found := self.gather_by_client("ids", "deltas", "weights")):
            return self.server
        _, deltas, weights = found
        center = self.center(deltas.double(), weights.double())
        return (self.server.double() + center).to(self.server.dtype)

    @abstractmethod
    def center(self, deltas: Tensor, weights: Tensor) -> Tensor:
        """Return what stands for all updates.

        Args:
            deltas: ``[k, P]`` in float64.
            weights: Samples of each, ``[k]``.

        Returns:
            ``[P]``.
        """


class CoordinateMedian(RobustAggregator):
    r"""The median of each coordinate (Yin et al., 2018); every client counts once.

    See :func:`~lightning_fl.functional.robust.coordinate_median`.

    Example:
        >>> rule = CoordinateMedian()
        >>> rule.start(torch.zeros(1))
        >>> rows = torch.tensor([[1.0], [2.0], [1e9]])
        >>> rule.update(ClientUpdate(torch.arange(3), rows, torch.ones(3)))
        >>> rule.compute()
        tensor([2.])
    """

    def center(self, deltas: Tensor, weights: Tensor) -> Tensor:
        """Return the median; see :class:`RobustAggregator`."""
        return coordinate_median(deltas)


class TrimmedMean(RobustAggregator):
    r"""The mean of each coordinate without its extremes (Yin et al., 2018).

    See :func:`~lightning_fl.functional.robust.trimmed_mean`. Every client counts once.

    Args:
        fraction: Of the clients, left out at either end of each coordinate and rounded down: the
            part of attackers that it stands. In [0, 0.5).

    Raises:
        FederationError: If the fraction is out of range.
    """

    def __init__(self, fraction: float = 0.2) -> None:
        super().__init__()
        if not 0 <= fraction < 0.5:
            raise FederationError(f"fraction must be in [0, 0.5), got {fraction}")
        self.fraction = fraction

    def center(self, deltas: Tensor, weights: Tensor) -> Tensor:
        """Return the trimmed mean; see :class:`RobustAggregator`."""
        # What 0.29 * 100 is in binary must not cost a client.
        return trimmed_mean(deltas, math.floor(self.fraction * len(deltas) + 1e-9))


class Krum(RobustAggregator):
    r"""The mean of the updates that are nearest to others (Blanchard et al., 2017).

    See :func:`~lightning_fl.functional.robust.krum_scores`; floating buffers are not looked at.
    Every client counts once. A round needs :math:`2 f + 3` clients; with fewer the server keeps its
    model.

    Args:
        attackers: :math:`f`: dishonest clients in a round at most.
        keep: How many updates are averaged: 1 is Krum, more is Multi-Krum. At most
            :math:`f + 3`, which are there in any round.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if rounds are too
            small.
    """

    def __init__(self, attackers: int = 1, keep: int = 1) -> None:
        super().__init__()
        if attackers < 0 or int(attackers) != attackers:
            raise FederationError(
                f"attackers must be a whole number from 0 up, got {attackers}: how many clients of"
                " a round may be dishonest"
            )
        if not 1 <= keep <= attackers + 3:
            raise FederationError(
                f"keep must be from 1 to attackers + 3 = {attackers + 3}, got {keep}"
            )
        self.attackers, self.keep = int(attackers), int(keep)

    @property
    def min_updates(self) -> int:
        """Minimum number of updates of a round, :math:`2 f + 3`."""
        return 2 * self.attackers + 3

    def setup(self, federation: Federation) -> None:
        """Refuse rounds that are too small."""
        super().setup(federation)
        if (size := federation.sampling.size) < self.min_updates:
            raise FederationError(
                f"{describe(self)} needs {self.min_updates} clients in a round, and {size} are"
                " sampled: sample more clients, or choose another rule"
            )

    def conclude(self, returned: int, min_clients: int) -> Tensor | None:
        """Keep the model where too few clients returned; see :meth:`Aggregator.conclude`."""
        return super().conclude(returned, max(min_clients, self.min_updates))

    def center(self, deltas: Tensor, weights: Tensor) -> Tensor:
        """Return the mean of those with the best scores; see :class:`RobustAggregator`."""
        if len(deltas) < self.min_updates:
            return torch.zeros_like(deltas[0])
        scores = krum_scores(deltas[:, : self.num_parameters], self.attackers)
        return deltas[scores.argsort(stable=True)[: self.keep]].mean(0)


class GeometricMedian(RobustAggregator):
    r"""The point with the smallest mean distance to the updates (Pillutla et al., 2022, "RFA").

    See :func:`~lightning_fl.functional.robust.geometric_median`.

    Args:
        weighting: ``samples`` weighs a distance by the client's training samples, ``uniform``
            counts every client once: who lies about samples gains nothing.

    Raises:
        FederationError: If the weighting is unknown.
    """

    def __init__(self, weighting: Literal["samples", "uniform"] = "uniform") -> None:
        super().__init__()
        if weighting not in ("samples", "uniform"):
            raise FederationError(f"weighting must be samples or uniform, got {weighting!r}")
        self.weighting = weighting

    def center(self, deltas: Tensor, weights: Tensor) -> Tensor:
        """Return the geometric median; see :class:`RobustAggregator`."""
        uniform = self.weighting == "uniform"
        return geometric_median(deltas, torch.ones_like(weights) if uniform else weights)


class NormClipping(FedAvg):
    r"""The mean of updates none of which is longer than a norm (Sun et al., 2019).

    .. math:: w^{t+1} = w^t + \sum_k p_k \Delta_k \min(1, M / \|\Delta_k\|)

    Floating buffers are neither measured nor shortened.

    Args:
        max_norm: :math:`M`.
        weighting: See :class:`FedAvg`.

    Raises:
        FederationError: If the norm is not positive, or the weighting is unknown.

    Example:
        >>> rule = NormClipping(max_norm=1.0)
        >>> rule.start(torch.zeros(2))
        >>> rows = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> rule.update(ClientUpdate(torch.arange(2), rows, torch.ones(2)))
        >>> rule.compute(), rule.metrics()
        (tensor([0.3000, 0.4000]), {'clipped': 0.5})
    """

    count: Tensor
    hits: Tensor

    def __init__(
        self, max_norm: float = 1.0, weighting: Literal["samples", "uniform"] = "samples"
    ) -> None:
        super().__init__(weighting)
        if not 0 < max_norm < float("inf"):
            raise FederationError(f"max_norm must be positive and finite, got {max_norm}")
        self.max_norm = max_norm

    def allocate(self, server: Tensor) -> None:
        """Declare how many were clipped, too; see :meth:`FedAvg.allocate`."""
        super().allocate(server)
        for name in ("hits", "count"):
            zero = torch.zeros((), dtype=torch.float64, device=server.device)
            self.add_state(name, zero, dist_reduce_fx="sum")
        #: The part of the last round's updates that were clipped.
        self._part = 0.0

    def update(self, clients: ClientUpdate) -> None:
        """Add clipped updates to the weighted sum."""
        n = clients.delta.shape[1] if self.num_parameters is None else self.num_parameters
        delta = clients.delta.clone()
        for row in delta:  # each by itself: the norms of many may be rounded in another way
            self.hits += row[:n].norm() > self.max_norm
            row[:n] = clipped(row[None, :n], self.max_norm)[0]
        super().update(replace(clients, delta=delta))
        self.count += len(delta)

    def compute(self) -> Tensor:
        """Return server plus mean; see :meth:`FedAvg.compute`."""
        self._part = float(self.hits / self.count) if self.count else 0.0
        return super().compute()

    def metrics(self) -> dict[str, float]:
        """Return the part of the last round's updates that were clipped."""
        return {"clipped": self._part} if hasattr(self, "_part") else {}
