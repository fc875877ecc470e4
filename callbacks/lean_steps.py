"""Training steps that leave out Lightning's calls of hooks that nobody overrides."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import move_data_to_device
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_fl.federation.round import Round
from lightning_fl.hooks import CALLBACK_HOOKS, TRANSFER_HOOKS, Method, overrides, replaced
from lightning_fl.runners.samples import check_batch
from lightning_fl.strategies import ClientParallelStrategy

#: Methods with which a module replaces a part of the step.
PARTS = ("backward", "optimizer_step", "optimizer_zero_grad")


class LeanSteps:
    """Make the training steps of a fit as Lightning does, without calls that have no effect.

    Lightning calls each hook of each callback and of the module in every step, whether or not it is
    overridden. With a small model, this takes as long as the step itself. Here, hooks that are
    overridden are called as by Lightning, and the others are not. Progress, logged values and
    results are the same. Steps that are different from those of automatic optimization on one
    device in single precision are left to Lightning; see :meth:`can_replace`.

    Args:
        trainer: The Trainer of the fit.
        module: Its module.
        current: Function that returns the current round.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, current: Callable[[], Round]
    ) -> None:
        self.trainer, self.module, self.current = trainer, module, current
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._is_lean, self._only_moves, self._takes_batch_idx = False, False, True
        #: Whether nothing but the number of steps follows a batch that is not the last.
        self._only_counts = False
        #: Callbacks that override a hook, by its name, and whether the module overrides it.
        self._listeners: dict[str, tuple[list[Callback], bool]] = {}

    def can_replace(self) -> bool:
        """Return whether the steps of the round are ordinary, so that they can be made here."""
        trainer, module = self.trainer, self.module
        return (
            type(trainer.strategy) in (SingleDeviceStrategy, ClientParallelStrategy)
            and trainer.strategy.model is module
            and type(trainer.precision_plugin) is Precision
            and type(trainer.profiler) is PassThroughProfiler  # type: ignore[attr-defined]
            and trainer.accumulate_grad_batches == 1
            and module.automatic_optimization
            and not any(overrides(module, name, LightningModule) for name in PARTS)
        )

    def look(self) -> None:
        """Find out which hooks are overridden in this round."""
        trainer, module = self.trainer, self.module
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
        self._is_lean = self.can_replace()
        self._only_moves = not any(
            overrides(module, name, LightningModule) or overrides(data, name, LightningDataModule)
            for name in TRANSFER_HOOKS
        )
        self._takes_batch_idx = is_param_in_hook_signature(
            module.training_step, "batch_idx", min_args=2
        )
        self._clips = overrides(module, "configure_gradient_clipping", LightningModule)
        # Validation within a round is refused at the start of the fit.
        self._only_counts = self._is_lean and not trainer.lr_scheduler_configs
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._listeners = {
            name: (
                [callback for callback in callbacks if overrides(callback, name, Callback)],
                overrides(module, name, LightningModule),
            )
            for name in CALLBACK_HOOKS
        }

    def advance(self, lightnings: Method) -> Method:
        """Return the replacement of the loop's method for a training batch."""

        def advance(fetcher: Any) -> None:
            index, schedule = self._loop.batch_idx + 1, self.current().plan.schedule
            if index == 0:
                self.look()
            is_idle = index >= len(schedule) or not schedule[index].rows
            if not self._is_lean or self._loop.restarting or is_idle:
                lightnings(fetcher)
            else:
                self._batch(fetcher, index)

        return advance

    def _batch(self, fetcher: Any, index: int) -> None:
        """Train on the next batch."""
        trainer, loop, start = self.trainer, self._loop, self.current().plan.schedule[index].start
        progress, connector, results = loop.batch_progress, trainer._logger_connector, loop._results
        if trainer.world_size > 1:
            loop._broadcast_sigterm_tensor()
        batch, _, _ = next(fetcher)
        progress.is_last_batch = fetcher.done
        batch = self._to_device(batch)
        check_batch(batch)
        progress.increment_ready()
        connector.on_batch_start(batch)
        outputs = None
        if ends := self._call("on_train_batch_start", batch, index) == -1:
            progress.increment_by(0, is_last_batch=True)
        else:
            progress.increment_started()
            outputs = self._optimize((batch, start) if self._takes_batch_idx else (batch,))
        progress.increment_processed()
        if trainer.lr_scheduler_configs:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
            if loop._num_ready_batches_reached():
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if ends:
            raise StopIteration
        self._call("on_train_batch_end", outputs, batch, index)
        if results:  # something has been logged in this round
            connector.on_batch_end()
        else:
            results.batch = results.batch_size = None
        progress.increment_completed()
        if results:
            connector.update_train_step_metrics()

    def end(self, lightnings: Method) -> Method:
        """Return the replacement of the loop's method for the end of a training batch."""

        def end(fetcher: Any) -> None:
            trainer, loop = self.trainer, self._loop
            ends = trainer.should_stop or trainer.received_sigterm
            if ends or not self._only_counts or loop._num_ready_batches_reached():
                lightnings(fetcher)
            else:
                loop._batches_that_stepped += 1

        return end

    def _to_device(self, batch: Any) -> Any:
        device = self.module.device
        if self._only_moves:
            if type(batch) is tuple and all(_is_on(device, each) for each in batch):
                return batch
            return move_data_to_device(batch, device)
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def _call(self, name: str, *args: Any) -> Any:
        """Call a hook of the callbacks that override it, and then that of the module."""
        module, (callbacks, is_own) = self.module, self._listeners[name]
        if not callbacks and not is_own:
            return None
        before = self._enter(name)
        for callback in callbacks:
            getattr(callback, name)(self.trainer, module, *args)
        response = getattr(module, name)(*args) if is_own else None
        self._enter(before)
        return response

    def _enter(self, hook: str | None) -> str | None:
        """Tell ``self.log`` of the module which hook runs; return the one before."""
        own = vars(self.module)  # setting an attribute of a module takes ten times as long
        before: str | None = own["_current_fx_name"]
        own["_current_fx_name"] = hook
        return before

    def _optimize(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """Make an optimizer step; return the outputs of ``training_step`` for hooks."""
        trainer, module = self.trainer, self.module
        optimizer = trainer.optimizers[0]
        progress = self._loop.automatic_optimization.optim_progress.optimizer
        outputs: list[dict[str, Any]] = []

        def zero_grad() -> None:
            progress.zero_grad.increment_ready()
            self._call("on_before_zero_grad", optimizer)
            progress.zero_grad.increment_started()
            optimizer.zero_grad()
            progress.zero_grad.increment_completed()

        def backward(loss: Tensor) -> None:
            self._call("on_before_backward", loss)
            loss.backward()
            self._call("on_after_backward")

        @torch.enable_grad()
        def make_step() -> Tensor | None:
            before = self._enter("training_step")
            output = module.training_step(*args)
            self._enter(before)
            outputs.clear()
            if type(output) is not Tensor:  # a dictionary or None, or it is refused
                result = ClosureResult.from_training_step_output(output)
                outputs.append({} if result.loss is None else result.asdict())
                loss: Tensor | None = Closure(lambda: result, backward, zero_grad)()
                return loss
            outputs.append({"loss": output.detach().clone()})  # a module may write to it again
            zero_grad()
            backward(output)
            return outputs[0]["loss"]  # type: ignore[no-any-return]

        def closure() -> Any:
            loss = make_step()
            self._call("on_before_optimizer_step", optimizer)
            if trainer.gradient_clip_val or self._clips:
                trainer.precision_plugin._clip_gradients(
                    module, optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
                )
            return loss

        progress.step.increment_ready()
        optimizer.step(closure=closure)
        progress.step.increment_completed()
        if not outputs:
            Closure(lambda: ClosureResult(None)).consume_result()  # raises Lightning's error
        return outputs[0]


def _is_on(device: torch.device, value: Any) -> bool:
    return type(value) is Tensor and value.device == device


def lean_steps(
    trainer: Trainer, module: LightningModule, current: Callable[[], Round], undo: ExitStack
) -> None:
    """Leave out calls of hooks that nobody overrides, from here to the end of the fit.

    Args:
        trainer: The Trainer.
        module: The module that is trained.
        current: Function that returns the current round.
        undo: Clean-up functions of the fit, to which that of the replacement is added.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    steps = LeanSteps(trainer, module, current)
    undo.enter_context(replaced(loop, "advance", steps.advance))
    undo.enter_context(replaced(loop, "on_advance_end", steps.end))
