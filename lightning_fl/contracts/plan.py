"""The plan of a round: its clients, their work, and the batches of each process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_fl.errors import FederationError
from lightning_fl.options import check_integer, check_number


class Cohort(NamedTuple):
    """Number of clients sampled per round, and how they are sampled.

    Args:
        size: Expected number of sampled clients.
        clients: Number of clients in the federation.
        drawn: Sampling scheme. ``poisson``: each client is sampled independently. ``fixed``: a
            uniformly random set of ``size`` clients. ``other``: any other scheme.

    Example:
        >>> Cohort(size=10, clients=10, drawn="poisson").is_sampled
        False
    """

    size: int
    clients: int
    drawn: Literal["poisson", "fixed", "other"] = "fixed"

    @property
    def is_sampled(self) -> bool:
        """Whether a round samples fewer than all clients."""
        return self.size < self.clients


class Step(NamedTuple):
    """One training batch of a round: local steps of the clients that train at once.

    Args:
        rows: Positions of the clients in the plan. Empty in an idle step, in which the process
            waits for the others.
        start: Number of local steps that these clients have completed before.
        steps: Number of local steps in this batch.
        last: Whether the clients finish with this batch.
    """

    rows: tuple[int, ...]
    start: int
    steps: int
    last: bool

    @property
    def first(self) -> bool:
        """Whether this is the first batch of the clients."""
        return bool(self.rows) and self.start == 0


#: Batch of a process without clients left. Lightning needs the same number on all processes.
IDLE = Step((), 0, 0, False)


@dataclass(frozen=True)
class RoundPlan:
    """Clients of a round with their numbers of local steps and hyperparameters.

    Args:
        seed: Seed of the run. Random numbers in training depend on (seed, round, client).
        round: Index of the round, from 0.
        clients: Ids of the participating clients, ``[k]``.
        num_steps: Number of local steps per client, ``[k]``, at least 1.
        lr: Learning rate per client, ``[k]``; None uses the learning rate of the module's
            optimizer.
        hyperparameters: Further hyperparameters by name, each ``[k]``. ``lr_factor`` multiplies the
            learning rate.
        group_size: Maximum number of clients that train at once.
        steps_per_batch: Maximum number of local steps in one training batch.
        stepwise: Whether the loader fetches only the first local step of a batch. The runner then
            fetches the other steps one at a time.
        rank: Rank of this process. Only :attr:`schedule` and :attr:`rows` depend on it.
        world_size: Number of processes that share the clients.
        is_empty: Whether no client was sampled. Such a round trains one placeholder client and
            discards its update.
        fixed_groups: Whether groups are formed from all clients of the round before they are
            assigned to processes, so that groups do not depend on the number of processes.
        work: Number of samples of each client in all its local steps, ``[k]``, by which processes
            are balanced; None balances the local steps.
        is_reversed: Whether the clients of each process train in reverse order, which must not
            change results (:func:`lightning_fl.testing.check_federation`).

    Raises:
        FederationError: If there are no clients, a shape differs from that of ``clients``, or a
            number of steps or a learning rate is out of range.

    Example:
        >>> plan = RoundPlan(seed=0, round=0, clients=torch.tensor([4, 7]),
        ...                  num_steps=torch.tensor([1, 2]))
        >>> plan.schedule[1]
        Step(rows=(1,), start=0, steps=1, last=False)
    """

    seed: int
    round: int
    clients: Tensor
    num_steps: Tensor
    lr: Tensor | None = None
    hyperparameters: Mapping[str, Tensor] = field(default_factory=dict)
    group_size: int = 1
    steps_per_batch: int = 1
    stepwise: bool = False
    rank: int = 0
    world_size: int = 1
    is_empty: bool = False
    fixed_groups: bool = False
    work: Tensor | None = None
    is_reversed: bool = False

    def __post_init__(self) -> None:
        if not len(self.clients):
            raise FederationError(f"round {self.round + 1} has no clients: sample at least one")
        given = {"num_steps": self.num_steps, "lr": self.lr, "work": self.work}
        given |= self.hyperparameters
        for name, value in given.items():
            if value is not None and value.shape != self.clients.shape:
                raise FederationError(
                    f"{name} has shape {tuple(value.shape)} for {len(self.clients)} clients: a"
                    " policy must return a scalar or one value per client"
                )
        check_integer(f"num_steps in round {self.round + 1}", self.num_steps.min().item(), min=1)
        for lr in {*self.lr.tolist()} if self.lr is not None else ():
            check_number(f"lr in round {self.round + 1}", lr, min=0)

    @property
    def cohort(self) -> Tensor:
        """Ids of the sampled clients; empty if ``is_empty``."""
        return self.clients[:0] if self.is_empty else self.clients

    @cached_property
    def shares(self) -> list[list[int]]:
        """Positions of the clients of each process, balanced by their work."""
        return [sorted(row for group in groups for row in group) for groups in self._groups]

    @cached_property
    def _groups(self) -> list[list[tuple[int, ...]]]:
        """Groups of clients that train at once, per process.

        Groups are assigned in decreasing order of work, each to the process with the least.
        """
        each = (self.num_steps if self.work is None else self.work).tolist()
        rows = list(range(len(each)))
        units = self._cut(rows) if self.fixed_groups else [(row,) for row in rows]
        work = {unit: sum(each[row] for row in unit) for unit in units}
        load = [0] * self.world_size
        shares: list[list[tuple[int, ...]]] = [[] for _ in load]
        for unit in sorted(units, key=lambda unit: -work[unit]):
            rank = load.index(min(load))
            shares[rank].append(unit)
            load[rank] += work[unit]
        if not self.fixed_groups:
            shares = [self._cut(sorted(row for unit in own for row in unit)) for own in shares]
        return [share[::-1] for share in shares] if self.is_reversed else shares

    def _cut(self, rows: list[int]) -> list[tuple[int, ...]]:
        """Split clients into groups of similar work. Group sizes differ by at most one."""
        steps = self.num_steps.tolist()
        if self.group_size > 1:
            rows = sorted(rows, key=lambda row: -steps[row])
        count = -(-len(rows) // self.group_size)
        sizes = [len(rows) // count + (i < len(rows) % count) for i in range(count)]
        ends = list(accumulate(sizes))
        return [tuple(rows[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    @property
    def rows(self) -> list[int]:
        """Positions of the clients of this process."""
        return self.shares[self.rank]

    @cached_property
    def schedule(self) -> list[Step]:
        """Training batches of this process in order, one group of clients after another.

        A group contains clients with similar numbers of steps, and group sizes differ by at most
        one, which keeps idle time short. Idle steps are added until all processes have the same
        number of batches.
        """
        schedules = [self._schedule(groups) for groups in self._groups]
        own = schedules[self.rank]
        return own + [IDLE] * (max(map(len, schedules)) - len(own))

    def _schedule(self, groups: list[tuple[int, ...]]) -> list[Step]:
        steps, schedule = self.num_steps.tolist(), []
        for group in groups:
            most = max(steps[row] for row in group)
            for start in range(0, most, self.steps_per_batch):
                count = min(self.steps_per_batch, most - start)
                schedule.append(Step(group, start, count, start + count == most))
        return schedule


def full(value: Tensor | float, clients: Tensor) -> Tensor:
    """Expand a scalar to one value per client, ``[k]``; return other tensors unchanged."""
    value = torch.as_tensor(value)
    return value.expand(len(clients)) if value.ndim == 0 else value
