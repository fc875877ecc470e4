"""Drawing of round plans: sampled clients, hyperparameters and processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.contracts.data import FederatedData
from lightning_fl.contracts.hyperparameters import Declared
from lightning_fl.contracts.phases import phase_ends, steps_left
from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.errors import FederationError
from lightning_fl.federation.processes import Processes
from lightning_fl.federation.progress import Progress
from lightning_fl.federation.run_options import RunOptions
from lightning_fl.federation.table import COLUMNS
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.policies.base import HyperparameterPolicy, local_steps
from lightning_fl.runners import VectorizedClients
from lightning_fl.samplers import ClientSampler

#: Hyperparameters that the loop uses.
KNOWN_VALUES = {"lr", "lr_factor", "num_steps", "local_epochs", "participates"}


def draw_clients(
    sampler: ClientSampler, seed: int, round: int, size: int, num_samples: Tensor
) -> Tensor:
    """Return the clients that a sampler draws for a round, sorted by id.

    Args:
        sampler: The sampler.
        seed: Seed of the run.
        round: Index of the round.
        size: Number of clients to sample.
        num_samples: Number of training samples per client, ``[num_clients]``.

    Raises:
        FederationError: If the sampler returns duplicate or unknown clients.
    """
    n, random = len(num_samples), generator(seed, RandomStream.COHORT, round)
    clients = torch.as_tensor(sampler.sample(round, size, num_samples, random)).sort().values
    if len(clients.unique()) != len(clients) or not ((clients >= 0) & (clients < n)).all():
        raise FederationError(
            f"{type(sampler).__name__} must return distinct clients from 0 to {n - 1},"
            f" got {clients.tolist()}"
        )
    return clients


def check_values(
    policy: HyperparameterPolicy, declared: Declared, values: Mapping[str, Tensor], round: int
) -> None:
    """Check the numbers that the module declares, and warn of unknown names.

    Args:
        policy: The policy.
        declared: Numbers of the module that the policy may set.
        values: What the policy has chosen, by name.
        round: Index of the round.

    Raises:
        FederationError: If a number is out of its range.
    """
    name, known = type(policy).__name__, KNOWN_VALUES | declared.values.keys()
    if unknown := sorted(values.keys() - known):
        rank_zero_warn(
            f"{name} sets {unknown[0]}, which the loop has no use for: it knows"
            f" {sorted(known)}. Others are in plan().hyperparameters for code of your own"
        )
    for each, value in values.items():
        declared.check(f"{name} in round {round + 1}", each, value.tolist())


def draw_values(
    policy: HyperparameterPolicy,
    round: int,
    clients: Tensor,
    batches_per_epoch: Tensor,
    declared: Declared,
) -> tuple[Tensor, dict[str, Tensor], Tensor, bool]:
    """Return the clients that take part, their hyperparameters and numbers of local steps.

    Args:
        policy: The policy.
        round: Index of the round.
        clients: The sampled clients, ``[k]``.
        batches_per_epoch: Number of batches per local epoch of each client, ``[num_clients]``.
        declared: Numbers of the module that the policy may set.

    Returns:
        Clients, values by name, numbers of local steps, and whether the round has no client. One
        client is returned in any case, since a training loader is not empty.
    """
    if is_empty := not len(clients):
        clients = torch.zeros(1, dtype=torch.int64)
    values = policy.drawn(round, clients)
    check_values(policy, declared, values, round)
    if (participates := values.pop("participates", None)) is not None:
        if not participates.any():
            is_empty, participates = True, torch.arange(len(clients)) == 0
        clients = clients[participates]
        values = {name: value[participates] for name, value in values.items()}
    steps = local_steps(values, batches_per_epoch[clients])
    values.pop("num_steps" if "num_steps" in values else "local_epochs", None)
    return clients, values, steps, is_empty


class Planner:
    """Draw the plan of each round.

    A plan depends on the seed of the run, the round, the data, and the states of the policy and the
    rule, which are saved in checkpoints.

    Args:
        trainer: The Trainer of the fit.
        data: The data module of the federation.
        options: Options of the run.
        progress: Progress of the run: its seed and its current round.
        vectorized: The wrapper of the module if clients train at once; None if they train one after
            another.
        processes: The processes of the fit.
        declared: Numbers of the module that the policy may set.

    Raises:
        FederationError: If the module declares a number with a name that the loop uses.
    """

    def __init__(
        self,
        trainer: Trainer,
        data: FederatedData,
        options: RunOptions,
        progress: Progress,
        vectorized: VectorizedClients | None,
        processes: Processes,
        declared: Declared,
    ) -> None:
        self._trainer: Any = trainer  # its connectors set attributes that it does not declare
        self._data, self._progress = data, progress
        #: Number of local steps of an optimizer step, with automatic optimization.
        self.accumulated: int = trainer.accumulate_grad_batches
        self._policy, self._sampler = options.policy, options.sampler
        self._vectorizer, self._processes = vectorized, processes
        self._phases, self._has_warned = options.phases, False
        self._declared = declared
        if taken := sorted(declared.values.keys() & (KNOWN_VALUES | COLUMNS)):
            raise FederationError(
                f"{type(declared.module).__name__}.federated_hyperparameters has the name"
                f" {taken[0]!r}, which the loop uses itself: choose another name"
            )
        self._log_every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._plan: RoundPlan | None = None
        #: Function that changes each plan after it was drawn; see ``lightning_fl.check``.
        self.change: Callable[[RoundPlan], RoundPlan] = lambda plan: plan
        #: Number of clients sampled per round.
        self.cohort_size = options.cohort_size(len(data.num_samples))
        #: Number of samples, and of batches per local epoch, of each client.
        self.num_samples: Tensor = data.num_samples
        self.batches_per_epoch: Tensor = data.batches_per_epoch
        self._total_steps: dict[int, int] = {}

    @property
    def num_clients(self) -> int:
        """Number of clients in the federation."""
        return len(self.num_samples)

    def _advance(self, round: int) -> None:
        """Make the samples of a round available."""
        if self._data.advance(round):
            self.num_samples = self._data.num_samples
            self.batches_per_epoch = self._data.batches_per_epoch

    def plan(self) -> RoundPlan:
        """Return the plan of the current round. It is drawn once."""
        plan, now = self._plan, self._progress
        if plan is None or (plan.seed, plan.round) != (now.seed, now.round):
            self._advance(now.round)
            self._plan = plan = self.draw()
            # Lightning would warn in every round that is shorter than its logging interval.
            self._trainer.log_every_n_steps = min(self._log_every_n_steps, len(plan.schedule))
        return plan

    def forget(self) -> None:
        """Draw the plan again, because the state of the policy was loaded."""
        self._plan = None

    def draw(self) -> RoundPlan:
        """Draw the plan of the current round for this process. Its samples must be available.

        Raises:
            FederationError: If the sampler returns duplicate or unknown clients.
        """
        seed, round = self._progress.seed, self._progress.round
        drawn = draw_clients(self._sampler, seed, round, self.cohort_size, self.num_samples)
        clients, values, steps, is_empty = draw_values(
            self._policy, round, drawn, self.batches_per_epoch, self._declared
        )
        if batches := self._trainer.fast_dev_run:
            # One short round with the requested number of batches and at least one step per client.
            clients = clients[: int(batches)]
            values = {name: value[: len(clients)] for name, value in values.items()}
            steps = torch.full_like(clients, int(batches) // len(clients))
            steps[0] += int(batches) - int(steps.sum())
        else:
            self._check_phases(round, clients, steps)
        if is_empty:
            steps = torch.ones_like(clients)
        lr = values.pop("lr", None)
        work = steps * self._data.batch_sizes(clients, 0, 1)[0]
        plan = RoundPlan(seed, round, clients, steps, lr, values, is_empty=is_empty, work=work)
        plan = self.change(self._processes.place(plan))
        vectorizer = self._vectorizer
        if vectorizer is None or vectorizer.reason is not None or batches:
            return plan
        return self._vectorized(plan, vectorizer)

    def phase_ends(self, clients: Tensor, num_steps: Tensor) -> Tensor:
        """Return the local step at which each phase of clients ends, ``[k, phases]``."""
        if not self._phases:
            return num_steps.new_zeros(len(num_steps), 0)
        return phase_ends(self._phases, num_steps, self.batches_per_epoch[clients])

    def _check_phases(self, round: int, clients: Tensor, steps: Tensor) -> None:
        """Warn once of clients with too few local steps for all phases.

        Raises:
            FederationError: If no client of the first round has enough.
        """
        if not self._phases or self._has_warned:
            return
        short = clients[steps_left(self._phases, steps, self.batches_per_epoch[clients]) < 1]
        if not len(short):
            return
        text = (
            f"in round {round + 1}, {len(short)} of {len(clients)} clients (client"
            f" {int(short[0])}) have too few local steps for all phases, so that the phase without"
            " an amount trains nothing there: increase the local steps of the policy"
        )
        if round == 0 and len(short) == len(clients):
            raise FederationError(text)
        self._has_warned = True
        rank_zero_warn(text)

    def _vectorized(self, plan: RoundPlan, vectorizer: VectorizedClients) -> RoundPlan:
        """Return the plan with groups of clients that train at once."""
        clients, data = plan.clients, self._data
        samples = int(data.batch_sizes(clients, 0, 1).max())
        fixed = vectorizer.fixed_groups
        each = len(clients) if fixed else -(-len(clients) // plan.world_size)
        stepwise = data.can_fetch_steps
        count, steps = vectorizer.layout(each, samples * data.sample_bytes, stepwise)
        return replace(
            plan, group_size=count, steps_per_batch=steps, stepwise=stepwise, fixed_groups=fixed
        )

    @property
    def is_drawn(self) -> bool:
        """Whether the training loader was made for a round, which draws the plan."""
        return self._plan is not None

    def most_local_steps(self) -> int:
        """Return the maximum number of local steps of any client in the current round."""
        round = self._progress.round
        self._advance(round)  # a module may ask before the first round
        if self._trainer.fast_dev_run:
            return int(self.draw().num_steps.max())
        return self._policy.max_local_steps(round, self.batches_per_epoch)

    def stepping_batches(self) -> int | float:
        """Return the number of scheduler steps of one client in the whole run.

        The schedule of a round continues from the client with the most local steps. The result is
        the sum over rounds of the maximum number of optimizer steps of any client, which is an
        upper bound if that client is not sampled in every round.
        """
        trainer, round = self._trainer, self._progress.round
        if trainer.fast_dev_run:
            return -(-self.most_local_steps() // self.accumulated)
        if (rounds := trainer.max_epochs) is None or rounds < 0:
            return math.inf
        if rounds not in self._total_steps:
            total = 0
            for each in range(rounds):
                self._advance(each)
                steps = self._policy.max_local_steps(each, self.batches_per_epoch)
                total += -(-steps // self.accumulated)
            self._advance(round)
            self._total_steps[rounds] = total
        return self._total_steps[rounds]
