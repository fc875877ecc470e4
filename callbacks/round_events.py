"""Events after all hooks of Lightning's training steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning_fl.contracts.plan import Step
from lightning_fl.federation.fit import Fit
from lightning_fl.federation.round import Round
from lightning_fl.federation.self_check import OrderCheck
from lightning_fl.hooks import HOOKS_AFTER_TRANSFER, Method, attributes_set, replaced
from lightning_fl.runners import SequentialRunner
from lightning_fl.runners.user_hooks import hooks_of

#: Hooks of a module that :func:`follow_steps` wraps, or within which those of callbacks are called.
WRAPPED = ("on_train_batch_start", "on_train_batch_end", "optimizer_step")


def follow_steps(fit: Fit, current: Callable[[], Round], undo: ExitStack) -> None:
    """Call the round after all hooks of the start of an epoch and of the end of a batch.

    Lightning calls the hooks of the module after those of all callbacks, so the round is called
    after the hooks of the module. In the module, ``batch_idx`` is the local step of the client; in
    callbacks, it is the index of the batch in the round.

    Args:
        fit: The fit.
        current: Function that returns the current round.
        undo: Clean-up functions of the fit, to which those of the hooks are added.
    """
    module, events = fit.module, _Events(fit, current)
    epoch_loop: Any = fit.trainer.fit_loop.epoch_loop
    hooks: list[tuple[Any, str, Callable[..., Any]]] = [
        (module, "on_train_epoch_start", events.epoch_start),
        (module, "on_train_batch_start", events.batch_start),
        (epoch_loop.automatic_optimization, "run", events.run),
        (epoch_loop.manual_optimization, "run", events.run_manual),
        (epoch_loop, "_should_accumulate", events.should_accumulate),
        (epoch_loop, "update_lr_schedulers", events.step_schedulers),
        (module, "on_train_batch_end", events.batch_end),
    ]
    if isinstance(fit.runner, SequentialRunner):
        own = set(hooks_of(module)).difference(WRAPPED)
        hooks += [(module, name, events.in_hook) for name in HOOKS_AFTER_TRANSFER if name in own]
    for owner, name, wrapper in hooks:
        undo.enter_context(replaced(owner, name, partial(partial, wrapper)))


class _Events:
    """Wrap methods of the module and of Lightning's loops, which each method here gets first.

    Args:
        fit: The fit.
        current: Function that returns the current round.
    """

    def __init__(self, fit: Fit, current: Callable[[], Round]) -> None:
        self.fit, self.current = fit, current
        self.order = OrderCheck(fit.runner.tensors, fit.check and not fit.processes.share_samples)

    def step_of(self, batch_idx: int) -> Step:
        """Return the step of the schedule that is a batch of the round."""
        return self.current().plan.schedule[batch_idx]

    def in_hook(self, hook: Method, *args: Any, **options: Any) -> Any:
        """Call a hook of the module."""
        with attributes_set(self.current(), {"is_in_hook": True}):
            return hook(*args, **options)

    def epoch_start(self, hook: Method) -> None:
        """Begin the round."""
        self.in_hook(hook)
        self.order.begin_round()
        self.current().begin()

    def batch_start(self, hook: Method, batch: Any, batch_idx: int) -> Any:
        """Begin a batch."""
        step = self.step_of(batch_idx)
        response = self.in_hook(hook, batch, step.start)
        if step.first and step.rows and isinstance(self.fit.runner, SequentialRunner):
            self.order.begin_step(int(self.current().plan.clients[step.rows[0]]), batch)
        return response

    def run(self, optimize: Method, optimizer: Any, batch_idx: int, kwargs: dict[str, Any]) -> Any:
        """Optimize with the client's ``batch_idx``."""
        start = self.step_of(batch_idx).start
        changed = {"batch_idx": start} if "batch_idx" in kwargs else {}
        return optimize(optimizer, start, kwargs | changed)

    def run_manual(self, optimize: Method, kwargs: dict[str, Any]) -> Any:
        """Optimize manually with the client's ``batch_idx``."""
        if "batch_idx" in kwargs:
            batch_idx = self.fit.trainer.fit_loop.epoch_loop.batch_idx
            kwargs["batch_idx"] = self.step_of(batch_idx).start
        return optimize(kwargs)

    def should_accumulate(self, _: Method) -> bool:
        """Return whether the optimizer waits for later batches of the client.

        Lightning also asks between two rounds, after the last batch.
        """
        trainer, schedule = self.fit.trainer, self.current().plan.schedule
        step = schedule[min(trainer.fit_loop.epoch_loop.batch_idx, len(schedule) - 1)]
        done = step.start + step.steps
        return not step.last and done % trainer.accumulate_grad_batches != 0

    def step_schedulers(self, update: Method, interval: str, **options: Any) -> None:
        """Leave the schedulers of an epoch to the round."""
        if interval == "epoch" and not options.get("update_plateau_schedulers"):
            self.current().step_schedulers(partial(update, interval, **options))
        else:
            update(interval, **options)

    def batch_end(self, hook: Method, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a batch."""
        step = self.step_of(batch_idx)
        if step.rows:  # empty while this process waits for others
            self.in_hook(hook, outputs, batch, step.start)
        self.current().end_batch(batch_idx)
        if step.last:
            self.order.end_client()
