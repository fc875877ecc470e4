"""``VectorizedClients``: a wrapper of a LightningModule that trains many clients at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_fl.contracts.data import ClientBatches
from lightning_fl.contracts.step_module import StepModule
from lightning_fl.errors import FederationError, check_package
from lightning_fl.hooks import BATCH_HOOKS, attributes_set, call_hook
from lightning_fl.options import check_flag, check_integer
from lightning_fl.runners.groups import clients_at_once, device_memory, num_steps
from lightning_fl.runners.local_tensors import split_tensors
from lightning_fl.runners.optimizer import optimizers_in, restack, why_not_elementwise
from lightning_fl.runners.samples import BatchSamples, each_of
from lightning_fl.runners.user_hooks import callbacks_with, hooks_of, why_alone
from lightning_fl.runners.vectorized_runner import VectorizedRunner

#: Methods of the module itself, if clients train one after another.
OF_MODULE = ("training_step", "configure_optimizers")


class VectorizedClients(LightningModule):
    r"""Train many clients of a LightningModule at once; use it with a ``FederatedLoop``.

    The module's ``training_step``, ``configure_optimizers`` and ``self.log`` run on stacked
    parameters, ``[k, ...]`` for ``k`` clients. The loss is the sum of the clients' losses,
    :math:`\sum_k L_k(w_k)`, so one step of an elementwise optimizer is an independent step of every
    client. Results differ from sequential training by rounding only, and in random layers, which
    draw their numbers in a different order. Validation, test, prediction and checkpoints are those
    of the module.

    One Lightning batch holds several local steps, to reduce Lightning's overhead; one if a callback
    of yours has ``on_train_batch_start`` or ``on_train_batch_end``.

    In the first round, steps of two clients are compared with the module's own steps, on copies of
    the module in float64. A module that cannot be vectorized trains its clients one after another,
    with a warning that gives the reason.

    Args:
        module: Any LightningModule. One that optimizes manually trains one client after another.
        group_size: Number of clients that train at once. ``auto`` chooses it. On a CPU, networks
            with 2-d convolutions then train one after another, by compiled steps if the optimizer
            is SGD and the run is long enough; everything else is vectorized.
        compile: Whether to compile forward and backward pass. ``auto`` does so if the run is long
            enough to pay for it.
        fixed_groups: Whether to group the clients independently of the number of processes and
            assign whole groups to processes. Results are then bit for bit the same on any number of
            processes. With fewer groups than processes, some processes are idle. Requires a number
            for ``group_size``.

    Raises:
        FederationError: If an option is out of range. At the start of a fit: if the optimizer mixes
            the parameters of several clients (LBFGS, LARS) or has step hooks, or if the step
            depends on plain attributes that an earlier step has set.

    Example:
        >>> from lightning_fl import ClientModule
        >>> module = VectorizedClients(ClientModule(nn.Linear(4, 3)), group_size=10)
        >>> list(module.state_dict())
        ['net.weight', 'net.bias']
    """

    def __init__(
        self,
        module: LightningModule,
        group_size: int | Literal["auto"] = "auto",
        compile: bool | Literal["auto"] = "auto",
        fixed_groups: bool = False,
    ) -> None:
        super().__init__()
        check_package(module, LightningModule)
        if not isinstance(module, LightningModule) or isinstance(module, VectorizedClients):
            raise FederationError(f"VectorizedClients takes a LightningModule, got {module!r}")
        if group_size != "auto":
            check_integer("group_size", group_size, min=1, hint="pass an integer or auto")
        if compile not in ("auto", True, False):
            raise FederationError(f"compile must be auto, true or false, got {compile!r}")
        self.fixed_groups = check_flag("fixed_groups", fixed_groups)
        if self.fixed_groups and group_size == "auto":
            raise FederationError(
                "fixed_groups=True requires a number for group_size: group_size='auto' depends on"
                " the memory of the machine"
            )
        self.module = module
        self.example_input_array = module.example_input_array
        for name in ("_strict_loading", "_log_hyperparams", "_hparams_name", "_dtype", "_device"):
            vars(self)[name] = vars(module).get(name)
        self.automatic_optimization = module.automatic_optimization
        self.group_size, self.compiled = group_size, compile
        self.stack: dict[str, nn.Parameter] = {}
        self.runner: VectorizedRunner | None = None
        #: See :class:`~lightning_fl.callbacks.FederatedLoop`, which sets it.
        self.exchange_frozen = False
        self.local_patterns: Sequence[str] = ()
        self.keeps_optimizer = False
        #: Parameters that all clients share, by name, so that they are not stacked.
        self.constants: dict[str, nn.Parameter] = {}
        for name in hooks_of(module):
            vars(self)[name] = getattr(module, name)
        #: Why the clients train one after another; None if they are vectorized.
        self.reason: str | None = None
        if why := why_alone(module):
            self.train_one_by_one(why)
        vars(self)["_is_made"] = True

    # --- the wrapped module -----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module; callbacks read them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "module" not in vars(self).get("_modules", {}):
                raise
        value = getattr(self.module, name)
        if isinstance(value, Tensor | nn.Module | MethodType):
            self._refuse_while_training(name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the wrapped module, unless the wrapper has one of that name."""
        is_made = vars(self).get("_is_made", False)
        is_own = name in vars(self) or hasattr(type(self), name) or name == "module"
        if is_made and name == "_current_fx_name":
            self.module._current_fx_name = value  # self.log of the wrapped module reads it
        if not is_made or is_own or (name.startswith("_") and not hasattr(self.module, name)):
            super().__setattr__(name, value)
            return
        if isinstance(value, Tensor | nn.Module):
            self._refuse_while_training(name)
        setattr(self.module, name, value)

    def _refuse_while_training(self, name: str) -> None:
        """Refuse access to the global model where a caller expects a client's model.

        Raises:
            FederationError: If clients are in training.
        """
        if self.runner is not None and self.runner.is_loaded:
            raise FederationError(
                f"a callback uses {type(self.module).__name__}.{name} while {self.runner.count}"
                " clients train at once, and each client has its own value. Use it between rounds"
                " (on_train_epoch_start, on_validation_start, on_train_epoch_end), define a hook"
                " on_client_end in the module, or train the module without VectorizedClients"
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the server's model."""
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the wrapped module, so that a checkpoint loads into it directly."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the state of the wrapped module."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of the global model; refused while clients train."""
        self._refuse_while_training("parameters()")
        return super().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the buffers of the global model; refused while clients train."""
        self._refuse_while_training("buffers()")
        return super().named_buffers(*args, **kwargs)

    # --- vectorized or not ------------------------------------------------------------------------

    def train_one_by_one(self, why: str, is_choice: bool = False) -> None:
        """Train clients one after another from now on, as without this wrapper.

        Args:
            why: The reason.
            is_choice: Whether they could be vectorized, so that there is nothing to warn of.
        """
        self.reason = why
        for name in OF_MODULE:
            vars(self)[name] = getattr(self.module, name)
        if self.runner is not None:
            self.runner.close()
            params = self.runner.named_parameters
            restack(self.runner.optimizer, {id(p): params[n] for n, p in self.stack.items()})
            self.runner = None
        tell = rank_zero_info if is_choice else rank_zero_warn
        tell(f"{type(self.module).__name__} trains one client after another, not at once: {why}")

    def end_fit(self) -> None:
        """Forget the runner, and a reason that the next fit may not have."""
        self.runner = None
        if self.reason is not None and why_alone(self.module) is None:
            self.reason = None
            for name in OF_MODULE:
                vars(self).pop(name, None)

    # --- batches ----------------------------------------------------------------------------------

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        return each_of(super()._on_before_batch_transfer, batch, dataloader_idx)

    def _apply_batch_transfer_handler(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        return each_of(super()._apply_batch_transfer_handler, batch, device, dataloader_idx)

    # --- training ---------------------------------------------------------------------------------

    def layout(self, clients: int, batch_bytes: int, stepwise: bool) -> tuple[int, int]:
        """Return the number of clients in a group and of local steps in a Lightning batch.

        Args:
            clients: Number of clients in the round.
            batch_bytes: Size of a client's batch in bytes.
            stepwise: Whether the loader fetches one local step at a time.
        """
        processes = 1 if self._trainer is None else self._trainer.num_devices
        memory = device_memory(self.device, processes)
        on_a_gpu = self.device.type == "cuda"
        group_size = clients_at_once(
            self.module, self.constants, self.group_size, clients, batch_bytes, memory, on_a_gpu
        )
        if self._trainer is not None and callbacks_with(BATCH_HOOKS, self._trainer):
            return group_size, 1
        return group_size, num_steps(group_size, batch_bytes, stepwise)

    def configure_optimizers(self) -> Any:
        """Create the module's optimizer and replace its parameters by the stacked ones."""
        made = self.module.configure_optimizers()
        self.constants, _ = split_tensors(self.module, self.exchange_frozen, self.local_patterns)
        for optimizer in optimizers_in(made):
            if why := why_not_elementwise(optimizer, self.keeps_optimizer):
                self.train_one_by_one(why)
                return made
        params = {n: p for n, p in self.module.named_parameters() if n not in self.constants}
        self.stack = {
            name: nn.Parameter(
                param.detach()[None].clone(memory_format=torch.contiguous_format),
                requires_grad=param.requires_grad,
            )
            for name, param in params.items()
        }
        stacked = {id(param): self.stack[name] for name, param in params.items()}
        for optimizer in optimizers_in(made):
            restack(optimizer, stacked, self.constants.values())
        return made

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Split the batch by local step and client.

        Args:
            batch: The samples of several local steps and clients.
            batch_idx: Number of local steps that these clients have made before.
        """
        if (runner := self.runner) is None:
            if self.reason is not None:
                return
            raise FederationError(
                "VectorizedClients requires a FederatedLoop: add one to the callbacks"
            )
        runner.logs.clear()
        if not len(runner.active):  # this process has no clients and waits for the others
            return
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]  # set by the connector
        if not data.has_samples_in_front and not isinstance(batch, ClientBatches):
            batch = ClientBatches([batch])
        fetch, plan = None, data.plan()
        if plan.stepwise:
            position = self.trainer.fit_loop.epoch_loop.batch_idx
            fetch = partial(self._fetched, data.local_steps(plan.round, position))
        runner.batch = BatchSamples(batch, runner.sizes, runner.active, fetch)

    def _fetched(self, fetch: Callable[[int], Any], step: int) -> Any:
        """Fetch and transfer the batches of a local step."""
        batch = self.trainer.precision_plugin.convert_input(fetch(step))
        batch = self._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def on_client_start(self) -> None:
        """Call the module's hook once per client, on the client's own tensors."""
        self._call_for_each("on_client_start")
        if self.runner is not None:
            self.runner.stacks.follow_module()

    def on_client_end(self) -> None:
        """Call the module's hook once per client, on the client's own tensors."""
        self._call_for_each("on_client_end")

    def _call_for_each(self, name: str) -> None:
        user, runner = self.module, self.runner
        if runner is None or (isinstance(user, StepModule) and not user._uses_client(name)):
            call_hook(user, name)
        elif callable(getattr(user, name, None)):
            for row in range(runner.count):
                with runner.client(row):
                    call_hook(user, name)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the sum of the clients' losses in one local step."""
        runner = self.runner
        assert runner is not None
        assert runner.batch is not None
        step = runner.step
        runner.local.batch_idx = runner.steps_before + step
        samples = runner.batch.samples(step)
        with attributes_set(runner, {"is_in_step": True}):
            total = runner.loss(samples)
        runner.evaluation += 1
        if step == len(runner.sizes) - 1 and runner.evaluation == runner.evaluations:
            runner.logs.log(self.log)
        return total

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: torch.optim.Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Make all local steps of the batch, each for all clients at once."""
        if (runner := self.runner) is None or not len(runner.active):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            return
        runner.may_update = not (self.trainer.gradient_clip_val or runner.phases)
        for step, active in enumerate(runner.active):
            runner.step, runner.evaluation = step, 0
            is_last = step + 1 == len(runner.active)
            before = runner.before_step(active)
            if is_last:
                optimizer.step(closure=optimizer_closure)
            else:
                self._light_step(runner, optimizer)
            runner.after_step(before, active)
            if not is_last:  # Lightning itself steps the schedulers after the last local step
                for config in self.trainer.lr_scheduler_configs:
                    if config.interval == "step":
                        self.lr_scheduler_step(config.scheduler, None)
        runner.step = 0

    def _light_step(
        self, runner: VectorizedRunner, optimizer: torch.optim.Optimizer | LightningOptimizer
    ) -> None:
        """Make a local step without Lightning's hooks, which cost as much as a small model."""
        trainer = self.trainer
        bare: Any = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer

        @torch.enable_grad()
        def closure() -> Tensor:
            for param in runner.stacks.params.values():
                param.grad = None
            with trainer.precision_plugin.train_step_context():
                loss = self.training_step(None, 0)
            if not runner.has_updated:
                loss.backward()
                runner.hold_gradients()
                self.configure_gradient_clipping(
                    bare, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
                )
            return loss

        bare.step(closure=closure)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip each client's gradient by its own norm."""
        if self.runner is None:
            super().configure_gradient_clipping(
                optimizer, gradient_clip_val, gradient_clip_algorithm
            )
        elif gradient_clip_val:
            self.runner.clip(float(gradient_clip_val), gradient_clip_algorithm or "norm")


def user_module(module: LightningModule) -> LightningModule:
    """Return the user's module, unwrapped from :class:`VectorizedClients`."""
    return module.module if isinstance(module, VectorizedClients) else module
