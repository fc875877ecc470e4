"""Events after all hooks of Lightning's training steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning_fl.contracts.plan import Step
from lightning_fl.federation.fit import Fit
from lightning_fl.federation.round import Round
from lightning_fl.hooks import Method, attributes_set, replaced
from lightning_fl.runners import SequentialRunner
from lightning_fl.runners.self_check import OrderCheck
from lightning_fl.runners.user_hooks import HOOKS_AFTER_TRANSFER, hooks_of

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
    module = fit.module
    order = OrderCheck(fit.runner.tensors, fit.check and not fit.processes.share_samples)

    def step_of(batch_idx: int) -> Step:
        return current().plan.schedule[batch_idx]

    def in_hook(hook: Method, *args: Any, **options: Any) -> Any:
        with attributes_set(current(), {"is_in_hook": True}):
            return hook(*args, **options)

    def epoch_start(hook: Method) -> None:
        in_hook(hook)
        order.begin_round()
        current().begin()

    def batch_start(hook: Method, batch: Any, batch_idx: int) -> Any:
        step = step_of(batch_idx)
        response = in_hook(hook, batch, step.start)
        if step.first and step.rows and isinstance(fit.runner, SequentialRunner):
            order.begin_step(int(current().plan.clients[step.rows[0]]), batch)
        return response

    def run(optimize: Method, optimizer: Any, batch_idx: int, kwargs: dict[str, Any]) -> Any:
        start = step_of(batch_idx).start
        changed = {"batch_idx": start} if "batch_idx" in kwargs else {}
        return optimize(optimizer, start, kwargs | changed)

    def run_manual(optimize: Method, kwargs: dict[str, Any]) -> Any:
        if "batch_idx" in kwargs:
            kwargs["batch_idx"] = step_of(epoch_loop.batch_idx).start
        return optimize(kwargs)

    def should_accumulate(_: Method) -> bool:
        """Return whether the optimizer waits for later batches of the client.

        Lightning also asks between two rounds, after the last batch.
        """
        schedule = current().plan.schedule
        step = schedule[min(epoch_loop.batch_idx, len(schedule) - 1)]
        done = step.start + step.steps
        return not step.last and done % fit.trainer.accumulate_grad_batches != 0

    def batch_end(hook: Method, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = step_of(batch_idx)
        if step.rows:  # empty while this process waits for others
            in_hook(hook, outputs, batch, step.start)
        current().end_batch(batch_idx)
        if step.last:
            order.end_client()

    epoch_loop: Any = fit.trainer.fit_loop.epoch_loop
    hooks: list[tuple[Any, str, Callable[..., Any]]] = [
        (module, "on_train_epoch_start", epoch_start),
        (module, "on_train_batch_start", batch_start),
        (epoch_loop.automatic_optimization, "run", run),
        (epoch_loop.manual_optimization, "run", run_manual),
        (epoch_loop, "_should_accumulate", should_accumulate),
        (epoch_loop, "update_lr_schedulers", partial(_step_schedulers, current)),
        (module, "on_train_batch_end", batch_end),
    ]
    if isinstance(fit.runner, SequentialRunner):
        own = set(hooks_of(module)).difference(WRAPPED)
        hooks += [(module, name, in_hook) for name in HOOKS_AFTER_TRANSFER if name in own]
    for owner, name, wrapper in hooks:
        undo.enter_context(replaced(owner, name, partial(partial, wrapper)))


def _step_schedulers(
    current: Callable[[], Round], update: Method, interval: str, **options: Any
) -> None:
    """Leave the schedulers of an epoch to the round."""
    if interval == "epoch" and not options.get("update_plateau_schedulers"):
        current().step_schedulers(partial(update, interval, **options))
    else:
        update(interval, **options)
