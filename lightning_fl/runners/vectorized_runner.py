"""``VectorizedRunner``, which trains the clients of a group at once on stacked tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fl.contracts.update import ServerState
from lightning_fl.errors import FederationError
from lightning_fl.hooks import GRADIENT_HOOKS
from lightning_fl.runners.base import BufferPolicy, ClientRunner, KeepOptimizer
from lightning_fl.runners.client_optimizers import Rows
from lightning_fl.runners.compiled import MOST_GRAPHS, Graphs, graph_of, shape_of, with_gradients
from lightning_fl.runners.groups import knows_weights
from lightning_fl.runners.local_step import LocalStep, Outcome, StepLogs, Tensors
from lightning_fl.runners.optimizer import (
    evaluates_often,
    fresh,
    has_step_hooks,
    is_proportional,
    params_of,
)
from lightning_fl.runners.samples import BatchSamples, Collated, Padded, Samples
from lightning_fl.runners.stacks import Stacks, keep_freed_memory
from lightning_fl.runners.tensors import (
    ModuleTensors,
    beside,
    flatten,
    placed,
    scattered,
    select,
    unflatten,
)
from lightning_fl.runners.user_hooks import callbacks_with, why_alone


class VectorizedRunner(ClientRunner):
    """Train clients at once: every tensor of the user's module is stacked, ``[k, ...]``.

    The loss is the sum over the clients and the optimizer is elementwise, so one optimizer step is
    an independent step of every client.

    Args:
        tensors: The tensors of the user's module.
        buffers: How floating-point buffers are aggregated; see :class:`ClientRunner`.
        optimizer: The optimizer of the stacked parameters.
        keep_optimizer: Whether a client keeps its optimizer state between rounds.
        params: The stacked parameters, by name.
    """

    def __init__(
        self,
        tensors: ModuleTensors,
        buffers: BufferPolicy,
        optimizer: torch.optim.Optimizer,
        keep_optimizer: KeepOptimizer,
        params: dict[str, nn.Parameter],
    ) -> None:
        super().__init__(tensors, buffers, [optimizer], keep_optimizer)
        self.stacks = Stacks(tensors, params)
        self.local = LocalStep(self.module, tensors.constants)
        self.logs = StepLogs(self.local)
        #: Whether smaller batches are padded with samples of weight 0.
        self.weighted = knows_weights(self.module)
        #: Compiled forms of the step, or None.
        self.graphs: Graphs | None = None
        #: Whether the last step has also updated the parameters, as a graph of SGD does.
        self.has_updated = False
        if self.stacks.first.device.type == "cpu":
            keep_freed_memory()
        #: Number of samples, and whether the client still trains, per local step of the Lightning
        #: batch and client, ``[steps, k]``.
        self.sizes = self.active = torch.zeros(0, 1)
        #: Whether the stacks hold clients in training, from their first hook to their last step.
        self.is_loaded = False
        #: Whether the module makes a local step.
        self.is_in_step = False
        #: The samples of the Lightning batch.
        self.batch: BatchSamples | None = None
        #: Number of closure evaluations per local step, and those done in the current step.
        repeats = evaluates_often([optimizer])
        self.evaluations, self.evaluation = int(getattr(repeats, "evaluations", 1)), 0
        #: Whether the optimizer moves the parameters before it evaluates the closure.
        self.moves_first = repeats is not None
        #: Whether one graph may compute gradients and update, since nothing runs between them.
        self.may_update = True
        #: Task losses in the batch's first local step, ``[k]``.
        self.first_losses = torch.empty(0)
        self._client_ratios: Tensor | None = None
        #: Parameters before the optimizer step, if clients have different learning rates.
        self._start: list[Tensor] = []

    def why_hooked(self) -> str | None:
        """Return the reason why hooks need one client after another, or None."""
        if seeing := callbacks_with(GRADIENT_HOOKS, self.module.trainer):
            return f"hooks of {', '.join(seeing)} see the gradients of a client"
        if has_step_hooks(self.optimizer):
            return f"{type(self.optimizer).__name__} has a step hook"
        return why_alone(self.module)

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Check for hooks that came during the fit; see :meth:`ClientRunner.check_optimizers`."""
        super().check_optimizers(optimizers)
        if why := self.why_hooked():
            raise FederationError(
                f"{type(self.module).__name__} trains many clients at once, and now {why}: register"
                " hooks before the fit, or train the module without VectorizedClients"
            )

    # --- clients ----------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, state: ServerState, rows: Sequence[Rows], lr: Sequence[float]) -> None:
        """Start clients; see :meth:`ClientRunner.load`."""
        self.tensors.adopt()
        self.is_loaded = True
        self.optimizer_state.reset()
        self.count = len(rows)
        self._set_rates(lr, state.vector)
        self.stacks.load(self.count, self._starts(state), self.optimizer)
        self._load_rows(rows)
        self.stacks.note_start(self.shared if state.vector.stride(0) == 0 else ())

    def note_start(self) -> None:
        """Record where the clients start from; see :meth:`ClientRunner.note_start`."""
        self.stacks.note_start()

    def _set_rates(self, lr: Sequence[float], like: Tensor) -> None:
        """Set the clients' learning rates: one for all, or one per client."""
        ratios = self._ratios(lr)
        self._ratio, self._client_ratios = ratios[0], None
        if any(ratio != ratios[0] for ratio in ratios):
            if not is_proportional(self.optimizer):
                raise FederationError(
                    "vectorized clients cannot have different learning rates with"
                    f" {type(self.optimizer).__name__}, since its step is not proportional to the"
                    " rate. Use one rate for all clients, or train the module without"
                    " VectorizedClients"
                )
            self._ratio = 1.0
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
        """Restore the clients' local tensors; the optimizer state of a new client is fresh."""
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
        like = self.vector
        self.stacks.hyperparameters = self.declared.placed(values, like.dtype, like.device)

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
        """Return None outside of a step; see :meth:`ClientRunner.of_client`.

        Raises:
            FederationError: In a step, which is that of several clients.
        """
        if self.is_in_step:
            raise FederationError(
                "training_step reads global_step, trainer.num_training_batches, is_last_batch or"
                " the length of the training loader, which are those of one client. To vectorize"
                " it, use batch_idx or current_epoch, or pass the number to the constructor"
            )
        return None

    def rows(self) -> list[dict[str, Tensor]]:
        """Return the local tensors of each client, by name."""
        stacks = {**self._stored_stacks(), **self._optimizer_rows()}
        kept = {name: stack.detach().cpu() for name, stack in stacks.items()}
        return [{key: stack[i] for key, stack in kept.items()} for i in range(self.count)]

    def _stored_stacks(self) -> Tensors:
        """Return the stacks of the tensors that are stored for each client."""
        stacks = self.stacks.by_name
        return {self.row_name(name): stacks[name].detach() for name in self.stored}

    # --- a local step -----------------------------------------------------------------------------

    def compile(self) -> None:
        """Compile forward and backward pass into one graph per batch shape."""
        self.graphs = Graphs(self.local, self.optimizer)

    def loss(self, samples: Samples) -> Tensor:
        """Make the forward pass of all clients, and update the buffers of those that still train.

        Args:
            samples: The samples of each client.

        Returns:
            The sum of losses, for the backward pass.
        """
        active, self.has_updated = self.active[self.step], False
        updates = self.may_update and self._client_ratios is None and not self.gradient_terms
        try:
            total, outcome = self._losses(samples, active, updates)
        except Exception as error:  # an operation without vmap rule, or a mistake of the user
            error.add_note(
                "If the step cannot be vectorized, resume from the last checkpoint without"
                " VectorizedClients: --vectorize=null --ckpt_path=last"
            )
            raise
        if self._client_ratios is not None and not self.moves_first:
            self._note_start()  # after what the step itself writes
        for name, buffer in outcome.buffers.items():
            after = buffer.detach()
            if not active.all():
                after = torch.where(beside(active, after), after, self.stacks.buffers[name])
            self.stacks.buffers[name] = after
        if self.step == 0:
            self.first_losses = outcome.task_loss
        self.logs.note(outcome, samples, self.sizes[self.step], active)
        return total

    def _losses(self, samples: Samples, active: Tensor, updates: bool) -> tuple[Tensor, Outcome]:
        if isinstance(samples, Collated) and (why := samples.why_not_stacked()):
            raise FederationError(why)
        if isinstance(samples, Padded) and samples.is_full:
            return self._step_all(samples.tensors, None, updates)
        # A graph would also update clients that are done.
        updates = updates and bool(active.all())
        if isinstance(samples, Padded) and self.weighted and len(samples.sizes.unique()) > 1:
            return self._step_all(samples.tensors, self._weights(samples), updates)
        groups = samples.groups()
        if len(groups) == 1 and len(groups[0][0]) == self.count:
            return self._step_all(groups[0][1], None, updates)
        outcomes, used = zip(*(self._step_some(*group) for group in groups), strict=True)
        for what, names in (("uses", used), ("logs", [{*outcome.logs} for outcome in outcomes])):
            if some := names[0].union(*names) - names[0].intersection(*names):
                raise FederationError(
                    f"it {what} {min(some)} for some clients only, as their batches differ"
                )
        total = torch.stack([outcome.loss.sum() for outcome in outcomes]).sum()
        at = torch.cat([rows for rows, _ in groups])
        return total, tree_map(lambda *t: scattered(torch.cat(t), at, self.count), *outcomes)

    def _weights(self, samples: Padded) -> Tensor:
        """Return the weights of the samples in the mean of their client, ``[k, B]``; 0 of padding.

        Without weights, padding would change the means.
        """
        most, sizes = tree_leaves(samples.tensors)[0].shape[1], samples.sizes[:, None]
        weight = (torch.arange(most) < sizes).double() / sizes
        return placed(weight.to(self.stacks.first.dtype), self.stacks.first)

    def _step_some(self, rows: Tensor, batch: Any) -> tuple[Outcome, set[str]]:
        """Make the step of some clients; their batches are ``[len(rows), ...]``.

        Returns:
            The outcome, and the names of the parameters that get a gradient.
        """
        stacks = self.stacks
        own = tree_map(partial(select, rows=rows), stacks.arguments)
        params: Tensors = own["params"]
        outcome = self.local.many(**own, batch=batch, weight=None)
        for name, param in stacks.params.items():  # the step may write, as an EMA teacher does
            if params[name]._version:
                with torch.no_grad():
                    param.index_copy_(0, placed(rows, param), params[name].detach())
        return outcome, graph_of(outcome.loss, params)

    def _step_all(self, batch: Any, weight: Tensor | None, updates: bool) -> tuple[Tensor, Outcome]:
        """Make the step of all clients; their batches are ``[k, ...]``."""
        stacks, graphs = self.stacks, self.graphs
        shape = "" if graphs is None else shape_of((batch, weight))
        own: dict[str, Any] = {**stacks.arguments, "batch": batch, "weight": weight}
        params: Tensors = own.pop("params")
        if graphs is not None and graphs.shapes.get(shape):
            updates = updates and graphs.can_update
            how = own | {"is_mapped": self.count > 1}
            if (made := graphs.step(shape, updates, params, how)) is not None:
                grads, outcome = made
                self.has_updated = updates
                total = with_gradients(outcome.loss, stacks.params, grads)
                return total, _apart(outcome, batch)
        outcome = self.local.many(params, **own)
        if graphs is not None and shape not in graphs.shapes and len(graphs.shapes) < MOST_GRAPHS:
            graphs.note(shape, batch, graph_of(outcome.loss, params), params)
        return outcome.loss.sum(), _apart(outcome, batch)

    @torch.no_grad()
    def before_step(self, active: Tensor) -> Tensors:
        """Return the tensors that :meth:`after_step` restores for clients that are done."""
        if self._client_ratios is not None and self.moves_first:
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
        for name, now in self._stepped().items() if before else ():
            if (old := before.get(name)) is None:  # made since then, as a phase has begun
                _, index, key = name.split(".", 2)
                old = fresh(self.optimizer, params_of(self.optimizer)[int(index)], key)
            now.copy_(torch.where(beside(active, now), now, old))

    def _stepped(self) -> Tensors:
        """Return the tensors that a step changes: parameters, and optimizer state if it is kept."""
        params = {self.row_name(name): p.detach() for name, p in self.stacks.params.items()}
        return {**params, **self._optimizer_rows()}

    def start_phases(self, ends: Tensor) -> None:
        """Start the phases of the clients; see :meth:`ClientRunner.start_phases`.

        Raises:
            FederationError: If clients are in different phases in the same local step.
        """
        super().start_phases(ends)
        if self.phases and not self.phases.is_aligned:
            raise FederationError(
                "vectorized clients change from phase to phase in different local steps: set"
                " num_steps instead of local_epochs in the phases and in the policy, or train the"
                " module without VectorizedClients"
            )

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


def _apart(outcome: Outcome, batch: Any) -> Any:
    """Return an outcome that shares no memory with its batch; later steps write to that memory."""
    own = {t.untyped_storage().data_ptr() for t in tree_leaves(batch) if isinstance(t, Tensor)}
    return tree_map(lambda t: t.clone() if t.untyped_storage().data_ptr() in own else t, outcome)
