"""Switch between hyperparameter policies during a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.feedback import Feedback
from lightning_fl.errors import FederationError
from lightning_fl.functional.randomness import RandomStream, derive_seed
from lightning_fl.functional.stages import check_stages, stage_of
from lightning_fl.policies.base import HyperparameterPolicy, shared_monitor


class StagedPolicy(HyperparameterPolicy):
    """Switch from one policy to the next after a given number of rounds.

    See ``aggregators.Staged`` for the counterpart of aggregators.

    Args:
        rounds: Number of rounds of each stage except the last.
        policies: Policy of each stage, one more than ``rounds``. Each policy counts rounds from the
            start of its stage.

    Raises:
        FederationError: If ``rounds`` and ``policies`` do not match, or policies have different
            phases or monitor different validation losses.

    Example:
        >>> import torch
        >>> from lightning_fl.policies import Schedule
        >>> policy = StagedPolicy([3], [Schedule(num_steps=50), Schedule(num_steps=5)])
        >>> [int(policy.sample(t, torch.arange(1))["num_steps"]) for t in (0, 2, 3)]
        [50, 50, 5]
    """

    stage: Tensor

    def __init__(self, rounds: Sequence[int], policies: Sequence[HyperparameterPolicy]) -> None:
        super().__init__()
        check_stages(rounds, policies, "policies")
        self.rounds = list(rounds)
        self.policies = nn.ModuleList(policies)
        self.learns_from = frozenset().union(*(policy.learns_from for policy in policies))
        self.monitor, self.phases = shared_monitor(policies), policies[0].phases
        if any(policy.phases != self.phases for policy in policies):
            raise FederationError(
                "policies must have the same phases, which hold for all rounds of a run"
            )
        #: Stage of the last update.
        self.register_buffer("stage", torch.tensor(0))

    def setup(self, federation: Federation) -> None:
        """Set up all policies; each may reject the run.

        Each stage has a seed of its own, since random draws depend on the round of the stage.
        """
        for stage, policy in enumerate(self.policies):
            key = (RandomStream.POLICY, stage)
            seed = derive_seed(federation.seed, *key) if stage else federation.seed
            cast("HyperparameterPolicy", policy).setup(replace(federation, seed=seed))

    def _at(self, round: int) -> tuple[HyperparameterPolicy, int]:
        """Return the policy of a round, and the round index within its stage."""
        stage = stage_of(self.rounds, round)
        return cast("HyperparameterPolicy", self.policies[stage]), round - sum(self.rounds[:stage])

    def sample(self, round: int, clients: Tensor) -> dict[str, Tensor]:
        """Return the hyperparameters of the policy of the stage."""
        policy, own = self._at(round)
        return policy.sample(own, clients)

    def max_local_steps(self, round: int, batches_per_epoch: Tensor) -> int:
        """Return the upper bound of the policy of the stage."""
        policy, own = self._at(round)
        return policy.max_local_steps(own, batches_per_epoch)

    def update(self, feedback: Feedback) -> None:
        """Update the policy of the stage."""
        policy, own = self._at(feedback.plan.round)
        policy.update(replace(feedback, plan=replace(feedback.plan, round=own)))
        self.stage.fill_(stage_of(self.rounds, feedback.plan.round))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the policy of the last round."""
        return cast("HyperparameterPolicy", self.policies[int(self.stage)]).metrics()
