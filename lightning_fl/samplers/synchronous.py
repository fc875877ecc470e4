"""Samplers of synchronous rounds, in which all clients start from the current model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fl.contracts.context import Federation
from lightning_fl.errors import FederationError
from lightning_fl.functional.fairness import draw_from_mixture
from lightning_fl.options import check_integer, check_number, describe
from lightning_fl.samplers.base import ClientSampler


class PoissonSampler(ClientSampler):
    """Sample each client independently with equal probability.

    The number of sampled clients is ``count`` in expectation, and may be 0. Such a round is still
    counted. Poisson sampling gives the strongest privacy amplification.

    Example:
        >>> random = torch.Generator().manual_seed(0)
        >>> [len(PoissonSampler().sample(t, 4, torch.ones(40), random)) for t in range(6)]
        [0, 5, 2, 6, 3, 1]
    """

    def sample(
        self, round: int, count: int, num_samples: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the ids of the sampled clients."""
        n = len(num_samples)
        coins = torch.rand(n, generator=generator, dtype=torch.float64)
        return (coins < count / n).nonzero()[:, 0]


class UniformSampler(ClientSampler):
    """Sample clients uniformly without replacement.

    Example:
        >>> UniformSampler().sample(0, 4, torch.ones(4), torch.Generator()).sort().values
        tensor([0, 1, 2, 3])
    """

    def sample(
        self, round: int, count: int, num_samples: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the first ``count`` ids of a random permutation."""
        return torch.randperm(len(num_samples), generator=generator)[:count]


class WeightedSampler(ClientSampler):
    """Sample clients without replacement, with probabilities proportional to weights.

    FedAvg also weights updates by the number of samples. To avoid weighting clients twice, combine
    this sampler with ``FedAvg(weighting="uniform")``.

    Args:
        weights: One non-negative weight per client, or ``samples`` to use the numbers of training
            samples.

    Raises:
        FederationError: If a weight is negative. In a round, if the number of weights differs from
            the number of clients, or fewer weights are positive than clients are sampled.

    Example:
        >>> WeightedSampler([0.0, 1.0, 1.0]).sample(0, 2, torch.ones(3), torch.Generator()).sum()
        tensor(3)
    """

    def __init__(self, weights: Literal["samples"] | Sequence[float] = "samples") -> None:
        self.weights: str | list[float] = "samples"
        if not isinstance(weights, str) or weights != "samples":
            self.weights = [
                check_number(f"weights[{i}]", weight, min=0) for i, weight in enumerate(weights)
            ]

    def sample(
        self, round: int, count: int, num_samples: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return ids drawn sequentially with probabilities proportional to the weights."""
        given = num_samples if isinstance(self.weights, str) else self.weights
        weights = torch.as_tensor(given, dtype=torch.float64)
        if len(weights) != len(num_samples):
            raise FederationError(
                f"weights must have {len(num_samples)} entries, one per client, got {len(weights)}"
            )
        positive, hint = int((weights > 0).sum()), "decrease clients_per_round or client_fraction"
        check_integer(
            "the number of clients with a positive weight", positive, min=count, hint=hint
        )
        # Exponential race: the first k draws are k weighted draws without replacement.
        noise = torch.empty(len(weights), dtype=torch.float64).exponential_(generator=generator)
        return (noise / weights).argsort()[:count]


class RoundRobinSampler(ClientSampler):
    """Select clients in order: each round continues after the clients of the previous one.

    Example:
        >>> RoundRobinSampler().sample(1, 2, torch.ones(3), torch.Generator())
        tensor([2, 0])
    """

    def sample(
        self, round: int, count: int, num_samples: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the next ``count`` ids."""
        return (round * count + torch.arange(count)) % len(num_samples)


class AFLSampler(ClientSampler):
    r"""Sample clients with the probabilities of the aggregation rule, and as many uniformly.

    For :class:`~lightning_fl.aggregators.AFL` with ``mode="sampling"``: ``count`` clients are drawn
    with replacement with the probabilities :math:`\lambda` of the rule. In addition, ``count``
    clients are drawn uniformly without replacement; their losses update :math:`\lambda`. A round
    has the clients of both draws, at most twice ``count``. The draws depend on the saved state of
    the rule, so a resumed run repeats them.

    Raises:
        FederationError: At the start of a fit, if the rule has no sampling probabilities.
    """

    def __init__(self) -> None:
        self._rule: Any = None

    def setup(self, federation: Federation) -> None:
        """Take the rule of the run; refuse rules without sampling probabilities."""
        self._rule, samples = federation.aggregator, federation.num_samples
        if samples is None or self._rule.sampling_probabilities(samples) is None:
            raise FederationError(
                f"AFLSampler draws clients by the mixture of AFL(mode='sampling'), and the"
                f" aggregator is {describe(self._rule)}: choose this aggregator, or another sampler"
            )

    def sample(
        self, round: int, count: int, num_samples: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the ids of the clients of both draws."""
        mixture = self._rule.sampling_probabilities(num_samples)
        draws, evaluated = draw_from_mixture(mixture, count, generator)
        return ((draws > 0) | evaluated).nonzero()[:, 0]


class HighLossSampler(ClientSampler):
    r"""Sample the clients with the largest losses among random candidates.

    Power-of-choice (Cho et al., 2022), for :class:`~lightning_fl.aggregators.PowerOfChoice`:
    ``candidates`` clients are drawn without replacement, with probabilities in proportion to their
    numbers of samples. The ``count`` candidates with the largest losses train. The loss of a client
    is the one that it reported when it last trained, which needs no additional traffic; a client
    that has not trained comes first. The draws depend on the saved state of the rule, so a resumed
    run repeats them.

    Args:
        candidates: Number of candidates. With as many as clients per round, it is
            :class:`WeightedSampler`.

    Raises:
        FederationError: At the start of a fit, if the rule notes no losses, or there are more
            candidates than clients or fewer than clients per round.
    """

    def __init__(self, candidates: int) -> None:
        self.candidates = check_integer("candidates", candidates, min=1)
        self._rule: Any = None

    def setup(self, federation: Federation) -> None:
        """Take the rule of the run; check the number of candidates."""
        self._rule, clients = federation.aggregator, federation.num_clients
        if self._rule.known_losses() is None:
            raise FederationError(
                f"HighLossSampler draws by the losses that PowerOfChoice notes, and the aggregator"
                f" is {describe(self._rule)}: set aggregator=PowerOfChoice(), or another sampler"
            )
        count, hint = federation.sampling.size, "from the clients per round to all clients"
        check_integer("candidates", self.candidates, min=count, max=clients, hint=hint)

    def sample(
        self, round: int, count: int, num_samples: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the ids of the candidates with the largest losses."""
        drawn = WeightedSampler().sample(round, self.candidates, num_samples, generator)
        losses = self._rule.known_losses().cpu()
        if not len(losses):
            return drawn[:count]
        return drawn[losses[drawn].argsort(descending=True, stable=True)[:count]]


def how_drawn(sampler: ClientSampler) -> Literal["poisson", "fixed", "other"]:
    """Return the sampling scheme of a sampler for privacy accounting.

    Only :class:`PoissonSampler` and :class:`UniformSampler` have a known scheme. Subclasses may
    sample differently, so every other class is ``other``.

    Example:
        >>> how_drawn(UniformSampler()), how_drawn(RoundRobinSampler())
        ('fixed', 'other')
    """
    if type(sampler) is PoissonSampler:
        return "poisson"
    return "fixed" if type(sampler) is UniformSampler else "other"
