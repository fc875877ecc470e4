"""Byzantine-robust aggregation rules."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.aggregators.fedavg import FedAvg
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.errors import FederationError
from lightning_fl.functional.privacy import clipped_update
from lightning_fl.functional.robust import (
    coordinate_median,
    geometric_median,
    krum_scores,
    trimmed_mean,
)
from lightning_fl.options import check_choice, check_integer, check_number, describe


class RobustAggregator(Aggregator):
    """Base class of Byzantine-robust rules, which replace the mean by a robust center.

    All updates of a round are stored until the end of the round. Subclasses implement
    :meth:`center`.
    """

    def allocate(self, server: Tensor) -> None:
        """Declare the updates of the round."""
        self.add_lists("ids", "deltas", "weights")

    def update(self, clients: ClientUpdate) -> None:
        """Store updates until the end of the round."""
        self.append(ids=clients.clients, deltas=clients.delta, weights=clients.num_samples)

    def compute(self) -> Tensor:
        """Return the global model plus the center, unchanged if no client returned."""
        if not (found := self.gather_by_client("ids", "deltas", "weights")):
            return self.server
        _, deltas, weights = found
        center = self.center(deltas.double(), weights.double())
        return (self.server.double() + center).to(self.server.dtype)

    @abstractmethod
    def center(self, deltas: Tensor, weights: Tensor) -> Tensor:
        """Return a robust center of the updates.

        Args:
            deltas: Client updates in float64, ``[k, P]``.
            weights: Number of samples of each client, ``[k]``.

        Returns:
            The center, ``[P]``.
        """


class CoordinateMedian(RobustAggregator):
    r"""Coordinate-wise median with equal client weights (Yin et al., 2018).

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
    r"""Coordinate-wise trimmed mean with equal client weights (Yin et al., 2018).

    See :func:`~lightning_fl.functional.robust.trimmed_mean`.

    Args:
        fraction: Fraction of the clients to remove at either end of each coordinate, rounded down,
            in [0, 0.5). The rule tolerates this fraction of attackers.

    Raises:
        FederationError: If the fraction is out of range.
    """

    def __init__(self, fraction: float = 0.2) -> None:
        super().__init__()
        self.fraction = check_number("fraction", fraction, min=0, below=0.5)

    def center(self, deltas: Tensor, weights: Tensor) -> Tensor:
        """Return the trimmed mean; see :class:`RobustAggregator`."""
        # The offset corrects rounding errors: 0.29 * 100 is less than 29 in binary.
        return trimmed_mean(deltas, math.floor(self.fraction * len(deltas) + 1e-9))


class Krum(RobustAggregator):
    r"""Krum and Multi-Krum: the mean of the most central updates (Blanchard et al., 2017).

    See :func:`~lightning_fl.functional.robust.krum_scores`. Scores ignore floating-point
    buffers. All clients have equal weight. A round requires :math:`2 f + 3` client updates; with
    fewer the global model is unchanged.

    Args:
        attackers: Maximum number :math:`f` of malicious clients per round.
        keep: Number of updates to average: 1 is Krum, more is Multi-Krum. At most :math:`f + 3`,
            the number of honest updates in the smallest round.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if too few clients are
            sampled per round.
    """

    def __init__(self, attackers: int = 1, keep: int = 1) -> None:
        super().__init__()
        hint = "set it to the maximum number of malicious clients per round"
        self.attackers = check_integer("attackers", attackers, min=0, hint=hint)
        hint = "the maximum is attackers + 3"
        self.keep = check_integer("keep", keep, min=1, max=self.attackers + 3, hint=hint)

    @property
    def min_updates(self) -> int:
        """Minimum number of client updates per round, :math:`2 f + 3`."""
        return 2 * self.attackers + 3

    def setup(self, federation: Federation) -> None:
        """Raise an error if too few clients are sampled per round."""
        super().setup(federation)
        if (size := federation.sampling.size) < self.min_updates:
            raise FederationError(
                f"{describe(self)} requires {self.min_updates} clients per round, and {size} are"
                " sampled: sample more clients, or use another aggregator"
            )

    def conclude(self, returned: int, min_clients: int) -> Tensor | None:
        """Keep the model if too few clients returned; see :meth:`Aggregator.conclude`."""
        return super().conclude(returned, max(min_clients, self.min_updates))

    def center(self, deltas: Tensor, weights: Tensor) -> Tensor:
        """Return the mean of the updates with the best scores; see :class:`RobustAggregator`."""
        scores = krum_scores(deltas[:, : self.num_parameters], self.attackers)
        return deltas[scores.argsort(stable=True)[: self.keep]].mean(0)


class GeometricMedian(RobustAggregator):
    r"""Geometric median: the point of minimum mean distance (Pillutla et al., 2022, "RFA").

    See :func:`~lightning_fl.functional.robust.geometric_median`. Distances include floating-point
    buffers, in contrast to those of :class:`Krum`.

    Args:
        weighting: ``samples`` weights a distance by the client's number of training samples.
            ``uniform`` gives all clients equal weight and is robust to false sample counts.

    Raises:
        FederationError: If the weighting is unknown.
    """

    def __init__(self, weighting: Literal["samples", "uniform"] = "uniform") -> None:
        super().__init__()
        self.weighting = check_choice("weighting", weighting, "samples", "uniform")

    def center(self, deltas: Tensor, weights: Tensor) -> Tensor:
        """Return the geometric median; see :class:`RobustAggregator`."""
        uniform = self.weighting == "uniform"
        return geometric_median(deltas, torch.ones_like(weights) if uniform else weights)


class NormClipping(FedAvg):
    r"""Mean of norm-clipped client updates (Sun et al., 2019).

    .. math:: w^{t+1} = w^t + \sum_k p_k \Delta_k \min(1, M / \|\Delta_k\|)

    Floating-point buffers are not part of the norm, and are not clipped.

    Args:
        max_norm: Maximum norm :math:`M` of an update.
        weighting: ``samples`` weights a client by its number of training samples. ``uniform``
            gives all clients equal weight.

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
        self.max_norm = check_number("max_norm", max_norm, above=0)

    def allocate(self, server: Tensor) -> None:
        """Declare also the number of clipped updates; see :meth:`FedAvg.allocate`."""
        super().allocate(server)
        self.add_counts("hits", "count")

    def update(self, clients: ClientUpdate) -> None:
        """Add clipped updates to the weighted sum."""
        n = clients.delta.shape[1] if self.num_parameters is None else self.num_parameters
        delta = clients.delta.clone()
        for row in delta:  # separately: batched norms may round differently
            row[:n], is_below = clipped_update(row[:n], self.max_norm)
            self.hits += ~is_below
        super().update(replace(clients, delta=delta))
        self.count += len(delta)

    def compute(self) -> Tensor:
        """Return the global model plus the mean; see :meth:`FedAvg.compute`."""
        part = float(self.hits / self.count) if self.count else 0.0
        self.round_metrics = {"clipped": part}
        return super().compute()
