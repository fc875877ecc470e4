"""Learning-rate schedulers between clients, over a run and over a resume."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_fl.types import FederationError


@contextmanager
def stepping_batches(trainer: Trainer, count: Callable[[], int | float]) -> Iterator[None]:
    """Make ``trainer.estimated_stepping_batches`` the scheduler steps of one client for a while.

    Lightning's own property counts the batches of all clients. It cannot be set on an object, so
    the Trainer gets a class of its own, a child of the one that it has.

    Args:
        trainer: The Trainer.
        count: Returns the number.
    """
    kind = type(trainer)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": None}
    estimated = property(lambda self: count(), doc="Scheduler steps of one client in the run.")
    trainer.__class__ = type(
        kind.__name__, (kind,), {**names, "estimated_stepping_batches": estimated}
    )
    try:
        yield
    finally:
        trainer.__class__ = kind


ScheduleState = tuple[list[dict[str, Any]], list[dict[str, Any]]]


class Schedulers:
    """The module's schedulers, of which two kinds need care.

    One with ``interval="step"``: every client of a round starts where the round does, so its rates
    do not depend on who trained before it; the next round goes on from the client that made most
    steps. And ``ReduceLROnPlateau``: Lightning writes checkpoints before it steps this one, so a
    resumed run makes up for the step.

    Raises:
        FederationError: If schedulers count steps beside others that count rounds, or not each one;
            if ``ReduceLROnPlateau`` counts steps.
    """

    def __init__(self, trainer: Trainer) -> None:
        configs = trainer.lr_scheduler_configs
        stepwise = [c for c in configs if c.interval == "step"]
        if stepwise and (len(stepwise) < len(configs) or any(c.frequency != 1 for c in stepwise)):
            raise FederationError(
                'a scheduler with interval="step" counts the steps of each client anew: it needs'
                " frequency=1 and cannot stand beside one that counts rounds"
            )
        if any(c.reduce_on_plateau for c in stepwise):
            raise FederationError(
                'ReduceLROnPlateau with interval="step" would read its metric after each local step'
                ' of a client, which has none: set interval="epoch", which counts rounds'
            )
        self._stepwise: list[Any] = [c.scheduler for c in stepwise]
        self._on_plateau = [c for c in configs if c.reduce_on_plateau and c.interval == "epoch"]
        self._optimizer = trainer.optimizers[0]

    def read(self) -> ScheduleState:
        """Return a copy of where those that count steps are, and of the rates that they set."""
        if not self._stepwise:
            return [], []
        groups = [
            {k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups
        ]
        return copy.deepcopy(([s.state_dict() for s in self._stepwise], groups))

    def write(self, state: ScheduleState) -> None:
        """Go back to what :meth:`read` returned."""
        if not self._stepwise:
            return
        schedulers, groups = copy.deepcopy(state)
        for scheduler, saved in zip(self._stepwise, schedulers, strict=True):
            scheduler.load_state_dict(saved)
        for group, values in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(values)

    def monitored(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the figures that ``ReduceLROnPlateau`` will look at when the round is over."""
        names = (str(c.monitor) for c in self._on_plateau)
        return {name: float(metrics[name]) for name in names if name in metrics}

    def catch_up(self, rounds: int, monitored: Mapping[str, float]) -> None:
        """Make the steps that Lightning made after it had written the checkpoint."""
        for config in self._on_plateau:
            value, scheduler = monitored.get(str(config.monitor)), config.scheduler
            if value is not None and rounds % config.frequency == 0:
                assert isinstance(scheduler, ReduceLROnPlateau)
                scheduler.step(value)
