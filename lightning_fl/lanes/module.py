"""``Lanes``: a LightningModule that trains many clients of another one at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from types import MethodType
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fl.lanes.attributes import carried, left_alone
from lightning_fl.lanes.check import mixes_samples, why_not_mapped
from lightning_fl.lanes.host import BufferPolicy, LaneHost
from lightning_fl.lanes.local_step import Outcome
from lightning_fl.lanes.optimizer_state import restack
from lightning_fl.lanes.plain import ModuleLane
from lightning_fl.lanes.samples import Collated, Padded, Samples, each_of
from lightning_fl.lanes.stacked import StackedLanes
from lightning_fl.types import ClientBatches, FederationError, check_package

#: What a module may say about each step of its training, which lanes do not ask it.
STEP_HOOKS = (
    "on_before_batch_transfer",
    "on_after_batch_transfer",
    "transfer_batch_to_device",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
)
TRANSFER_HOOKS = STEP_HOOKS[:3]
#: What a callback may say about gradients.
GRADIENT_HOOKS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
)
_HOOKS = {
    *(name for kind in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(kind)),
    *("validation_step", "test_step", "predict_step", "configure_callbacks"),
    *STEP_HOOKS,
}


class Lanes(LightningModule):
    r"""Train many clients of a LightningModule at once; a ``FederatedLoop`` drives it.

    The module's own ``training_step``, ``configure_optimizers`` and ``self.log`` run on stacked
    parameters, ``[lanes, ...]``. The loss is the sum of the lanes' losses,
    :math:`\sum_k L_k(w_k)`, so one step of an optimiser that treats every number alike is a step of
    every client as if it were alone: lanes change results by rounding only (and random layers,
    whose numbers come in another order). Everything else is the module's: validation, test,
    prediction, checkpoints.

    A module that cannot be mapped over lanes is trained one client after another, with a warning
    that says why: the first step is compared with the module's own, in float64.

    Args:
        module: Any LightningModule with automatic optimisation.
        lanes: Clients at once; ``auto`` chooses.
        steps_per_batch: Local steps in one Lightning batch, which saves Lightning's own time a
            step; ``auto`` chooses by memory. Hooks of callbacks see the last of them.
        compile: Make forward and backward pass one compiled graph; ``auto`` does where the time
            that is left pays for it.
        fast_matmul: Let oneDNN multiply matrices on a CPU: ``auto`` if that is as exact.
        channels_last: Keep images and filters of 2-d convolutions with their channels last in
            memory; ``auto`` does on a CPU, where that is faster.
        fixed_groups: Choose which clients train at once from all clients of a round, and give whole
            groups to processes. Results then are bit for bit the same on any number of processes;
            with fewer groups than processes some processes are idle. It needs a number of lanes.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if the optimiser looks
            at several clients at once (LBFGS, LARS).

    Example:
        >>> from lightning_fl import ClientModule
        >>> lanes = Lanes(ClientModule(nn.Linear(4, 3)), lanes=10)
        >>> list(lanes.state_dict())
        ['net.weight', 'net.bias']
    """

    def __init__(
        self,
        module: LightningModule,
        lanes: int | Literal["auto"] = "auto",
        steps_per_batch: int | Literal["auto"] = "auto",
        compile: bool | Literal["auto"] = "auto",
        fast_matmul: bool | Literal["auto"] = "auto",
        channels_last: bool | Literal["auto"] = "auto",
        fixed_groups: bool = False,
    ) -> None:
        super().__init__()
        check_package(module, LightningModule)
        if not isinstance(module, LightningModule) or isinstance(module, Lanes):
            raise FederationError(f"Lanes takes a LightningModule, got {module!r}")
        for name, value in (("lanes", lanes), ("steps_per_batch", steps_per_batch)):
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if value != "auto" and not (is_number and value >= 1):
                raise FederationError(f"{name} must be auto or a number from 1 up, got {value!r}")
        for name, option in (
            ("compile", compile),
            ("fast_matmul", fast_matmul),
            ("channels_last", channels_last),
        ):
            if option not in ("auto", True, False):
                raise FederationError(f"{name} must be auto, true or false, got {option!r}")
        if fixed_groups and lanes == "auto":
            raise FederationError(
                "fixed_groups needs a number of lanes: auto depends on the memory of the machine."
                " Set lanes"
            )
        self.fixed_groups = fixed_groups
        self.module = module
        self.example_input_array = module.example_input_array
        for name in ("_strict_loading", "_log_hyperparams", "_hparams_name", "_dtype", "_device"):
            vars(self)[name] = vars(module).get(name)
        self.lanes, self.steps_per_batch = lanes, steps_per_batch
        self.compiled, self.fast_matmul = compile, fast_matmul
        self.channels_last = channels_last
        self.stack: dict[str, nn.Parameter] = {}
        self.host: StackedLanes | None = None
        overridden = [name for name in _HOOKS if _has_own(module, name)]
        #: Why the module trains by itself, one client after another; None if it does not.
        self.reason = _why_alone(module, overridden)
        if self.reason is not None:
            rank_zero_warn(f"{type(module).__name__} is not trained in lanes: {self.reason}")
            overridden += ["training_step", "configure_optimizers"]
        for name in overridden:
            vars(self)[name] = getattr(module, name)

        vars(self)["_is_made"] = True

    # --- what is the module's ---------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module, where lanes have none: callbacks ask for them."""
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
        """Set an attribute of the module, where lanes have none of that name."""
        is_own = name in vars(self) or hasattr(type(self), name) or name == "module"
        is_modules = not is_own and vars(self).get("_is_made", False)
        if not is_modules or (name.startswith("_") and not hasattr(self.module, name)):
            super().__setattr__(name, value)
            return
        if isinstance(value, Tensor | nn.Module):
            self._refuse_while_training(name)
        setattr(self.module, name, value)

    def _refuse_while_training(self, name: str) -> None:
        """Refuse what would be the global model's where a caller expects a client's.

        Raises:
            FederationError: If clients are in training.
        """
        if self.host is not None and self.host.is_loaded:
            raise FederationError(
                f"a callback uses {type(self.module).__name__}.{name} while {self.host.count}"
                " clients train at once: it has one value for each of them. Use it between rounds"
                " (on_train_epoch_start, on_validation_start, on_train_epoch_end), write a hook"
                " on_client_end of the module, or train the module itself instead of Lanes(module)"
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the server's model."""
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own state: a checkpoint loads into the module without lanes."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the module's own state."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the server's parameters; not while clients train, who have their own."""
        self._refuse_while_training("parameters()")
        return super().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the server's buffers; not while clients train, who have their own."""
        self._refuse_while_training("buffers()")
        return super().named_buffers(*args, **kwargs)

    @property
    def hparams(self) -> Any:
        """The module's hyper-parameters."""
        return self.module.hparams

    @property
    def hparams_initial(self) -> Any:
        """The module's hyper-parameters as it was given them."""
        return self.module.hparams_initial

    @property
    def _current_fx_name(self) -> str | None:
        return cast("str | None", vars(self).get("_hook"))

    @_current_fx_name.setter
    def _current_fx_name(self, name: str | None) -> None:
        vars(self)["_hook"] = name  # The module's own self.log asks for it.
        if "module" in self._modules:
            self.module._current_fx_name = name

    # --- batches ----------------------------------------------------------------------------------

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        return each_of(super()._on_before_batch_transfer, batch, dataloader_idx)

    def _apply_batch_transfer_handler(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        return each_of(super()._apply_batch_transfer_handler, batch, device, dataloader_idx)

    # --- training ---------------------------------------------------------------------------------

    def layout(self, clients: int, batch_bytes: int, stepwise: bool) -> tuple[int, int]:
        """Return how many clients train at once, and local steps in a Lightning batch.

        Args:
            clients: In the round.
            batch_bytes: What a client's batch takes of memory.
            stepwise: Whether the loader fetches one local step of them only.
        """
        most = self._memory() // (4 * self._bytes)  # parameters, gradients, optimiser, workspace
        if self.lanes != "auto" and min(self.lanes, clients) > most:
            raise FederationError(
                f"{self.lanes} lanes of {self._bytes / 2**20:.0f} MiB each do not fit into memory"
                f" with their gradients: set lanes to at most {most}, or to auto"
            )
        lanes = (
            min(self._default_lanes(batch_bytes), max(most, 1))
            if self.lanes == "auto"
            else self.lanes
        )
        lanes = min(lanes, clients)
        if self.steps_per_batch != "auto":
            return lanes, self.steps_per_batch
        if stepwise:
            return lanes, MOST_STEPS
        return lanes, min(MOST_STEPS, BATCH_BYTES // (lanes * batch_bytes or 1)) or 1

    def _default_lanes(self, batch_bytes: int) -> int:
        """Return as many lanes as have parameters and samples in a processor's cache.

        Few for convolutions, whose hidden layers take much more memory than that.
        """
        if self._has_convolutions:
            return FEW_LANES
        return max(FEW_LANES, CACHE // (self._bytes + batch_bytes))

    def wants_channels_last(self) -> bool:
        """Say whether channels come last in memory."""
        if self.channels_last == "auto":
            return self._has_convolutions and self.device.type == "cpu"
        return self.channels_last

    @property
    def _has_convolutions(self) -> bool:
        return any(isinstance(m, nn.Conv2d) for m in self.module.modules())

    @property
    def _bytes(self) -> int:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return sum(t.numel() * t.element_size() for t in tensors) or 1

    def _memory(self) -> int:
        """Bytes of the device, all of them: what is free just now differs from run to run."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        if not hasattr(os, "sysconf"):  # Windows
            return sys.maxsize
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        processes = 1 if self._trainer is None else self._trainer.num_devices
        return memory // processes

    def configure_optimizers(self) -> Any:
        """Let the module make its optimiser, and give that the stacked parameters."""
        made = self.module.configure_optimizers()
        params = dict(self.module.named_parameters())
        self.stack = {
            name: nn.Parameter(
                param.detach()[None].clone(memory_format=torch.contiguous_format),
                requires_grad=param.requires_grad,
            )
            for name, param in params.items()
        }
        stacked = {id(param): self.stack[name] for name, param in params.items()}
        for optimizer in optimizers_in(made):
            restack(optimizer, stacked)
        return made

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Take the samples of the batch apart, by local step and client.

        Args:
            batch: The samples of several local steps and clients.
            batch_idx: Local steps that these clients have made before.
        """
        if (host := self.host) is None:
            if self.reason is not None:
                return
            raise FederationError("Lanes is trained by a FederatedLoop: add one to the callbacks")
        host.logged = {}
        if not len(host.active):  # this process waits for others
            return
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]  # set by the connector
        plan = data.plan()
        host.steps_before, host.fetch = batch_idx, None
        if plan.stepwise:
            host.fetch, host.transfers = data.local_steps(), self._transfers()
        steps = len(host.sizes) if host.fetch is None else 1
        if not data.has_samples_in_front:
            host.batch = batch if isinstance(batch, ClientBatches) else ClientBatches([batch])
            return
        host.batch = _unflatten(batch, steps, host.count)
        full = host.sizes == tree_leaves(host.batch)[0].shape[2]
        host.is_even = (full & host.active).all(1).tolist()

    def on_client_start(self) -> None:
        """Call the module's hook for each client, with its tensors; what it writes is kept."""
        self._call_for_each("on_client_start")

    def on_client_end(self) -> None:
        """Call the module's hook for each client, with its tensors; what it writes is kept."""
        self._call_for_each("on_client_end")

    def _call_for_each(self, name: str) -> None:
        hook: Any = getattr(self.module, name, None)
        if not callable(hook):
            return
        if self.host is None:
            hook()
            return
        for lane in range(self.host.count):
            with self.host.client(lane):
                hook()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the sum of the clients' losses in one local step."""
        assert self.host is not None
        host, step = self.host, self.host.step
        host.local.batch_idx = host.steps_before + step
        samples = self._samples(host, step)
        if host.count > 1 and not host.is_ready:
            self._choose(host, samples)
        total, outcome = host.loss(samples, host.active[step])
        self._note(host, outcome, samples)
        host.evaluation += 1
        if step == len(host.sizes) - 1 and host.evaluation == host.evaluations:
            self._log(host)
        return total

    def _samples(self, host: StackedLanes, step: int) -> Samples:
        """Return the samples of a local step."""
        if isinstance(host.batch, ClientBatches):
            return Collated(host.batch[step * host.count : (step + 1) * host.count])
        return Padded(self._padded(host, step), host.sizes[step])

    def _padded(self, host: StackedLanes, step: int) -> Any:
        """Return the samples of a local step, ``[k, B, ...]``."""
        if host.fetch is None or step == 0:
            return tree_map(lambda t: t[step], host.batch)
        # Mapped over lanes no module can keep them: their memory can be used again.
        batch = host.fetch(step, host.at_once and host.count > 1)
        if host.transfers:
            batch = self.trainer.precision_plugin.convert_input(batch)
            batch = self._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = self.trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        return tree_map(lambda t: t.view(host.count, -1, *t.shape[1:]), batch)

    def _transfers(self) -> bool:
        """Say whether anything happens to samples on their way to the device."""
        data, plugin = self.trainer.datamodule, self.trainer.precision_plugin  # type: ignore[attr-defined]
        return (
            self.device.type != "cpu"
            or type(plugin).convert_input is not Precision.convert_input
            or any(is_overridden(hook, data) for hook in TRANSFER_HOOKS)
        )

    def _choose(self, host: StackedLanes, samples: Samples) -> None:
        """Check that lanes do what the module does, and find out which way is the fastest.

        Raises:
            FederationError: If a step depends on what an earlier one left in plain attributes, of
                which there is one for all clients.
        """
        name, host.is_ready = type(self.module).__name__, True
        if names := carried(host, samples):
            raise FederationError(
                f"{name}.training_step depends on what an earlier step has left in its attributes"
                f" ({', '.join(names[:3])}). Clients that train at once would share them: keep it"
                " in a buffer (register_buffer), of which each client has its own, or train the"
                " module itself instead of Lanes(module)"
            )
        why = samples.why_not_stacked() or why_not_mapped(self.module, host, samples.pair())
        if why is not None:
            host.train_one_by_one()
            rank_zero_warn(f"{name} is trained one client after another, not at once: {why}")
            return
        if isinstance(samples, Padded) and host.weighted:
            host.weighted = not mixes_samples(self.module, host, samples.tensors)
        if self.lanes == "auto":
            with left_alone(self.module):
                each = [seconds(partial(host.trial, samples, at_once=way)) for way in (True, False)]
            if each[1] < each[0]:
                host.train_one_by_one()
        if self.compiled is True or (
            self.compiled == "auto" and host.at_once and self._compiling_pays(host)
        ):
            self._compile(host, samples)
        how = "at once" if host.at_once else "one after another, which is faster"
        rank_zero_info(f"{name}: {host.count} clients {how}{', compiled' * bool(host.graphs)}")

    def _compile(self, host: StackedLanes, samples: Samples) -> None:
        """Compile the step, unless it leaves parameters without a gradient, or uses ``batch_idx``.

        A graph has zeros for those: momentum and weight decay would move them. And each value of
        ``batch_idx`` would be another graph.
        """
        if unused := host.unused(samples):
            rank_zero_warn(
                f"lanes are not compiled: the first step does not use {unused[0]}. Freeze it with"
                " requires_grad_(False), or leave it out, to have them compiled"
            )
            return
        if host.uses_batch_idx(samples):
            rank_zero_warn(
                "lanes are not compiled: training_step uses batch_idx, and each of its values would"
                " be compiled anew. Leave it out of training_step to have them compiled"
            )
            return
        host.compile()

    def _compiling_pays(self, host: StackedLanes) -> bool:
        """Say whether the run is long enough, by its work: not by time, which varies.

        A step costs 6 operations a parameter and sample, at about 100 GFLOP/s, or Python's time.
        """
        trainer = self.trainer
        count = int(host.sizes[host.step].sum())
        took = max(2e-3, 6 * host.num_parameters * count / 1e11)
        rounds = (trainer.max_epochs or 0) - trainer.current_epoch
        steps = rounds * trainer.num_training_batches * len(host.sizes)
        return bool(steps * took * COMPILING_SAVES > COMPILING_TAKES)

    def _note(self, host: StackedLanes, outcome: Outcome, samples: Samples) -> None:
        """Keep what the module logged, and let it record the losses of those who still train."""
        device, active = outcome.loss.device, host.active[host.step]
        if host.step == 0:
            host.first_losses = outcome.task_loss
        if outcome.logs:
            sizes = samples.counts() if host.local.wants_batch_size else host.sizes[host.step]
            # Copies to the device do not wait for it, and nothing is read back.
            counts, trains = (t.to(device, non_blocking=True) for t in (sizes, active))
            for name, (value, size) in outcome.logs.items():
                weight = size.where(~size.isnan(), counts) * trains
                host.logged.setdefault(name, []).append((value, weight, active))
        if outcome.recorded:
            weight = (host.sizes[host.step] * active).to(device, non_blocking=True)
            record: Any = self.module.federated_record
            record(outcome.recorded["loss"].where(weight > 0, 0), weight)

    def _log(self, host: StackedLanes) -> None:
        """Log what the batch's steps and lanes logged, as one value."""
        for name, noted in host.logged.items():
            options = dict(host.local.log_options[name])
            each, weight, active = (torch.stack(part) for part in zip(*noted, strict=True))
            each, weight = each.double(), weight.double()
            if options.get("reduce_fx", "mean") in ("mean", torch.mean):
                total = weight.sum()
                options["batch_size"] = total.long() if total.device.type != "cpu" else int(total)
                value = (each.where(weight > 0, 0) * weight).sum() / weight.sum()
            else:
                reduce = options["reduce_fx"]
                at = active.flatten().nonzero()[:, 0].to(each.device, non_blocking=True)
                chosen = each.flatten()[at]
                value = getattr(chosen, reduce)() if isinstance(reduce, str) else reduce(chosen)
            self.log(name, value.float(), **options)
        for name, metric in host.local.metrics.items():
            self.module.log(name, metric, **host.local.log_options[name])

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: torch.optim.Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Make the local steps of the batch, of all clients at once."""
        if (host := self.host) is None or not len(host.active):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            return
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        watched = self._has_watchers()
        host.clips = scaled or watched or bool(self.trainer.gradient_clip_val)
        for step, active in enumerate(host.active):
            host.step = step
            is_last, host.evaluation = step + 1 == len(host.active), 0
            host.is_light = not (is_last or scaled or watched or host.evaluations > 1)
            before = host.before_step(active)
            if host.is_light:
                self._light_step(host, optimizer)
            else:
                optimizer.step(closure=optimizer_closure)
            host.after_step(before, active)
            if not is_last:  # Lightning steps schedulers after the last
                self._step_schedulers(host)
        host.step = 0

    def _has_watchers(self) -> bool:
        """Say whether a callback looks at gradients, or changes them, in every step."""
        return any(
            is_overridden(hook, callback, Callback)
            for callback in self.trainer.callbacks  # type: ignore[attr-defined]  # a connector's
            if not callback.__module__.startswith("lightning_fl.")
            for hook in GRADIENT_HOOKS
        )

    def _light_step(
        self, host: StackedLanes, optimizer: torch.optim.Optimizer | LightningOptimizer
    ) -> None:
        """Make a local step without Lightning's hooks, which take as long as a small model."""
        trainer = self.trainer
        bare: Any = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        for param in host.params.values():
            param.grad = None
        with trainer.precision_plugin.train_step_context():
            loss = self.training_step(None, 0)
        if not host.has_updated:
            loss.backward()
            self.configure_gradient_clipping(
                bare, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            )
            bare.step()
        else:
            host.end_step()

    def _step_schedulers(self, host: StackedLanes) -> None:
        """Step the schedulers that count local steps."""
        for config in self.trainer.lr_scheduler_configs:
            if config.interval == "step":
                self.lr_scheduler_step(config.scheduler, None)
                if host.graphs is not None:
                    host.graphs.restart()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip each client's gradient by its own norm."""
        if self.host is None:
            super().configure_gradient_clipping(
                optimizer, gradient_clip_val, gradient_clip_algorithm
            )
        elif gradient_clip_val:
            self.host.clip(float(gradient_clip_val), gradient_clip_algorithm or "norm")


#: Enough to fill a processor's vector units.
FEW_LANES = 10
#: Bytes that stay in a processor's cache.
CACHE = 2**25
#: Samples of one Lightning batch: more take longer, since their memory is new each time.
BATCH_BYTES = 4 * 2**20
#: Local steps of one Lightning batch: Lightning's own time is nothing beside them.
MOST_STEPS = 50
#: Seconds that compiling takes, and the share of a step that it saves, on the safe side.
COMPILING_TAKES, COMPILING_SAVES = 10, 0.5
#: Seconds of trials, after which there is no other.
LONG = 1.0


def lane_host(
    module: LightningModule,
    buffers: BufferPolicy,
    optimizer: torch.optim.Optimizer,
    keep_optimizer: bool,
) -> LaneHost:
    """Return where the clients of a module train: in itself, or in its lanes."""
    if not isinstance(module, Lanes):
        return ModuleLane(module, buffers, optimizer, keep_optimizer)
    if module.reason is not None:
        return ModuleLane(module.module, buffers, optimizer, keep_optimizer)
    module.host = StackedLanes(module, buffers, optimizer, keep_optimizer)
    return module.host


def seconds(step: Callable[[], None], repeats: int = 3) -> float:
    """Return the shortest of several times, after one that is not counted; of few, if long."""
    times = list[float]()
    while len(times) <= repeats and sum(times) < LONG:
        start = perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(perf_counter() - start)
    return min(times[1:] or times)


def _why_alone(module: LightningModule, overridden: list[str]) -> str | None:
    """Say what keeps a module from lanes, whatever its step does."""
    if own := [name for name in STEP_HOOKS if name in overridden]:
        return f"it has a hook for each step or batch of a client: {', '.join(sorted(own))}"
    if any(isinstance(m, nn.Embedding) and m.max_norm for m in module.modules()):
        return "an Embedding with max_norm changes its own weights in the forward pass"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters()):
        return "its parameters have hooks of their own"
    return None


def _has_own(module: LightningModule, name: str) -> bool:
    """Say whether a module does something of its own in a hook."""
    inherited = getattr(LightningModule, name, None)
    mine = vars(module).get(name) or getattr(type(module), name, None)
    return callable(mine) and mine is not inherited


def optimizers_in(made: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimisers in what ``configure_optimizers`` returns, whatever its form."""
    if isinstance(made, torch.optim.Optimizer):
        yield made
    elif isinstance(made, dict):
        yield from optimizers_in(made.get("optimizer"))
    elif isinstance(made, list | tuple):
        for part in made:
            yield from optimizers_in(part)


def _unflatten(batch: Any, steps: int, lanes: int) -> Any:
    """Bring ``[steps * lanes * B, ...]`` to ``[steps, lanes, B, ...]``."""

    def leaf(value: Any) -> Tensor:
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) % (steps * lanes):
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise FederationError(
                f"a hook of the data or the precision has changed the number of samples: got {got}"
                f" for {steps} local steps of {lanes} clients. Train the module without Lanes"
            )
        return value.view(steps, lanes, len(value) // (steps * lanes), *value.shape[1:])

    return tree_map(leaf, batch)
