"""Counts of steps and batches that a module reads from the Trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fl.federation.planner import Planner
from lightning_fl.federation.round import Round
from lightning_fl.hooks import properties_set

#: Hooks of a module before the first round.
START_HOOKS = ("setup", "configure_optimizers", "on_fit_start", "on_train_start")
#: Methods of a module in a local step that no callback has.
STEP_METHODS = ("training_step", "optimizer_step")


class ClientCounts:
    """Counts of one client, where its module asks the Trainer; Lightning's own for others.

    Args:
        module: The module passed to the Trainer.
        planner: The planner of the fit.
        current: Function that returns the current round; None between rounds.
    """

    def __init__(
        self, module: LightningModule, planner: Planner, current: Callable[[], Round | None]
    ) -> None:
        self._module, self._planner, self._current = module, planner, current

    def _round(self) -> Round | None:
        """Return the round if the module asks in a step of it, else None."""
        round = self._current()
        is_asking = round is not None and (
            round.is_in_hook or self._module._current_fx_name in STEP_METHODS
        )
        return round if is_asking else None

    def _of_client(self, round: Round, values: Tensor) -> int | None:
        """Return the value of the client in training; None in an idle step."""
        if round.step is None or not round.step.rows:
            return None
        value = round.fit.runner.of_client(values[list(round.step.rows)])
        return None if value is None else int(value)

    def local_steps(self) -> int | None:
        """Return the number of local steps of the client in the round.

        It is the maximum over clients before a step.
        """
        if self._current() is None:
            is_starting = self._module._current_fx_name in START_HOOKS
            return self._planner.most_local_steps() if is_starting else None
        if (round := self._round()) is None:
            return None
        steps = round.plan.num_steps
        return int(steps.max()) if round.step is None else self._of_client(round, steps)

    def global_step(self) -> int | None:
        """Return the optimizer steps of the client in the whole run.

        A round continues from the client with the most local steps.
        """
        if (round := self._round()) is None or round.step is None:
            return None
        runner = round.fit.runner
        done = round.optimizer_steps(runner.steps_before + runner.step)
        count = round.fit.progress.steps + done
        return self._of_client(round, torch.full_like(round.plan.num_steps, count))

    def is_last_step(self) -> bool | None:
        """Return whether the local step is the last one of the client."""
        if (round := self._round()) is None or round.step is None:
            return None
        steps, runner = self._of_client(round, round.plan.num_steps), round.fit.runner
        return None if steps is None else runner.steps_before + runner.step + 1 == steps

    def shown(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Return a context in which the Trainer shows the counts of one client to its module.

        ``estimated_stepping_batches`` is the number of scheduler steps of a client in the whole
        run, and the length of ``train_dataloader`` is ``num_training_batches``.
        """
        kind: Any = type(trainer)

        def shown(name: str, of_client: Callable[[], Any]) -> Callable[[Trainer], Any]:
            of_round = getattr(kind, name)

            def get(trainer: Trainer) -> Any:
                value = of_client()
                return of_round.fget(trainer) if value is None else value

            return get

        of_trainer = kind.train_dataloader

        def loader(trainer: Trainer) -> Any:
            own = of_trainer.fget(trainer)
            if not isinstance(own, DataLoader):  # before the first round
                return own

            def length(_: Any) -> int:
                steps = self.local_steps()
                return len(own) if steps is None else steps

            copied, its_kind = copy.copy(own), type(own)
            copied.__class__ = type(its_kind.__name__, (its_kind,), {"__len__": length})
            return copied

        counts = {
            "global_step": shown("global_step", self.global_step),
            "estimated_stepping_batches": lambda _: self._planner.stepping_batches(),
            "num_training_batches": shown("num_training_batches", self.local_steps),
            "is_last_batch": shown("is_last_batch", self.is_last_step),
            "train_dataloader": loader,
        }
        return properties_set(trainer, counts)
