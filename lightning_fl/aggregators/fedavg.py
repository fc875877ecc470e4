"""Federated averaging."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.errors import FederationError
from lightning_fl.functional.summation import VectorSum, add_rows, sum_value
from lightning_fl.options import check_choice


class FedAvg(Aggregator):
    r"""Federated averaging (McMahan et al., 2017): add the mean client update to the global model.

    .. math:: w^{t+1} = w^t + \sum_{k \in S_t} \frac{n_k}{\sum_{j \in S_t} n_j} (w_k - w^t)

    The aggregation weights are normalized over the clients of the round, so the step size does not
    depend on the participation rate. With ``normalization="all"`` they are normalized over all
    clients, as in Algorithm 1 of Mostafa (2019): if half of the samples take part, the server makes
    half of the step. The result is independent of the order of the clients and of
    the number of processes (:mod:`~lightning_fl.functional.summation`).

    Args:
        weighting: ``samples`` weights a client by its number of training samples. ``uniform``
            gives all clients equal weight.
        normalization: Clients whose weights sum to 1: those of the ``round``, or ``all`` clients,
            with their samples at the start of the fit.

    Raises:
        FederationError: If an option is unknown.

    Example:
        >>> rule = FedAvg()
        >>> rule.start(torch.zeros(2))
        >>> rule.update(ClientUpdate(clients=torch.tensor([0, 1]),
        ...     delta=torch.tensor([[0.0, 1.0], [4.0, 5.0]]), num_samples=torch.tensor([3, 1])))
        >>> rule.compute()
        tensor([1., 2.])
    """

    total: VectorSum
    weight: Tensor

    def __init__(
        self,
        weighting: Literal["samples", "uniform"] = "samples",
        normalization: Literal["round", "all"] = "round",
    ) -> None:
        super().__init__()
        self.weighting = check_choice("weighting", weighting, "samples", "uniform")
        self.normalization = check_choice("normalization", normalization, "round", "all")

    def allocate(self, server: Tensor) -> None:
        """Declare the weighted sum of updates and the sum of weights."""
        self.add_sum("total", len(server))
        self.add_counts("weight")

    def update(self, clients: ClientUpdate) -> None:
        """Add updates to the weighted sum."""
        if not self.server.numel():  # Without start(), compute() returns the mean update.
            self.server = torch.zeros_like(clients.delta[0])
            self.allocate(self.server)
        weights = self._weights(clients)
        add_rows(self.total, clients.delta, weights)
        self.weight += weights.sum()

    def _weights(self, clients: ClientUpdate) -> Tensor:
        """Return the weights of clients before normalization, ``[k]`` in float64."""
        weights = clients.num_samples.to(self.weight)
        return weights if self.weighting == "samples" else torch.ones_like(weights)

    def compute(self) -> Tensor:
        """Return the global model plus the mean update, unchanged if no client returned."""
        return self.total.mean_plus(self.server, self._normalizer())

    def _mean(self) -> Tensor:
        """Return the mean update in float64, for child classes; zeros if no client returned."""
        return sum_value(self.total).div_(self._normalizer())

    def _normalizer(self) -> Tensor:
        """Return the sum of the weights over which they are normalized."""
        return self.weight.clamp(min=1) if self.normalization == "round" else self._weight_of_all()

    def _weight_of_all(self) -> Tensor:
        """Return the sum of the weights of all clients, sampled or not."""
        federation = self.known_federation
        samples = federation.num_samples
        if self.weighting == "uniform":
            samples = torch.ones(federation.num_clients)
        if samples is None:
            raise FederationError(
                f"{type(self).__name__} needs the number of samples of all clients, which is"
                " unknown outside of a fit: set weighting='uniform'"
            )
        return samples.sum()
