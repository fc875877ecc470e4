"""Who takes part in a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_fl.federation.context import Federation
from lightning_fl.types import FederationError


class ClientSampler(ABC):
    """Draws the cohort of a round."""

    def setup(self, federation: Federation) -> None:  # noqa: B027  # most fit every run
        """Learn what the run is, at the start of a fit.

        A sampler that does not fit the run raises a ``FederationError`` here.

        Args:
            federation: The run; ``federation.layout`` is None.
        """

    @abstractmethod
    def sample(
        self, round: int, count: int, num_samples: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the ids of different clients, ``count`` of them unless a rule says otherwise.

        Args:
            round: The round's number, counted from 0.
            count: How many clients take part.
            num_samples: Training samples of each client, ``[num_clients]``.
            generator: The round's own.
        """


class PoissonSampler(ClientSampler):
    """Every client by a coin of its own: ``count`` take part in the mean, sometimes nobody.

    Differential privacy is strongest with it. A round of nobody is a round all the same.

    Example:
        >>> random = torch.Generator().manual_seed(0)
        >>> [len(PoissonSampler().sample(t, 4, torch.ones(40), random)) for t in range(6)]
        [0, 5, 2, 6, 3, 1]
    """

    def sample(
        self, round: int, count: int, num_samples: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the ids whose coin has fallen."""
        n = len(num_samples)
        coins = torch.rand(n, generator=generator, dtype=torch.float64)
        return (coins < count / n).nonzero()[:, 0]


class UniformSampler(ClientSampler):
    """Every client with equal probability, without replacement.

    Example:
        >>> UniformSampler().sample(0, 4, torch.ones(4), torch.Generator()).sort().values
        tensor([0, 1, 2, 3])
    """

    def sample(
        self, round: int, count: int, num_samples: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the first ``count`` ids of a random order."""
        return torch.randperm(len(num_samples), generator=generator)[:count]


class WeightedSampler(ClientSampler):
    """Clients with given weights, without replacement.

    FedAvg weighs what returns by the numbers of samples as well; with this sampler choose
    ``FedAvg(weighting="uniform")`` unless large clients are to count twice.

    Args:
        weights: One non-negative weight a client, or ``samples``: numbers of training samples.

    Raises:
        FederationError: If the weights do not fit the clients, or fewer are positive than take
            part.

    Example:
        >>> WeightedSampler([0.0, 1.0, 1.0]).sample(0, 2, torch.ones(3), torch.Generator()).sum()
        tensor(3)
    """

    def __init__(self, weights: Literal["samples"] | Sequence[float] = "samples") -> None:
        if isinstance(weights, str):
            valid = weights == "samples"
        else:
            valid = all(0 <= w < float("inf") for w in weights)
        if not valid:
            raise FederationError(
                f"weights must be samples or finite numbers from 0 up, got {weights}"
            )
        self.weights = weights

    def setup(self, federation: Federation) -> None:
        """Refuse weights that do not fit the clients."""
        if federation.num_samples is not None:
            self._positive(federation.num_samples, federation.sampling.size)

    def sample(
        self, round: int, count: int, num_samples: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return ids drawn one after another with the weights that are left."""
        weights = self._positive(num_samples, count)
        # An exponential race: the first k to arrive are k draws without replacement.
        noise = torch.empty(len(weights), dtype=torch.float64).exponential_(generator=generator)
        return (noise / weights).argsort()[:count]

    def _positive(self, num_samples: Tensor, count: int) -> Tensor:
        """Return the weights, of which at least ``count`` are positive."""
        given = num_samples if isinstance(self.weights, str) else self.weights
        weights = torch.as_tensor(given, dtype=torch.float64)
        if len(weights) != len(num_samples):
            raise FederationError(f"{len(weights)} weights for {len(num_samples)} clients")
        if (positive := int((weights > 0).sum())) < count:
            raise FederationError(
                f"a round takes {count} clients, only {positive} have a positive weight: lower"
                " clients_per_round or client_fraction, or raise weights"
            )
        return weights


class RoundRobinSampler(ClientSampler):
    """Clients in turn: round t takes the ``count`` after those of round t - 1.

    Example:
        >>> RoundRobinSampler().sample(1, 2, torch.ones(3), torch.Generator())
        tensor([2, 0])
    """

    def sample(
        self, round: int, count: int, num_samples: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the next ``count`` ids."""
        return (round * count + torch.arange(count)) % len(num_samples)


def how_drawn(sampler: ClientSampler) -> Literal["poisson", "fixed", "other"]:
    """Return how a sampler draws clients, as private rules account for it.

    It is known of :class:`PoissonSampler` and :class:`UniformSampler` themselves. A child class may
    draw in another way, so every other class is ``other``, whatever it says of itself.

    Example:
        >>> how_drawn(UniformSampler()), how_drawn(RoundRobinSampler())
        ('fixed', 'other')
    """
    if type(sampler) is PoissonSampler:
        return "poisson"
    return "fixed" if type(sampler) is UniformSampler else "other"
