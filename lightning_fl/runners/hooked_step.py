"""A module's local step with its hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor, nn

from lightning_fl.runners.local_step import LocalStep, Outcome, Tensors
from lightning_fl.runners.optimizer_values import params_of
from lightning_fl.runners.step_hooks import HOOKS_AFTER_TRANSFER


class HookedStep(LocalStep):
    """Make the first local step of a client with the hooks of its module, but a made-up update.

    The hooks get the module's optimizer, whose ``step`` computes gradients and clips them, but
    multiplies the trained parameters by a number instead of updating them. Hooks of callbacks are
    not called, unless they are given, and neither are those that transfer the batch. Options of the
    optimizer, the state of schedulers and gradients are restored afterwards; parameters are not.

    Args:
        module: The user's module in a fit. Later replacements of its hooks are not called.
        constants: Frozen parameters that all clients share, by name. No step may change them.
    """

    def __init__(self, module: LightningModule, constants: Mapping[str, nn.Parameter]) -> None:
        super().__init__(module, constants)
        self._trainer: Any = module.trainer
        hooks = {name: getattr(module, name) for name in HOOKS_AFTER_TRANSFER}
        self._hooks: Any = SimpleNamespace(**hooks)
        self._seen: Tensors = {}
        #: Callbacks whose hooks are called, too, and Lightning's index of the batch for them.
        self.callbacks: Sequence[Callback] = ()
        self.index = 0

    def by_itself(
        self, fixed: Tensors, batch: Any, hyperparameters: Tensors | None = None
    ) -> tuple[Outcome, Tensors]:
        """Make the step on the module's own tensors, as in sequential training.

        Args:
            fixed: As in :meth:`LocalStep.by_itself`.
            batch: The client's batch.
            hyperparameters: As in :meth:`LocalStep.by_itself`.

        Returns:
            The outcome of the step without buffers; and what follows from it, by name: the
            gradients and options of the optimizer's step, and the module's tensors and the options
            after the step.
        """
        self._seen = {}
        with self._restored():
            (loss, task_loss), logs, recorded = self._noted(
                lambda: self._run(batch), fixed, None, hyperparameters or {}
            )
            self._note_options("after")
            tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
            self._seen |= {
                f"after: {name}": tensor.detach().clone()
                for name, tensor in tensors
                if name not in self._constants
            }
        return Outcome(loss.detach(), task_loss.detach(), logs, recorded, {}), self._seen

    def _run(self, batch: Any) -> Any:
        """Run the step and its hooks in the order of Lightning; return the step's output."""
        hooks, trainer = self._hooks, self._trainer
        optimizer, outputs = MadeUp(trainer.optimizers[0], self._note_step), list[Any]()

        def closure() -> Any:
            outputs.append(self(batch))
            loss = outputs[-1]["loss"] if isinstance(outputs[-1], Mapping) else outputs[-1]
            self._call("on_before_zero_grad", optimizer)
            hooks.optimizer_zero_grad(trainer.current_epoch, 0, optimizer)
            if loss is not None:
                self._call("on_before_backward", loss)
                hooks.backward(loss)
                self._call("on_after_backward")
            self._call("on_before_optimizer_step", optimizer)
            hooks.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )
            return loss

        self._call_callbacks("on_train_batch_start", batch, self.index)
        hooks.on_train_batch_start(batch, 0)
        hooks.optimizer_step(trainer.current_epoch, 0, optimizer, closure)
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                hooks.lr_scheduler_step(config.scheduler, None)
        result = ClosureResult.from_training_step_output(outputs[-1])
        given = {} if result.loss is None else result.asdict()  # what hooks get from Lightning
        self._call_callbacks("on_train_batch_end", given, batch, self.index)
        hooks.on_train_batch_end(given, batch, 0)
        return outputs[-1]

    def _call(self, name: str, *args: Any) -> None:
        """Call a hook of the callbacks, and then that of the module."""
        self._call_callbacks(name, *args)
        getattr(self._hooks, name)(*args)

    def _call_callbacks(self, name: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self._trainer, self._trainer.lightning_module, *args)

    def _note_step(self) -> None:
        """Note gradients and options when the optimizer makes its step."""
        params = self.module.named_parameters()
        found = {name: p.grad for name, p in params if p.grad is not None}
        self._seen |= {
            f"gradient: {name}": (grad.to_dense() if grad.is_sparse else grad).detach().clone()
            for name, grad in found.items()
        }
        self._note_options("step")

    def _note_options(self, when: str) -> None:
        """Note the numbers among the options of the optimizer."""
        for i, group in enumerate(self._trainer.optimizers[0].param_groups):
            for name, value in group.items():
                if name != "params" and isinstance(value, int | float | Tensor):
                    value = torch.as_tensor(value, dtype=torch.float64)
                    self._seen[f"{when}: {name} of group {i}"] = value.detach().clone()

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Restore gradients, options and schedulers at the end of a ``with`` block."""
        params = list(self.module.parameters())
        grads = [param.grad for param in params]
        schedulers = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        states = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]
        groups = self._trainer.optimizers[0].param_groups
        options = [copy.deepcopy({k: v for k, v in g.items() if k != "params"}) for g in groups]
        for param in params:
            param.grad = None
        try:
            yield
        finally:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            for scheduler, state in zip(schedulers, states, strict=True):
                scheduler.load_state_dict(state)
            for group, values in zip(groups, options, strict=True):
                group.update(values)


class MadeUp:
    """Stand for an optimizer whose step runs its closure, and multiplies the trained parameters.

    They then differ from a copy of them, such as the target of a moving average.

    Args:
        optimizer: The optimizer, which gives all other attributes.
        note: Called at the step, after the closure.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, note: Callable[[], None]) -> None:
        self._optimizer, self._note = optimizer, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run the closure, and change the parameters that have a gradient."""
        loss = None if closure is None else closure()
        self._note()
        for param in params_of(self._optimizer):
            if param.grad is not None:
                param.data.mul_(1 + 2**-6)
        return loss

    @property
    def optimizer(self) -> Any:
        """The optimizer itself, as in a ``LightningOptimizer``."""
        return self
