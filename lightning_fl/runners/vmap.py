"""Many lanes: clients that train at once on stacked tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_fl.runners.base import BufferPolicy, ClientRunner, Rows, is_floating, to_cpu
from lightning_fl.runners.local_step import Tensors
from lightning_fl.runners.logs import StepLogs
from lightning_fl.runners.matmul import allow_fast_matmul
from lightning_fl.runners.memory import keep_freed_memory
from lightning_fl.runners.samples import BatchSamples, Samples
from lightning_fl.runners.separable import check_separable, fresh
from lightning_fl.runners.stacks import Stacks
from lightning_fl.runners.tensors import beside, flatten, placed, unflatten
from lightning_fl.runners.vectorized import VectorizedStep
from lightning_fl.types import FederationError, ServerState


class VmapRunner(ClientRunner):
    """Clients in lanes: every tensor of the user's module stacked, ``[k, ...]``.

    One step of the optimizer is a step of every client as if it were alone: the loss is the sum
    over the lanes, and the optimizer does the same to every number.

    Args:
        module: The user's module.
        buffers: What becomes of floating buffers; see :class:`ClientRunner`.
        optimizer: The optimizer of the stacked parameters.
        keep_optimizer: Whether a client keeps its optimizer's state from round to round.
        params: The stacked parameters, by name.
        fast_matmul: Whether oneDNN multiplies matrices on a CPU.
        channels_last: Whether images and filters may have their channels last in memory.
    """

    def __init__(
        self,
        module: LightningModule,
        buffers: BufferPolicy,
        optimizer: torch.optim.Optimizer,
        keep_optimizer: bool,
        *,
        params: dict[str, nn.Parameter],
        fast_matmul: bool | Literal["auto"],
        channels_last: bool,
    ) -> None:
        super().__init__(module, buffers, optimizer, keep_optimizer)
        self.is_linear = check_separable(self.optimizer_state, keep_optimizer)
        self.stacks = Stacks(self.tensors, params, channels_last)
        self.vectorized = VectorizedStep(self.stacks, optimizer)
        self.logs = StepLogs(self.vectorized.local)
        #: What :meth:`close` undoes.
        self.undo = ExitStack()
        matrices = (p.flatten(1) for p in self.named_parameters.values() if p.ndim > 1)
        self.undo.callback(
            allow_fast_matmul(
                fast_matmul, ((len(m), m.shape[1]) for m in matrices), self.stacks.first.device
            )
        )
        if self.stacks.first.device.type == "cpu":
            keep_freed_memory()
        #: Whether clients are in the lanes, from their first hook to the end of their last step.
        self.is_loaded = False
        #: Whether it is chosen how to train.
        self.is_ready = False
        #: The samples of the Lightning batch, and which of its local steps is next.
        self.batch: BatchSamples | None = None
        self.step = 0
        #: Local steps that these clients had made before the batch.
        self.steps_before = 0
        #: How often the optimizer asks for the loss in a local step, and how often it has.
        self.evaluations, self.evaluation = int(getattr(optimizer, "evaluations", 1)), 0
        #: Whether nothing happens between backward pass and update, so that a graph may do both.
        self.may_update = True
        #: Task losses in the batch's first local step, ``[k]``.
        self.first_losses = torch.empty(0)
        self._lane_ratios: Tensor | None = None
        #: Parameters when the optimizer's step begins, where lanes have rates of their own.
        self._start: list[Tensor] = []
        self._floating = [n for n, b in self.named_buffers.items() if is_floating(b)]

    # --- clients ----------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, state: ServerState, rows: Sequence[Rows], lr: Sequence[float]) -> None:
        """Begin clients; see :meth:`ClientRunner.load`."""
        self.adopt()
        self.is_loaded = True
        self.optimizer_state.reset()
        known = {id(param) for param in self.stacks.params.values()}
        if any(id(param) not in known for param, _ in self._optimized()):
            raise FederationError(
                "the optimizer has parameters that are not in the lanes, given to it after the"
                " start or not the module's own: train the module without VectorizedClients"
            )
        self.count = len(rows)
        self._set_rates(lr, state.vector)
        is_shared = state.vector.stride(0) == 0
        self.stacks.load(self.count, self._starts(state), is_shared, self.optimizer)
        self._load_rows(rows)

    def _set_rates(self, lr: Sequence[float], like: Tensor) -> None:
        """Set the clients' learning rates: one for all, or one for each lane."""
        ratios = self._ratios(lr)
        self._ratio, self._lane_ratios = ratios[0], None
        if any(ratio != ratios[0] for ratio in ratios):
            if not self.is_linear:
                raise FederationError(
                    f"clients in lanes cannot have learning rates of their own with"
                    f" {type(self.optimizer).__name__}, whose step is not proportional to it: use"
                    " one rate for all, or train the module without VectorizedClients"
                )
            self._ratio = 1.0
            self._lane_ratios = placed(torch.tensor(ratios, dtype=torch.float64), like)

    def _starts(self, state: ServerState) -> Tensors:
        """Return what parameters and buffers begin with; one value for what clients keep."""
        names = [*self.shared, *self._floating]
        pieces = dict(zip(names, state.vector.split(self.vector.sizes, dim=1), strict=True))
        counters = state.counters.expand(self.count, -1).split(self.counters.sizes, dim=1)
        pieces |= dict(zip(self.named_counters, counters, strict=True))
        own = {**self.named_parameters, **self.named_buffers}
        return {name: unflatten(rows, own[name]) for name, rows in pieces.items()} | self.private

    def _load_rows(self, rows: Sequence[Rows]) -> None:
        """Put back what clients kept; a client without anything starts from what an optimizer says.

        That is zero, unless the optimizer has a method ``fresh``, from a parameter and the name of
        a state to its value at first.
        """
        stacks = {f"buffer.{name}": buffer for name, buffer in self.stacks.buffers.items()}
        stacks |= {f"parameter.{name}": self.stacks.params[name].detach() for name in self.private}
        for i, (param, _) in enumerate(self._optimized()):
            prefix = f"optimizer.{i}."
            for key in sorted({key for kept in rows for key in kept if key.startswith(prefix)}):
                name = key.removeprefix(prefix)
                self.optimizer.state[param][name] = stacks[key] = fresh(self.optimizer, param, name)
        for lane, kept in enumerate(rows):
            for key, row in kept.items():
                stacks[key][lane].copy_(row, non_blocking=True)

    def begin_batch(self, sizes: Callable[[], Tensor], active: Tensor) -> None:
        """Note the samples of each client; see :meth:`ClientRunner.begin_batch`."""
        self.sizes, self.active = sizes(), active

    def write(self, state: ServerState) -> None:
        """Put a state into the module: no client is in training."""
        super().write(state)
        self.is_loaded = False

    @torch.no_grad()
    def collect(self, state: ServerState) -> tuple[Tensor, Tensor]:
        """Return the clients' moves and counters; see :meth:`ClientRunner.collect`."""
        self.is_loaded = False
        stacks: Tensors = {**self.stacks.params, **self.stacks.buffers}
        floating = [flatten(stacks[name]) for name in (*self.shared, *self._floating)]
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

    @contextmanager
    def client(self, lane: int) -> Iterator[None]:
        """Let the module have a client's tensors for a while; see :meth:`Stacks.client`."""
        with self.stacks.client(lane):
            yield

    def reported(self, outputs: Any) -> Tensor:
        """Return the clients' task losses; see :meth:`ClientRunner.reported`."""
        return self.first_losses

    def rows(self) -> list[dict[str, Tensor]]:
        """Return the tensors that each client keeps for itself."""
        params = self.stacks.params
        kept: Tensors = {f"parameter.{name}": params[name].detach() for name in self.private}
        if self.buffers == "local":
            kept |= {f"buffer.{name}": buffer for name, buffer in self.stacks.buffers.items()}
        if self.keep_optimizer:
            kept |= self.optimizer_state.rows()
        kept = to_cpu(kept)
        return [{key: stack[lane] for key, stack in kept.items()} for lane in range(self.count)]

    def choices(self) -> dict[str, bool]:
        """Return what was chosen; see :meth:`ClientRunner.choices`."""
        if not self.is_ready:
            return {}
        step, at_once = self.vectorized, self.stacks.at_once
        return {
            "at_once": at_once,
            "compiled": step.graphs is not None,
            "weighted": step.weighted,
        }

    def choose(self, choices: Mapping[str, bool]) -> None:
        """Take over choices; see :meth:`ClientRunner.choose`."""
        if choices:
            self.is_ready = True
            self.vectorized.weighted = choices.get("weighted", self.vectorized.weighted)
            if not choices.get("at_once", True):
                self.stacks.train_one_by_one()
            if choices.get("compiled"):
                self.vectorized.compile()

    def close(self) -> None:
        """Let go of the optimizer, and undo what the lanes have set elsewhere."""
        super().close()
        self.undo.close()

    # --- a local step -----------------------------------------------------------------------------

    def loss(self, samples: Samples) -> Tensor:
        """Make the forward pass of all clients in the next local step.

        Args:
            samples: What each client trains on.

        Returns:
            The sum of losses, to go back from.
        """
        active, versions = self.active[self.step], self.stacks.versions()
        rate = None
        if self.may_update and self._lane_ratios is None and not self.gradient_terms:
            # Inside the optimizer's own step its groups have the client's rate already.
            rate = 1.0 if self._own_lr else self._ratio
        total, outcome = self.vectorized.loss(samples, active, rate)
        # A module that trains by itself can write to its parameters without a new version.
        may_have_written = not self.stacks.maps or versions != self.stacks.versions()
        if self._lane_ratios is not None and self.evaluations == 1 and may_have_written:
            self._note_start()
        if self.step == 0:
            self.first_losses = outcome.task_loss
        self.logs.note(outcome, samples, self.sizes[self.step], active)
        return total

    @torch.no_grad()
    def before_step(self, active: Tensor) -> list[Tensor]:
        """Return what :meth:`after_step` needs of the time before the local step."""
        if self._lane_ratios is not None:
            self._note_start()
        return [] if active.all() else [tensor.clone() for tensor in self._stepped()]

    @torch.no_grad()
    def _note_start(self) -> None:
        """Note where the optimizer's step begins: behind what the module itself has written."""
        self._start = [p.detach().clone() for p in self.stacks.params.values() if p.requires_grad]

    @torch.no_grad()
    def after_step(self, before: list[Tensor], active: Tensor) -> None:
        r"""Give each lane its learning rate, and take the step back where a client was done.

        For an optimizer that is linear in its rate, a step at :math:`\eta_k` is
        :math:`w + \frac{\eta_k}{\eta} (w' - w)`, where :math:`w'` is the step at :math:`\eta`.
        """
        if self._lane_ratios is not None:
            trained = [p.detach() for p in self.stacks.params.values() if p.requires_grad]
            for now, start in zip(trained, self._start, strict=True):
                now.copy_(start.lerp(now, beside(self._lane_ratios, now).to(now.dtype)))
        for now, old in zip(self._stepped(), before, strict=False):
            now.copy_(torch.where(beside(active, now), now, old))

    def _stepped(self) -> list[Tensor]:
        """What a step changes: parameters, then the optimizer's state if somebody keeps it."""
        params = [param.detach() for param in self.stacks.params.values()]
        return params + (list(self.optimizer_state.rows().values()) if self.keep_optimizer else [])

    @torch.no_grad()
    def clip(self, value: float, algorithm: str) -> None:
        """Clip gradients, each lane by its own norm as ``clip_grad_norm_`` does."""
        grads = [param.grad for param, _ in self._optimized() if param.grad is not None]
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
