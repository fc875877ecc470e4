"""Federated averaging."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.types import ClientUpdate, FederationError

#: Numbers that are added at once.
PIECE = 2**16


class FedAvg(Aggregator):
    r"""Move the server by the mean update of the clients that returned (McMahan et al., 2017).

    .. math:: w^{t+1} = w^t + \sum_{k \in S_t} \frac{n_k}{\sum_{j \in S_t} n_j} (w_k - w^t)

    The weights are normalised over the clients of the round, so the step does not shrink with
    participation. Sums are kept in float64: the order of clients changes rounding only.

    Args:
        weighting: ``samples`` weighs a client by its number of training samples, ``uniform``
            counts every client once.

    Raises:
        FederationError: If the weighting is unknown.

    Example:
        >>> rule = FedAvg()
        >>> rule.start(torch.zeros(2))
        >>> rule.update(ClientUpdate(clients=torch.tensor([0, 1]),
        ...     delta=torch.tensor([[0.0, 1.0], [4.0, 5.0]]), num_samples=torch.tensor([3, 1])))
        >>> rule.compute()
        tensor([1., 2.])
    """

    forgets = True
    total: Tensor
    weight: Tensor

    def __init__(self, weighting: Literal["samples", "uniform"] = "samples") -> None:
        super().__init__()
        if weighting not in ("samples", "uniform"):
            raise FederationError(f"weighting must be samples or uniform, got {weighting!r}")
        self.weighting = weighting

    def allocate(self, server: Tensor) -> None:
        """Declare the weighted sum of updates and the sum of weights."""
        zeros = torch.zeros_like(server, dtype=torch.float64)
        self.add_state("total", zeros, dist_reduce_fx="sum")
        self.add_state("weight", zeros.new_zeros(1), dist_reduce_fx="sum")

    def update(self, clients: ClientUpdate) -> None:
        """Add updates to the weighted sum."""
        if not self.server.numel():  # Without a start it is the mean update.
            self.server = torch.zeros_like(clients.delta[0])
            self.allocate(self.server)
        weights = clients.num_samples.to(self.total)
        if self.weighting == "uniform":
            weights = torch.ones_like(weights)
        for row, weight in zip(clients.delta, weights.tolist(), strict=True):
            # Piece by piece: torch copies to float64 first, which has to stay in the cache.
            for total, piece in zip(self.total.split(PIECE), row.split(PIECE), strict=True):
                total.add_(piece, alpha=weight)
        self.weight += weights.sum()

    def compute(self) -> Tensor:
        """Return server plus mean update; the server itself when nobody returned."""
        mean = self.total / self.weight if self.weight else self.total
        return (self.server + mean).to(self.server.dtype)
