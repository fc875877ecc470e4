"""Many lanes: the tensors of several clients, stacked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.hooks import attributes_set
from lightning_fl.lanes.graphs import Graphs, depends_on_batch_idx, reads_batch_idx
from lightning_fl.lanes.host import (
    GLOBAL_PARAMETERS,
    BufferPolicy,
    LaneHost,
    Rows,
    is_floating,
    to_cpu,
)
from lightning_fl.lanes.local_step import LocalStep, Outcome, Tensors
from lightning_fl.lanes.matmul import allow_fast_matmul
from lightning_fl.lanes.memory import keep_freed_memory
from lightning_fl.lanes.samples import Collated, Padded, Samples
from lightning_fl.lanes.separable import check_separable, fresh
from lightning_fl.types import FederationError, ServerState

if TYPE_CHECKING:
    from lightning_fl.lanes.module import Lanes


#: Shapes of batches that are compiled.
MOST_GRAPHS = 2


class StackedLanes(LaneHost):
    """Clients in lanes: every tensor of the user's module stacked, ``[k, ...]``.

    One step of the optimiser is a step of every client as if it were alone: the loss is the sum
    over the lanes, and the optimiser does the same to every number.
    """

    def __init__(
        self,
        lanes: Lanes,
        buffers: BufferPolicy,
        optimizer: torch.optim.Optimizer,
        keep_optimizer: bool,
    ) -> None:
        super().__init__(lanes.module, buffers, optimizer, keep_optimizer)
        self.is_linear = check_separable(self.optimizer_state, keep_optimizer)
        self.lanes = lanes
        self.params: dict[str, nn.Parameter] = lanes.stack
        first = next(iter(self.params.values()))
        matrices = (p.flatten(1) for p in self.named_parameters.values() if p.ndim > 1)
        self.put_back_matmul = allow_fast_matmul(
            lanes.fast_matmul, ((len(m), m.shape[1]) for m in matrices), first.device
        )
        if first.device.type == "cpu":
            keep_freed_memory()
        self.wants_channels_last = lanes.wants_channels_last()
        self.local = LocalStep(lanes.module)
        #: Whether the step is mapped over the lanes; else they train one after another.
        self.at_once = True
        #: Whether clients are in the lanes, from their first hook to the end of their last step.
        self.is_loaded = False
        #: Whether it is chosen how to train.
        self.is_ready = False
        self.weighted = getattr(lanes.module, "federated_knows_weights", False) and not any(
            isinstance(m, _BatchNorm) for m in lanes.module.modules()
        )
        #: The Lightning batch's samples, ``[steps, k, B, ...]``, and which local step is next.
        self.batch: Any = None
        #: Local steps that these clients had made before the batch.
        self.steps_before = 0
        #: How to fetch the steps after the first, where the batch holds that alone.
        self.fetch: Callable[[int, bool], Any] | None = None
        self.step = 0
        #: How often the optimiser asks for the loss in a local step, and how often it has.
        self.evaluations, self.evaluation = int(getattr(optimizer, "evaluations", 1)), 0
        #: Of each local step, whether all clients train in it, on as many samples each.
        self.is_even: list[bool] = []
        #: Whether anything happens to samples on their way to the device.
        self.transfers = True
        #: Whether the step that was made has updated the parameters, too.
        self.has_updated = False
        #: Whether the step is made without Lightning, which would go back from its loss.
        self.is_light = False
        #: What the module logged in the batch, ``[k]`` each, and the samples behind it.
        self.logged: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
        #: Task losses in the batch's first local step, ``[k]``.
        self.first_losses = torch.empty(0)
        self.buffer_stack: Tensors = {}
        self.fixed: Tensors = {}
        self.fixed_is_shared = True
        #: Compiled forms of the step, or None.
        self.graphs: Graphs | None = None
        #: Whether gradients are clipped between backward pass and update.
        self.clips = False
        self._gradients: Tensors = {}
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._lane_ratios: Tensor | None = None
        #: Parameters when the optimiser's step begins, where lanes have rates of their own.
        self._start: list[Tensor] = []
        #: Whether it was said that batches cannot be stacked.
        self._is_said = False
        self._floating = [n for n, b in self.named_buffers.items() if is_floating(b)]

    # --- clients ----------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, state: ServerState, rows: Sequence[Rows], lr: Sequence[float]) -> None:
        """Begin clients; see :meth:`LaneHost.load`."""
        self.adopt()
        self.is_loaded = True
        self.optimizer_state.reset()
        known = {id(param) for param in self.params.values()}
        if any(id(param) not in known for param, _ in self._optimized()):
            raise FederationError(
                "the optimiser has parameters that are not in the lanes, given to it after the"
                " start or not the module's own: train the module itself instead of Lanes(module)"
            )
        self.count = k = len(rows)
        ratios = self._ratios(lr)
        self._ratio, self._lane_ratios = ratios[0], None
        if any(ratio != ratios[0] for ratio in ratios):
            if not self.is_linear:
                raise FederationError(
                    f"clients in lanes cannot have learning rates of their own with"
                    f" {type(self.optimizer).__name__}, whose step is not proportional to it: use"
                    " one rate for all, or train the module itself instead of Lanes(module)"
                )
            self._ratio = 1.0
            self._lane_ratios = _placed(torch.tensor(ratios, dtype=torch.float64), state.vector)
        names = [*self.shared, *self._floating]
        pieces = dict(zip(names, state.vector.split(self.vector.sizes, dim=1), strict=True))
        counters = state.counters.expand(k, -1).split(self.counters.sizes, dim=1)
        pieces |= dict(zip(self.named_counters, counters, strict=True))
        self._resize(k)
        for name, param in self.params.items():
            start = self.private.get(name)
            if start is None:
                start = _unflatten(pieces[name], self.named_parameters[name])
            param.copy_(start)
            param.grad = None
            param.requires_grad_(self.named_parameters[name].requires_grad)
        self.buffer_stack = {
            name: _unflatten(pieces[name], buffer).clone(memory_format=torch.contiguous_format)
            for name, buffer in self.named_buffers.items()
        }
        self.fixed_is_shared = state.vector.stride(0) == 0
        if self.wants_fixed:
            self.fixed = {
                name: (param.detach()[0] if self.fixed_is_shared else param.detach()).clone()
                for name, param in self.params.items()
            }
        self._load_rows(rows)

    def begin_batch(self, sizes: Callable[[], Tensor], active: Tensor) -> None:
        """Note the samples of each client; see :meth:`LaneHost.begin_batch`."""
        self.sizes, self.active = sizes(), active

    def write(self, state: ServerState) -> None:
        """Put a state into the module: no client is in training."""
        super().write(state)
        self.is_loaded = False

    def _resize(self, count: int) -> None:
        """Make place for so many lanes."""
        made = {
            id(param): (
                name,
                nn.Parameter(
                    self._laid_out(param.new_empty(count, *param.shape[1:])),
                    requires_grad=param.requires_grad,
                ),
            )
            for name, param in self.params.items()
            if len(param) != count or self._laid_out(param).stride() != param.stride()
        }
        if not made:
            return
        self.params.update(made.values())
        for group in self.optimizer.param_groups:
            group["params"] = [made[id(p)][1] if id(p) in made else p for p in group["params"]]

    @property
    def channels_last(self) -> bool:
        """Whether images and filters have their channels last in memory, lane by lane.

        Not where lanes are mapped: with such filters two convolutions, one after the other, get
        wrong gradients under vmap for a batch of one sample (torch 2.14), and say nothing.
        """
        return self.wants_channels_last and (self.count == 1 or not self.at_once)

    def train_one_by_one(self) -> None:
        """Do not map the step over the lanes."""
        self.at_once = False
        for param in self.params.values():
            param.data = self._laid_out(param.data)

    def _laid_out(self, stack: Tensor) -> Tensor:
        """Return a stack of tensors, ``[k, ...]``, in the lanes' layout in memory."""
        if not self.channels_last or stack.ndim != 5:
            return stack
        _, n, c, h, w = stack.shape
        # By its strides: contiguous() takes one channel for first and last at once.
        strides = (n * c * h * w, c * h * w, 1, c * w, c)
        if stack.stride() == strides:
            return stack
        return stack.new_empty_strided(stack.shape, strides).copy_(stack)

    def _load_rows(self, rows: Sequence[Rows]) -> None:
        """Put back what clients kept; a client without anything starts from what an optimiser says.

        That is zero, unless the optimiser has a method ``fresh``, from a parameter and the name of
        a state to its value at first.
        """
        stacks = {f"buffer.{name}": buffer for name, buffer in self.buffer_stack.items()}
        stacks |= {f"parameter.{name}": self.params[name].detach() for name in self.private}
        for i, (param, _) in enumerate(self._optimized()):
            prefix = f"optimizer.{i}."
            for key in sorted({key for kept in rows for key in kept if key.startswith(prefix)}):
                name = key.removeprefix(prefix)
                self.optimizer.state[param][name] = stacks[key] = fresh(self.optimizer, param, name)
        for lane, kept in enumerate(rows):
            for key, row in kept.items():
                stacks[key][lane].copy_(row, non_blocking=True)

    @torch.no_grad()
    def collect(self, state: ServerState) -> tuple[Tensor, Tensor]:
        """Return the clients' moves and counters; see :meth:`LaneHost.collect`."""
        self.is_loaded = False
        shared = (self.params[name] for name in self.shared)
        floating = [*shared, *(self.buffer_stack[n] for n in self._floating)]
        local = torch.cat([_flatten(t) for t in floating], dim=1).to(state.vector.dtype)
        delta = self._moved(local, state)
        if self.buffers == "server" or not self.named_counters:
            return delta, state.counters.expand(self.count, -1)
        stacks: Tensors = {**self.params, **self.buffer_stack}
        counters = torch.cat([_flatten(stacks[name]) for name in self.named_counters], dim=1)
        return delta, counters.to(self.counters.dtype)

    def client_parameters(self) -> dict[str, Tensor]:
        """Return the clients' parameters; see :meth:`LaneHost.client_parameters`."""
        return {name: self.params[name].detach() for name in self.shared}

    def _trained_tensor(self, name: str) -> nn.Parameter:
        return self.params[name]

    @contextmanager
    def client(self, lane: int) -> Iterator[None]:
        """Let the module have a client's tensors for a while; see :meth:`LaneHost.client`.

        Its tensors are views of the stacks, so what the module writes to them in place is there
        already; what it sets anew, by ``data`` or as a buffer, is copied.
        """
        stacks: Tensors = {**self.params, **self.buffer_stack}
        start = {GLOBAL_PARAMETERS: self._started_from(lane)} if self.wants_fixed else {}
        rows = {name: stack.detach()[lane] for name, stack in stacks.items()}
        with attributes_set(self.module, start), self.values(rows):
            yield

    @contextmanager
    def values(self, values: Tensors) -> Iterator[None]:
        """Let the module have these values for a while; what it writes is in them afterwards."""
        own = {**self.named_parameters, **self.named_buffers}
        before = {name: tensor.data for name, tensor in own.items()}
        try:
            for name, tensor in own.items():
                tensor.data = values[name]
            yield
        finally:
            self.adopt()
            for name, tensor in own.items():
                if tensor.data_ptr() != values[name].data_ptr():
                    values[name].data.copy_(tensor.data)
                tensor.data = before[name]

    def _started_from(self, lane: int) -> Tensors:
        """Return the parameters that a client started from."""
        if self.fixed_is_shared:
            return self.fixed
        return {name: start[lane] for name, start in self.fixed.items()}

    def reported(self, outputs: Any) -> Tensor:
        """Return the clients' task losses; see :meth:`LaneHost.reported`."""
        return self.first_losses

    def rows(self) -> list[dict[str, Tensor]]:
        """Return the tensors that each client keeps for itself."""
        kept: Tensors = {f"parameter.{name}": self.params[name].detach() for name in self.private}
        if self.buffers == "local":
            kept |= {f"buffer.{name}": buffer for name, buffer in self.buffer_stack.items()}
        if self.keep_optimizer:
            kept |= self.optimizer_state.rows()
        kept = to_cpu(kept)
        return [{key: stack[lane] for key, stack in kept.items()} for lane in range(self.count)]

    def choices(self) -> dict[str, bool]:
        """Return what was chosen; see :meth:`LaneHost.choices`."""
        if not self.is_ready:
            return {}
        compiled = self.graphs is not None
        return {"at_once": self.at_once, "compiled": compiled, "weighted": self.weighted}

    def choose(self, choices: Mapping[str, bool]) -> None:
        """Take over choices; see :meth:`LaneHost.choose`."""
        if choices:
            self.is_ready = True
            self.weighted = choices.get("weighted", self.weighted)
            if not choices.get("at_once", True):
                self.train_one_by_one()
            if choices.get("compiled"):
                self.compile()

    def close(self) -> None:
        """Let go of the optimiser, of the lanes, and of the setting of matrix products."""
        super().close()
        self.lanes.host = None
        self.put_back_matmul()

    # --- a local step -----------------------------------------------------------------------------

    def loss(self, samples: Samples, active: Tensor) -> tuple[Tensor, Outcome]:
        """Make the forward pass of all clients, and keep the buffers of those who still train.

        Args:
            samples: What each client trains on.
            active: Who still trains, ``[k]``.

        Returns:
            The sum of losses, to go back from, and what else the step makes.
        """
        self.has_updated, versions = False, self._versions()
        if isinstance(samples, Padded) and self.channels_last:
            samples = samples._replace(tensors=tree_map(self._laid_out, samples.tensors))
        if not self.maps or (isinstance(samples, Collated) and not self._can_stack(samples)):
            total, outcome = self._one_by_one(samples, active)
        else:
            total, outcome = self._mapped(samples, active)
            self._keep_buffers(outcome, active)
        if self._lane_ratios is not None and self.evaluations == 1 and self._wrote(versions):
            self._note_start()
        return total, outcome

    def _versions(self) -> list[int]:
        return [param._version for param in self.params.values()]

    def _wrote(self, versions: list[int]) -> bool:
        """Say whether the step may have written to parameters: by itself a module can unnoticed."""
        return not self.maps or versions != self._versions()

    @property
    def maps(self) -> bool:
        """Whether the step is mapped over the lanes of the clients that are in training."""
        return self.at_once and self.count > 1

    def _can_stack(self, samples: Collated) -> bool:
        """Say whether batches can be stacked; say once why not."""
        why = samples.why_not_stacked()
        if why is not None and not self._is_said:
            self._is_said = True
            rank_zero_warn(
                f"{type(self.module).__name__} trains its clients one after another in such steps,"
                f" not at once: {why}"
            )
        return why is None

    def _keep_buffers(self, outcome: Outcome, active: Tensor) -> None:
        for name, buffer in outcome.buffers.items():
            after = buffer.detach()
            if not active.all():
                after = torch.where(_beside(active, after), after, self.buffer_stack[name])
            self.buffer_stack[name] = after

    def _mapped(self, samples: Samples, active: Tensor) -> tuple[Tensor, Outcome]:
        """Map the step over the lanes; train one client after another where that fails.

        The first step was checked, and yet a later one may do what cannot be mapped.
        """
        versions = self._versions()
        try:
            if isinstance(samples, Padded):
                return self._padded(samples, active)
            return self._groups(samples.groups(), bool(active.all()))
        except Exception as error:
            if versions != self._versions():
                raise  # half of the step is done
            self.train_one_by_one()
            result = self._one_by_one(samples, active)
            rank_zero_warn(
                f"{type(self.module).__name__} is trained one client after another from here on,"
                f" not at once: {first_line(error)}"
            )
            return result

    def _padded(self, samples: Padded, active: Tensor) -> tuple[Tensor, Outcome]:
        """Map the step over lanes that have their samples in front.

        Lanes with fewer samples than others are weighted where the module knows weights, else they
        are mapped by themselves: filling them up would change their means.
        """
        batch, sizes = samples
        if self.is_even[self.step]:
            return self._all(batch, None, True)
        groups = [(sizes == size).nonzero()[:, 0] for size in sizes.unique()]
        if len(groups) == 1:
            return self._all(_first(batch, int(sizes[0])), None, bool(active.all()))
        if self.weighted:
            most = next(t.shape[1] for t in tree_leaves(batch))
            weight = (torch.arange(most) < sizes[:, None]).double() / sizes[:, None]
            like = next(iter(self.params.values()))
            return self._all(batch, _placed(weight.to(like.dtype), like), bool(active.all()))
        parts = [(rows, _first(_select(batch, rows), int(sizes[rows[0]]))) for rows in groups]
        return self._groups(parts, False)

    def _groups(self, groups: list[tuple[Tensor, Any]], is_whole: bool) -> tuple[Tensor, Outcome]:
        """Map the step over each group of lanes that have batches of the same shape."""
        if is_whole and len(groups) == 1:
            return self._all(groups[0][1], None, True)
        each = [self._some(rows, batch) for rows, batch in groups]
        total = torch.stack([outcome.loss.sum() for outcome in each]).sum()
        at = torch.cat([rows for rows, _ in groups])
        return total, tree_map(lambda *t: _scattered(torch.cat(t), at, self.count), *each)

    def _all(self, batch: Any, weight: Tensor | None, is_whole: bool) -> tuple[Tensor, Outcome]:
        params: Tensors = dict(self.params)
        tensors = (params, self.buffer_stack, self.fixed, batch, weight)
        how: dict[str, Any] = {"fixed_is_shared": self.fixed_is_shared, "at_once": True}
        if self.graphs is not None and self._is_worth_a_graph(batch):
            try:
                return self._compiled_step(self.graphs, is_whole, *tensors, **how)
            except Exception as error:  # torch.compile and the compilers below it fail in many ways
                self.graphs = None
                rank_zero_warn(f"lanes are not compiled ({type(error).__name__}: {error})")
        outcome = self.local.many(*tensors, **how)
        return outcome.loss.sum(), outcome

    def _compiled_step(
        self, graphs: Graphs, is_whole: bool, *tensors: Any, **how: Any
    ) -> tuple[Tensor, Outcome]:
        """Make a step by graphs: the optimiser finds gradients, or nothing left to do."""
        grads: Tensors = {}
        if not self.is_light or self.step == 0:
            graphs.restart()
        with torch.no_grad():
            self.has_updated = (
                is_whole
                and not (self.clips or self.gradient_terms)
                and self._lane_ratios is None
                and graphs.can_update()
            )
            if self.has_updated:
                # Inside the optimiser's own step its groups have the client's rate already.
                ratio = 1.0 if self._own_lr else self._ratio
                outcome = graphs.update(*tensors, ratio=ratio, **how)
            else:
                grads, outcome = graphs.gradients(*tensors, **how)
        if self.has_updated and self.is_light:
            return outcome.loss.sum(), outcome
        return _known_gradient(outcome.loss, self.params, grads), outcome

    def _one_by_one(self, samples: Samples, active: Tensor) -> tuple[Tensor, Outcome]:
        """Make the steps of clients one after another, each forward and back before the next.

        The module makes each step by itself, with the client's tensors in the place of its own. Who
        is done rests: a module may count its steps.
        """
        rows, each = active.nonzero()[:, 0], []
        known: Tensors = {}
        for row in rows.tolist():
            with self.client(row), torch.enable_grad():
                outcome, grads = self.local.by_itself({}, samples.client(row))
            for name, grad in grads.items():
                if name not in known:
                    known[name] = self._gradient_place(name, self.params[name]).zero_()
                known[name][row] = grad
            each.append(tree_map(lambda t: t.detach(), outcome))
        stacked = tree_map(lambda *t: _scattered(torch.stack(t), rows, self.count), *each)
        return _known_gradient(stacked.loss, self.params, known), stacked

    def _gradient_place(self, name: str, param: Tensor) -> Tensor:
        """Return memory for a gradient, the same each step: new memory takes longer than a copy."""
        if name not in self._gradients or self._gradients[name].shape != param.shape:
            self._gradients[name] = torch.empty_like(param)
        return self._gradients[name]

    def unused(self, samples: Samples) -> list[str]:
        """Return the parameters that a step gives no gradient."""
        with seeded_rng(0), self.untouched(), torch.enable_grad():
            total, _ = self._mapped(samples, torch.ones(self.count, dtype=torch.bool))
        wanted = {name: p for name, p in self.params.items() if p.requires_grad}
        grads = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
        return [name for name, grad in zip(wanted, grads, strict=True) if grad is None]

    def trial(self, samples: Samples, at_once: bool) -> None:
        """Make a step forward and back, of which nothing remains."""
        everyone = torch.ones(self.count, dtype=torch.bool)
        with seeded_rng(0), self.untouched(), torch.enable_grad():
            if not at_once:
                self._one_by_one(samples, everyone)
                return
            total, _ = self._mapped(samples, everyone)
            wanted = [p for p in self.params.values() if p.requires_grad]
            torch.autograd.grad(total, wanted, allow_unused=True)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Undo what a step writes to parameters and buffers by itself, as averages are."""
        tensors: Tensors = {**self.params, **self.buffer_stack}
        before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        try:
            yield
        finally:
            for name, value in before.items():
                tensors[name].data.copy_(value)

    def _some(self, rows: Tensor, batch: Any) -> Outcome:
        """Make the step of a few lanes, whose batches are ``[rows, ...]``."""
        params: Tensors = _select(dict(self.params), rows)
        outcome = self.local.many(
            params,
            _select(self.buffer_stack, rows),
            self.fixed if self.fixed_is_shared else _select(self.fixed, rows),
            batch,
            None,
            fixed_is_shared=self.fixed_is_shared,
            at_once=True,
        )
        for name, param in self.params.items():  # what the step has written: a teacher's average
            if params[name]._version:
                param.data.index_copy_(0, _placed(rows, param), params[name].detach())
        return outcome

    def uses_batch_idx(self, samples: Samples) -> bool:
        """Say whether the module's step depends on ``batch_idx``, as far as a graph of it shows."""
        if not reads_batch_idx(self.module):
            return False
        batch = samples.pair()
        rows = torch.arange(2)
        params = {n: p.detach()[:2].clone() for n, p in self.params.items()}
        for name, param in params.items():
            param.requires_grad_(self.params[name].requires_grad)
        fixed = self.fixed if self.fixed_is_shared else _select(self.fixed, rows)
        tensors = (params, _select(self.buffer_stack, rows), fixed, batch, None)
        how = {"fixed_is_shared": self.fixed_is_shared, "at_once": True}
        with seeded_rng(0):
            return depends_on_batch_idx(self.local, *tensors, **how)

    def compile(self) -> None:
        """Make forward and backward pass one compiled graph for each shape of batches."""
        self.graphs = Graphs(self.local, self.optimizer)

    def _is_worth_a_graph(self, batch: Any) -> bool:
        """Groups come in two sizes at most; a rest of a client's samples is not worth a graph."""
        shape = tuple(t.shape for t in tree_leaves(batch))
        if len(self._shapes) < MOST_GRAPHS:
            self._shapes.add(shape)
        return shape in self._shapes

    @torch.no_grad()
    def before_step(self, active: Tensor) -> list[Tensor]:
        """Return what :meth:`after_step` needs of the time before the local step."""
        if self._lane_ratios is not None:
            self._note_start()
        return [] if active.all() else [tensor.clone() for tensor in self._stepped()]

    @torch.no_grad()
    def _note_start(self) -> None:
        """Note where the optimiser's step begins: behind what the module itself has written."""
        self._start = [p.detach().clone() for p in self.params.values() if p.requires_grad]

    @torch.no_grad()
    def after_step(self, before: list[Tensor], active: Tensor) -> None:
        r"""Give each lane its learning rate, and take the step back where a client was done.

        For an optimiser that is linear in its rate, a step at :math:`\eta_k` is
        :math:`w + \frac{\eta_k}{\eta} (w' - w)`, where :math:`w'` is the step at :math:`\eta`.
        """
        if self._lane_ratios is not None:
            trained = [p.detach() for p in self.params.values() if p.requires_grad]
            for now, start in zip(trained, self._start, strict=True):
                now.copy_(start.lerp(now, _beside(self._lane_ratios, now).to(now.dtype)))
        for now, old in zip(self._stepped(), before, strict=False):
            now.copy_(torch.where(_beside(active, now), now, old))

    def _stepped(self) -> list[Tensor]:
        """What a step changes: parameters, then the optimiser's state if somebody keeps it."""
        params = [param.detach() for param in self.params.values()]
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
        norms = torch.stack([_flatten(grad).norm(dim=1) for grad in grads])
        scale = (value / (norms.norm(dim=0) + 1e-6)).clamp(max=1)
        for grad in grads:
            grad.mul_(_beside(scale, grad))


def first_line(error: Exception) -> str:
    """Return the name of an exception and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class _Known(torch.autograd.Function):
    """A loss whose gradients are known already: its backward pass puts them in their place.

    They are not handed to autograd, which would copy each.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, loss: Tensor, params: list[nn.Parameter], grads: list[Tensor]
    ) -> Tensor:
        ctx.params, ctx.grads = params, grads
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[None, ...]:
        scale, grads = outer[0], ctx.grads
        # To look at it would wait for a device: there gradients are multiplied by 1, too.
        if grads and (scale.device.type != "cpu" or scale != 1):
            grads = torch._foreach_mul(grads, scale)
        for param, grad in zip(ctx.params, grads, strict=True):
            param.grad = grad if param.grad is None else param.grad + grad
        return (None,) * 4


def _known_gradient(
    loss: Tensor, params: Mapping[str, nn.Parameter], grads: Mapping[str, Tensor]
) -> Tensor:
    """Return the sum of losses, such that going back gives these gradients."""
    anchor = next(param for param in params.values() if param.requires_grad)
    wanted = [params[name] for name in grads]
    total: Tensor = _Known.apply(anchor, loss, wanted, list(grads.values()))
    return total


def _unflatten(rows: Tensor, like: Tensor) -> Tensor:
    """Rows, ``[k, n]``, as a stack of tensors like another."""
    shape = (len(rows), *like.shape)
    if like.is_complex():
        # A copy: numbers in the middle of a vector need not begin at an even place.
        return torch.view_as_complex(rows.reshape(*shape, 2).clone()).to(like.dtype)
    return rows.reshape(shape).to(like.dtype)


def _flatten(stack: Tensor) -> Tensor:
    """A stack of tensors as rows, ``[k, n]``."""
    stack = stack.detach()
    return (torch.view_as_real(stack) if stack.is_complex() else stack).reshape(len(stack), -1)


def _beside(lanes: Tensor, stack: Tensor) -> Tensor:
    """One number a lane, in the shape that multiplies a stack."""
    return _placed(lanes, stack).view(-1, *[1] * (stack.ndim - 1))


def _placed(small: Tensor, like: Tensor) -> Tensor:
    """Bring a small tensor to the device of another, without waiting for it."""
    return small.to(like.device, non_blocking=True)


def _select(stacks: Any, rows: Tensor) -> Any:
    return tree_map(
        lambda t: t.index_select(0, _placed(rows, t)) if isinstance(t, Tensor) else t, stacks
    )


def _scattered(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Put the values of some lanes in their places, with zeros for the others."""
    values = values.detach()
    return values.new_zeros(count, *values.shape[1:]).index_copy_(0, _placed(rows, values), values)


def _first(batch: Any, count: int) -> Any:
    """The first samples of each lane."""
    return tree_map(lambda t: t[:, :count] if isinstance(t, Tensor) else t, batch)
