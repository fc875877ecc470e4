"""Learning-rate schedulers across clients, rounds and resumed runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor

from lightning_fl.errors import FederationError
from lightning_fl.runners import ClientOptimizers
from lightning_fl.runners.client_optimizers import Options

#: States of step-wise schedulers, and the options of each optimizer.
ScheduleState = tuple[list[dict[str, Any]], list[Options]]


class Schedulers:
    """Manage the learning-rate schedulers of the module, and the options of its optimizers.

    Every client starts from the options at the start of the round, and from the schedule if it has
    ``interval="step"``, so that its learning rates do not depend on other clients. The next round
    continues from the client with the most local steps. With ``ReduceLROnPlateau``, Lightning saves
    checkpoints before it steps the scheduler, so a resumed run repeats this step. A module that
    optimizes manually steps its schedulers itself, so all of them count as step-wise.

    Args:
        trainer: The Trainer of the fit.
        optimizers: Its optimizers.

    Raises:
        FederationError: If schedulers with ``interval="step"`` are combined with others or have a
            ``frequency`` other than 1, or if ``ReduceLROnPlateau`` has ``interval="step"``.
    """

    def __init__(self, trainer: Trainer, optimizers: ClientOptimizers) -> None:
        configs, self._optimizers = trainer.lr_scheduler_configs, optimizers
        self._stepwise: list[Any] = [config.scheduler for config in configs]
        self._on_plateau: list[LRSchedulerConfig] = []
        if not trainer.lightning_module.automatic_optimization:
            return
        stepwise = [c for c in configs if c.interval == "step"]
        is_other = any(c.frequency != 1 or c.reduce_on_plateau for c in stepwise)
        if is_other or 0 < len(stepwise) < len(configs):
            raise FederationError(
                'a scheduler with interval="step" counts the local steps of each client: set'
                ' frequency=1, do not combine it with schedulers with interval="epoch", and set'
                ' interval="epoch" for ReduceLROnPlateau'
            )
        self._stepwise = [c.scheduler for c in stepwise]
        self._on_plateau = [c for c in configs if c.reduce_on_plateau and c.interval == "epoch"]

    def read(self) -> ScheduleState:
        """Return a copy of the state of step-wise schedulers, and of the optimizer's options."""
        states = copy.deepcopy([scheduler.state_dict() for scheduler in self._stepwise])
        return states, self._optimizers.options()

    def write(self, state: ScheduleState) -> None:
        """Restore a state returned by :meth:`read`."""
        schedulers, options = state
        for scheduler, saved in zip(self._stepwise, copy.deepcopy(schedulers), strict=True):
            scheduler.load_state_dict(saved)
        self._optimizers.set_options(options)

    def step_rounds(self, step: Callable[[], None], start: ScheduleState) -> list[Options]:
        """Step the schedulers that count rounds, from the options at the start of the round.

        Args:
            step: Function that steps them.
            start: State at the start of the round.

        Returns:
            The options that they have changed; the others are left as they were.
        """
        optimizers, (_, before) = self._optimizers, start
        last = optimizers.options()
        optimizers.set_options(before)
        step()
        changed = [
            [
                {name: value for name, value in now.items() if not is_same(value, then.get(name))}
                for now, then in zip(groups, groups_before, strict=False)
            ]
            for groups, groups_before in zip(optimizers.options(), before, strict=True)
        ]
        optimizers.set_options(last)
        optimizers.set_options(changed)
        return changed

    def catch_up(self, rounds: int, metrics: Mapping[str, Tensor]) -> None:
        """Repeat the scheduler steps that Lightning made after saving the checkpoint.

        Args:
            rounds: Number of finished rounds.
            metrics: Logged metrics from the checkpoint.
        """
        for config in self._on_plateau:
            value, plateau = metrics.get(str(config.monitor)), cast("Any", config.scheduler)
            if value is not None and rounds % config.frequency == 0:
                plateau.step(float(value))


def is_same(value: Any, other: Any) -> bool:
    """Return whether two options are equal; they may be tensors."""
    is_tensor = isinstance(value, Tensor) and isinstance(other, Tensor)
    return torch.equal(value, other) if is_tensor else bool(value == other)
