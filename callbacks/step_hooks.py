"""Events after all hooks of Lightning's training steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning_fl.federation.fit import Fit
from lightning_fl.federation.logs import logs_watched
from lightning_fl.federation.round import Round
from lightning_fl.hooks import Method, attributes_set, replaced
from lightning_fl.runners import SequentialRunner
from lightning_fl.runners.self_check import OrderCheck
from lightning_fl.runners.step_hooks import HOOKS_AFTER_TRANSFER, hooks_of
from lightning_fl.types import Step

#: Hooks of a module in a step that are not wrapped for another reason. Within ``optimizer_step``,
#: hooks of callbacks are called.
STEP_HOOKS_OF_MODULE = [
    name
    for name in HOOKS_AFTER_TRANSFER
    if name not in ("on_train_batch_start", "on_train_batch_end", "optimizer_step")
]


def follow_steps(fit: Fit, check: bool, current: Callable[[], Round], undo: ExitStack) -> None:
    """Call the round after all hooks of the start of an epoch and of the end of a batch.

    Lightning calls the hooks of the module after those of all callbacks, so the round is called
    after the hooks of the module. In the module, ``batch_idx`` is the local step of the client; in
    callbacks, it is the index of the batch in the round.

    Args:
        fit: The fit.
        check: Whether to check the second client (:class:`OrderCheck`).
        current: Function that returns the current round.
        undo: Clean-up functions of the fit, to which those of the hooks are added.
    """
    module, is_sequential = fit.module, isinstance(fit.runner, SequentialRunner)
    order = OrderCheck(
        fit.runner.tensors, check and is_sequential and not fit.processes.share_samples
    )

    def step_of(batch_idx: int) -> Step:
        return current().plan.schedule[batch_idx]

    def in_hook(hook: Method, *args: Any, **options: Any) -> Any:
        with attributes_set(current(), {"is_in_hook": True}):
            return hook(*args, **options)

    def epoch_start(hook: Method) -> Method:
        def started() -> None:
            in_hook(hook)
            order.begin_round()
            current().begin()

        return started

    def batch_start(hook: Method) -> Method:
        def started(batch: Any, batch_idx: int) -> Any:
            return in_hook(hook, batch, step_of(batch_idx).start)

        return started

    def run(optimize: Method) -> Method:
        def counted(optimizer: Any, batch_idx: int, kwargs: dict[str, Any]) -> Any:
            start = step_of(batch_idx).start
            if "batch_idx" in kwargs:
                kwargs["batch_idx"] = start
            return optimize(optimizer, start, kwargs)

        return counted

    def batch_end(hook: Method) -> Method:
        def ended(outputs: Any, batch: Any, batch_idx: int) -> None:
            step = step_of(batch_idx)
            if step.rows:  # empty while this process waits for others
                in_hook(hook, outputs, batch, step.start)
            current().end_batch(batch_idx)
            if step.last and not order.is_done:
                order.end_client()

        return ended

    def has_logs_of_others() -> bool:
        step = current().step
        return step is not None and (step.first or len(step.rows) > 1)

    def training_step(hook: Method) -> Method:
        def made(batch: Any, *args: Any) -> Any:
            # Callbacks call it, too, between rounds.
            if not order.is_done and module._current_fx_name == "training_step":
                step = current().step
                if step is not None and step.first and step.rows:
                    order.begin_step(int(current().plan.clients[step.rows[0]]), batch)
            return hook(batch, *args)

        return made

    if not order.is_done:
        undo.enter_context(replaced(module, "training_step", training_step))
    undo.enter_context(logs_watched(fit.trainer, module, has_logs_of_others))
    overridden = hooks_of(module) if is_sequential else []
    for name in (name for name in STEP_HOOKS_OF_MODULE if name in overridden):
        undo.enter_context(replaced(module, name, lambda hook: partial(in_hook, hook)))
    epoch_loop: Any = fit.trainer.fit_loop.epoch_loop
    for owner, name, make in (
        (module, "on_train_epoch_start", epoch_start),
        (module, "on_train_batch_start", batch_start),
        (epoch_loop.automatic_optimization, "run", run),
        (module, "on_train_batch_end", batch_end),
    ):
        undo.enter_context(replaced(owner, name, make))
