"""``VmapRunner``, which trains several clients at once on stacked tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_fl.runners.base import BufferPolicy, ClientRunner, KeepOptimizer
from lightning_fl.runners.local_step import Tensors
from lightning_fl.runners.logs import StepLogs
from lightning_fl.runners.matmul import allow_fast_matmul
from lightning_fl.runners.memory import keep_freed_memory
from lightning_fl.runners.optimizer_state import Rows
from lightning_fl.runners.optimizer_values import params_of, step_hooks_of
from lightning_fl.runners.samples import BatchSamples, Samples
from lightning_fl.runners.separable import check_separable, fresh
from lightning_fl.runners.stacks import Stacks
from lightning_fl.runners.step_checks import StepChecks
from lightning_fl.runners.step_hooks import has_backward_hooks
from lightning_fl.runners.tensors import beside, flatten, placed, to_cpu, unflatten
from lightning_fl.runners.vectorized import VectorizedStep
from lightning_fl.types import FederationError, ServerState

#: Prefix of a batch's shape among the choices.
SHAPE = "compile "


class VmapRunner(ClientRunner):
    """Train clients at once: every tensor of the user's module is stacked, ``[k, ...]``.

    The loss is the sum over the clients and the optimizer is elementwise, so one optimizer step is
    an independent step of every client.

    Args:
        module: The user's module.
        buffers: How floating-point buffers are aggregated; see :class:`ClientRunner`.
        optimizer: The optimizer of the stacked parameters.
        keep_optimizer: Whether a client keeps its optimizer state between rounds.
        constants: Frozen parameters that are not stacked, by name.
        local: Names of the client-local tensors.
        params: The stacked parameters, by name.
        fast_matmul: Whether oneDNN multiplies matrices on a CPU.
        channels_last: Whether images and filters may be stored in channels-last memory format.
        rewrites: Whether to rewrite compiled graphs for a CPU.
        compile: Whether to compile; see :class:`VectorizedClients`.
        is_timed: Whether to choose the faster of vectorized and sequential steps by timing.
    """

    def __init__(
        self,
        module: LightningModule,
        buffers: BufferPolicy,
        optimizer: torch.optim.Optimizer,
        keep_optimizer: KeepOptimizer,
        constants: Mapping[str, nn.Parameter],
        local: Iterable[str],
        *,
        params: dict[str, nn.Parameter],
        fast_matmul: bool | Literal["auto"],
        channels_last: bool,
        rewrites: bool,
        compile: bool | Literal["auto"],
        is_timed: bool,
    ) -> None:
        super().__init__(module, buffers, optimizer, keep_optimizer, constants, local)
        self.may_compile = compile is not False
        self.is_linear = check_separable(self.optimizer_state, bool(keep_optimizer))
        self.stacks = Stacks(self.tensors, params, channels_last)
        self.vectorized = VectorizedStep(self.stacks, optimizer, rewrites)
        self.checks = StepChecks(self.vectorized, is_timed, compile)
        self.logs = StepLogs(self.vectorized.local)
        #: Clean-up functions that :meth:`close` calls.
        self.undo = ExitStack()
        matrices = (p.flatten(1) for p in self.named_parameters.values() if p.ndim > 1)
        shapes = ((len(m), m.shape[1]) for m in matrices)
        device = self.stacks.first.device
        self.undo.enter_context(allow_fast_matmul(fast_matmul, shapes, device))
        if device.type == "cpu":
            keep_freed_memory()
        #: Number of samples, and whether the client still trains, per local step of the Lightning
        #: batch and client, ``[steps, k]``.
        self.sizes = self.active = torch.zeros(0, 1)
        #: Whether the stacks hold clients in training, from their first hook to their last step.
        self.is_loaded = False
        #: Whether the module makes a local step, or several at once.
        self.is_in_step = False
        #: Whether the clients start from different tensors.
        self.starts_differ = False
        #: The samples of the Lightning batch.
        self.batch: BatchSamples | None = None
        #: Number of closure evaluations per local step, and those done in the current step.
        self.evaluations, self.evaluation = int(getattr(optimizer, "evaluations", 1)), 0
        #: Whether one graph may compute gradients and update, since nothing runs between them.
        self.may_update = True
        #: Task losses in the batch's first local step, ``[k]``.
        self.first_losses = torch.empty(0)
        self._client_ratios: Tensor | None = None
        #: Parameters before the optimizer step, if clients have different learning rates.
        self._start: list[Tensor] = []
        #: Values before the step, and optimizer states, of parameters that only some clients train.
        self._held_before: dict[str, tuple[Tensor, Tensors]] = {}
        #: Whether the optimizer is known to support clients that train different parameters.
        self._is_per_client = False

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check hooks, too; see :meth:`ClientRunner.check_optimizer`.

        Raises:
            FederationError: If a hook of the optimizer would see the stacked parameters, or if a
                parameter, or a layer after the first step, got a hook, which vectorized steps do
                not call.
        """
        super().check_optimizer(optimizer)
        name, remedy = type(self.module).__name__, "train the module without VectorizedClients"
        for hook in step_hooks_of(optimizer):
            if getattr(hook, "__self__", None) is not self:
                raise FederationError(
                    f"the optimizer of {name} has a step hook"
                    f" ({getattr(hook, '__qualname__', hook)}). It would run once for the stacked"
                    f" parameters of all clients instead of once per client: {remedy}"
                )
        for parameter, tensor in self.named_parameters.items():
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                raise FederationError(
                    f"a hook was registered on the parameter {parameter} of {name} after"
                    " VectorizedClients(module), and vectorized steps do not call it: register it"
                    f" in the constructor of {name}, or {remedy}"
                )
        if self.checks.is_tuned and self.stacks.at_once and has_backward_hooks(self.module):
            raise FederationError(
                f"a layer of {name} got a hook of its backward pass during the fit, and vectorized"
                f" steps do not call it: register it in the constructor of {name}, or {remedy}"
            )

    # --- clients ----------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, state: ServerState, rows: Sequence[Rows], lr: Sequence[float]) -> None:
        """Start clients; see :meth:`ClientRunner.load`."""
        self.adopt()
        self.is_loaded = True
        self.optimizer_state.reset()
        known = {id(param) for param in self.stacks.params.values()}
        if any(id(param) not in known for param in params_of(self.optimizer)):
            raise FederationError(
                "the optimizer has parameters that are not stacked: they were added after the start"
                " of the fit or do not belong to the module. Train the module without"
                " VectorizedClients"
            )
        self.count = len(rows)
        self._set_rates(lr, state.vector)
        is_shared = state.vector.stride(0) == 0 and not self.restored_first
        self.stacks.load(self.count, self._starts(state), is_shared, self.optimizer)
        self._load_rows(rows)
        self.starts_differ = not is_shared or any(rows)
        for name in self.restored_first if self.stacks.fixed else ():
            self.stacks.fixed[name] = self.stacks.params[name].detach().clone()

    def _set_rates(self, lr: Sequence[float], like: Tensor) -> None:
        """Set the clients' learning rates: one for all, or one per client."""
        ratios = self._ratios(lr)
        self._ratio, self._client_ratios = ratios[0], None
        self.vectorized.rate_ratios = ()
        if any(ratio != ratios[0] for ratio in ratios):
            if not self.is_linear:
                raise FederationError(
                    "vectorized clients cannot have different learning rates with"
                    f" {type(self.optimizer).__name__}, since its step is not proportional to the"
                    " rate. Use one rate for all clients, or train the module without"
                    " VectorizedClients"
                )
            self._ratio, self.vectorized.rate_ratios = 1.0, ratios
            self._client_ratios = placed(torch.tensor(ratios, dtype=torch.float64), like)

    def _starts(self, state: ServerState) -> Tensors:
        """Return the initial parameters and buffers, ``[k, ...]``."""
        names = [*self.shared, *self.shared_buffers]
        pieces = dict(zip(names, state.vector.split(self.vector.sizes, dim=1), strict=True))
        counters = state.counters.expand(self.count, -1).split(self.counters.sizes, dim=1)
        pieces |= dict(zip(self.named_counters, counters, strict=True))
        private = {n: first.expand(self.count, *first.shape) for n, first in self.private.items()}
        like = self.tensors.by_name
        return {name: unflatten(rows, like[name]) for name, rows in pieces.items()} | private

    def _load_rows(self, rows: Sequence[Rows]) -> None:
        """Restore the clients' local tensors.

        The optimizer state of a new client is zero, unless the optimizer has a method ``fresh``
        that maps a parameter and the name of a state to its initial value.
        """
        stacks = self._stored_stacks()
        for i, param in enumerate(params_of(self.optimizer)):
            prefix = f"optimizer.{i}."
            for key in sorted({key for kept in rows for key in kept if key.startswith(prefix)}):
                name = key.removeprefix(prefix)
                self.optimizer.state[param][name] = stacks[key] = fresh(self.optimizer, param, name)
        for i, kept in enumerate(rows):
            for key, row in kept.items():
                stacks[key][i].copy_(row, non_blocking=True)

    def set_hyperparameters(self, values: Mapping[str, Tensor]) -> None:
        """Set numbers of the module; see :meth:`ClientRunner.set_hyperparameters`."""
        self.stacks.hyperparameters = self._placed(values)

    def begin_batch(self, work: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Record the sizes of local steps; see :meth:`ClientRunner.begin_batch`."""
        self.sizes, self.active = work()

    def write(self, state: ServerState) -> None:
        """Load a state into the module; no client is in training."""
        super().write(state)
        self.is_loaded = False

    @torch.no_grad()
    def collect(self, state: ServerState) -> tuple[Tensor, Tensor]:
        """Return the client updates and counters; see :meth:`ClientRunner.collect`."""
        self.is_loaded = False
        stacks = self.stacks.by_name
        floating = [flatten(stacks[name]) for name in (*self.shared, *self.shared_buffers)]
        delta = self._moved(torch.cat(floating, dim=1).to(state.vector.dtype), state)
        if self.buffers == "server" or not self.named_counters:
            return delta, state.counters.expand(self.count, -1)
        counters = torch.cat([flatten(stacks[name]) for name in self.named_counters], dim=1)
        return delta, counters.to(self.counters.dtype)

    def client_parameters(self) -> dict[str, Tensor]:
        """Return the clients' parameters; see :meth:`ClientRunner.client_parameters`."""
        return {name: self.stacks.params[name].detach() for name in self.shared}

    def _trained_tensor(self, name: str) -> nn.Parameter:
        return self.stacks.params[name]

    def client(self, row: int) -> AbstractContextManager[None]:
        """Put a client's tensors into the module; see :meth:`Stacks.client`."""
        return self.stacks.client(row)

    def reported(self, outputs: Any) -> Tensor:
        """Return the clients' task losses; see :meth:`ClientRunner.reported`."""
        return self.first_losses

    def of_client(self, values: Tensor) -> Tensor | None:
        """Return the value of a client that trains by itself; see :meth:`ClientRunner.of_client`.

        Raises:
            FederationError: If clients train at once. Their steps are then made one by one.
        """
        if not self.is_in_step:
            return None
        if (row := self.stacks.row) is None:
            raise FederationError(
                "training_step reads global_step, trainer.num_training_batches, is_last_batch or"
                " the length of the training loader, which are those of one client. To train them"
                " at once, use batch_idx or current_epoch, or pass the number to the constructor"
            )
        return values[row]

    def rows(self) -> list[dict[str, Tensor]]:
        """Return the local tensors of each client, by name."""
        kept = self._stored_stacks()
        kept = to_cpu({**kept, **self._optimizer_rows()})
        return [{key: stack[i] for key, stack in kept.items()} for i in range(self.count)]

    def _stored_stacks(self) -> Tensors:
        """Return the stacks of the tensors that are stored for each client."""
        stacks = self.stacks.by_name
        return {self.row_name(name): stacks[name].detach() for name in self.stored}

    def choices(self) -> dict[str, bool]:
        """Return the choices of :func:`tune`; see :meth:`ClientRunner.choices`."""
        if not self.checks.is_tuned:
            return {}
        step, at_once = self.vectorized, self.stacks.at_once
        return {
            "at_once": at_once,
            "compiled": step.graphs is not None,
            "side_by_side": step.side_by_side is not None,
            "weighted": step.weighted,
            **{f"{SHAPE}{shape}": is_compiled for shape, is_compiled in step.shapes.items()},
        }

    def choose(self, choices: Mapping[str, bool]) -> None:
        """Restore choices; see :meth:`ClientRunner.choose`."""
        if choices:
            self.checks.is_tuned = True
            self.vectorized.weighted = choices.get("weighted", self.vectorized.weighted)
            if not choices.get("at_once", True):
                self.stacks.train_one_by_one()
            if choices.get("compiled"):
                self.vectorized.compile()
            if choices.get("side_by_side"):
                self.vectorized.compile_one()
            self.vectorized.shapes |= {
                name.removeprefix(SHAPE): is_compiled
                for name, is_compiled in choices.items()
                if name.startswith(SHAPE)
            }

    def close(self) -> None:
        """Release the optimizer and undo global settings."""
        with self.undo:
            self.vectorized.close()
            super().close()

    # --- a local step -----------------------------------------------------------------------------

    def loss(self, samples: Samples) -> Tensor:
        """Make the forward pass of all clients in the next local step.

        Args:
            samples: The samples of each client.

        Returns:
            The sum of losses, for the backward pass.
        """
        active, versions = self.active[self.step], self.stacks.versions()
        updates = self.may_update and self._client_ratios is None and not self.gradient_terms
        total, outcome = self.vectorized.loss(samples, active, updates)
        # Sequential steps can write to parameters without a new version.
        may_have_written = not self.stacks.maps or versions != self.stacks.versions()
        if self._client_ratios is not None and self.evaluations == 1 and may_have_written:
            self._note_start()
        self._note_held()
        if self.step == 0:
            self.first_losses = outcome.task_loss
        self.logs.note(outcome, samples, self.sizes[self.step], active)
        return total

    @torch.no_grad()
    def before_step(self, active: Tensor) -> Tensors:
        """Return the tensors that :meth:`after_step` restores for clients that are done."""
        if self._client_ratios is not None:
            self._note_start()
        if active.all():
            return {}
        return {name: tensor.clone() for name, tensor in self._stepped().items()}

    @torch.no_grad()
    def _note_start(self) -> None:
        """Record the parameters before the optimizer step, after writes of the module itself."""
        self._start = [p.detach().clone() for p in self.stacks.params.values() if p.requires_grad]

    @torch.no_grad()
    def after_step(self, before: Tensors, active: Tensor) -> None:
        r"""Apply each client's learning rate, and undo the step of clients that were done.

        For an optimizer that is linear in its rate, a step at :math:`\eta_k` is
        :math:`w + \frac{\eta_k}{\eta} (w' - w)`, where :math:`w'` is the step at :math:`\eta`.
        """
        if self._client_ratios is not None:
            trained = [p.detach() for p in self.stacks.params.values() if p.requires_grad]
            for now, start in zip(trained, self._start, strict=True):
                now.copy_(start.lerp(now, beside(self._client_ratios, now).to(now.dtype)))
        self._restore_held()
        for name, now in self._stepped().items() if before else ():
            old = before[name] if name in before else self._fresh(name)
            now.copy_(torch.where(beside(active, now), now, old))

    # --- phases -----------------------------------------------------------------------------------

    def start_phases(self, ends: Tensor) -> None:
        """Start the phases of the clients; see :meth:`ClientRunner.start_phases`.

        Raises:
            FederationError: If clients are in different phases in the same local step, and the
                optimizer has values that all clients share or evaluates the loss several times.
        """
        super().start_phases(ends)
        if self.phases and not self.phases.is_aligned:
            self._check_per_client(
                "vectorized clients that change from phase to phase in different local steps are",
                "Set num_steps instead of local_epochs in the phases and in the policy, choose",
            )

    def _check_per_client(self, what: str, remedy: str) -> None:
        """Check that a step of the optimizer can be undone for some of the clients."""
        if self._is_per_client:
            return
        reason = "it evaluates the loss several times in a step" if self.evaluations > 1 else ""
        try:
            check_separable(self.optimizer_state, keep=True)
        except FederationError:
            reason = "clients share a part of its state, such as a step counter"
        if reason:
            raise FederationError(
                f"{what} not supported with {type(self.optimizer).__name__}, because {reason}."
                f" {remedy} SGD without dampening, or train the module without VectorizedClients"
            )
        self._is_per_client = True

    def _held(self) -> Mapping[str, Tensor | None]:
        if not self.phases:
            return {}
        return self.phases.held(self.steps_before + self.step, self.active[self.step])

    @torch.no_grad()
    def _note_held(self) -> None:
        """Record parameters that only some clients train in this step, and their states."""
        if partial := self.vectorized.partial:
            self._check_per_client(
                "vectorized clients of which only some use a parameter"
                f" ({next(iter(partial))}) in a local step are",
                "Choose",
            )
        self._held_before = {
            name: (
                self.stacks.params[name].detach().clone(),
                {
                    key: value.clone()
                    for key, value in self.optimizer.state.get(self.stacks.params[name], {}).items()
                    if isinstance(value, Tensor)
                },
            )
            for name in self._trained_by(partial)
        }

    def _trained_by(self, partial: Mapping[str, Tensor]) -> Tensors:
        """Return the clients, ``[k]``, that train each parameter that only some clients train.

        Args:
            partial: The clients with a gradient of each parameter of which others have none.
        """
        found = {name: clients for name, clients in self._held().items() if clients is not None}
        for name, clients in partial.items():
            found[name] = found[name] & clients if name in found else clients
        return found

    def _restore_held(self) -> None:
        """Undo the step of parameters for the clients that do not train them."""
        if not self._held_before:
            return
        partial = self.vectorized.partial.items()
        without = {name: clients for name, clients in partial if name not in self.completed}
        for name, clients in self._trained_by(without).items():
            before, states = self._held_before[name]
            param = self.stacks.params[name]
            now = param.detach()
            now.copy_(torch.where(beside(clients, now), now, before))
            for key, value in self.optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor):
                    old = states[key] if key in states else fresh(self.optimizer, param, key)
                    value.copy_(torch.where(beside(clients, value), value, old))

    def _stepped(self) -> Tensors:
        """Return the tensors that a step changes: parameters, and optimizer state if it is kept."""
        params = {self.row_name(name): p.detach() for name, p in self.stacks.params.items()}
        return {**params, **self._optimizer_rows()}

    def _fresh(self, row_name: str) -> Tensor:
        """Return the initial value of an optimizer state.

        A phase may begin, and create the state of its parameters, after some clients are done.
        """
        _, index, key = row_name.split(".", 2)
        return fresh(self.optimizer, params_of(self.optimizer)[int(index)], key)

    @torch.no_grad()
    def clip(self, value: float, algorithm: str) -> None:
        """Clip gradients, each client's by its own norm as in ``clip_grad_norm_``.

        Args:
            value: The maximum value or norm.
            algorithm: ``value`` or ``norm``.
        """
        grads = [param.grad for param in params_of(self.optimizer) if param.grad is not None]
        if not grads:
            return
        if algorithm == "value":
            torch._foreach_clamp_max_(grads, value)
            torch._foreach_clamp_min_(grads, -value)
            return
        norms = torch.stack([flatten(grad).norm(dim=1) for grad in grads])
        scale = (value / (norms.norm(dim=0) + 1e-6)).clamp(max=1)
        for grad in grads:
            grad.mul_(beside(scale, grad))
