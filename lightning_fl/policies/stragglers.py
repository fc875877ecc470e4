"""Simulation of stragglers, which complete only part of their local work (Li et al., 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fl.functional.randomness import RandomStream
from lightning_fl.options import check_flag, check_number
from lightning_fl.policies.base import HyperparameterPolicy, PolicyWrapper, RandomPolicy
from lightning_fl.policies.schedule import Schedule


class Stragglers(PolicyWrapper, RandomPolicy):
    r"""Let a fraction of the sampled clients complete only a random part of their local work.

    Systems heterogeneity of Li et al. (2020, FedProx): in a cohort of :math:`k` clients
    :math:`\operatorname{round}(f k)` are stragglers, drawn in each round. Instead of :math:`E`
    epochs (or steps) a straggler makes an integer number of them, uniform in
    :math:`1 \dots E - 1`. If :math:`E` is less than two epochs, it makes a uniform fraction of
    :math:`E`. FedProx aggregates the partial work of stragglers; its baseline drops them. The
    stragglers and their work depend only on seed, round and cohort, so they are equal for all
    methods.

    Args:
        fraction: Fraction :math:`f` of stragglers, in [0, 1].
        policy: Hyperparameters of clients that complete their work. None means :class:`Schedule`.
        drop: Exclude stragglers from the round, in addition to clients that the policy excludes. If
            all clients are stragglers, one is kept.
        seed: Seed of the draws. None uses the seed of the run.

    Raises:
        FederationError: If the fraction is out of range.

    Example:
        >>> policy = Stragglers(0.5, Schedule(num_steps=100), seed=1)
        >>> policy.sample(0, torch.arange(4))["num_steps"]
        tensor([ 47,  87, 100, 100])
    """

    def __init__(
        self,
        fraction: float,
        policy: HyperparameterPolicy | None = None,
        drop: bool = False,
        seed: int | None = None,
    ) -> None:
        policy = Schedule() if policy is None else policy
        super().__init__(seed, policy.monitor, policy.phases)
        self.fraction = check_number("fraction", fraction, min=0, max=1)
        self.drop = check_flag("drop", drop)
        self.policy = policy
        self.learns_from = self.policy.learns_from

    def count(self, clients: int) -> int:
        """Return the number of stragglers in a cohort.

        Args:
            clients: Cohort size.
        """
        return min(round(self.fraction * clients), clients - self.drop)

    def sample(self, round: int, clients: Tensor) -> dict[str, Tensor]:
        """Return the hyperparameters of the policy, with less work for stragglers."""
        values = self.policy.drawn(round, clients)
        random, k = self.random(RandomStream.STRAGGLERS, round), len(clients)
        slow = torch.zeros(k, dtype=torch.bool)
        slow[torch.randperm(k, generator=random)[: self.count(k)]] = True
        part = torch.rand(k, generator=random, dtype=torch.float64)
        if self.drop:
            values["participates"] = ~slow & values.get("participates", torch.tensor(True))
            return values
        if "num_steps" in values:
            steps = values["num_steps"]
            less = 1 + (part * (steps - 1)).long()  # from 1 to steps - 1
            values["num_steps"] = torch.where(slow, torch.minimum(less, steps), steps)
        else:
            epochs = values.get("local_epochs", torch.ones(k)).double()
            less = torch.where(epochs < 2, part * epochs, 1 + (part * (epochs - 1)).floor())
            values["local_epochs"] = torch.where(slow, less, epochs)
        return values
