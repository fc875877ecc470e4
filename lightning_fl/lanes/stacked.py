"""Many lanes: the tensors of several clients, stacked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.lanes.graphs import Graphs
from lightning_fl.lanes.host import BufferPolicy, LaneHost, Rows, is_floating
from lightning_fl.lanes.local_step import LocalStep, Outcome, Tensors
from lightning_fl.lanes.matmul import allow_fast_matmul
from lightning_fl.lanes.memory import keep_freed_memory
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
        self.is_linear = check_separable(optimizer, keep_optimizer)
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
        #: Whether it is chosen how to train.
        self.is_ready = False
        self.weighted = getattr(lanes.module, "knows_weights", False) and not any(
            isinstance(m, _BatchNorm) for m in lanes.module.modules()
        )
        #: The Lightning batch's samples, ``[steps, k, B, ...]``, and which local step is next.
        self.batch: Any = None
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
        self.logged: dict[str, list[Tensor]] = {}
        self.weights: list[Tensor] = []
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
        self._moves = torch.empty(0)
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._lane_ratios: Tensor | None = None
        self._floating = [n for n, b in self.named_buffers.items() if is_floating(b)]
        self._counting = [n for n, b in self.named_buffers.items() if not is_floating(b)]

    # --- clients ----------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, state: ServerState, rows: Sequence[Rows], lr: Sequence[float]) -> None:
        """Begin clients; see :meth:`LaneHost.load`."""
        self._adopt()
        self.optimizer.state.clear()
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
            self._lane_ratios = torch.tensor(ratios, dtype=torch.float64).to(state.vector.device)
        names = [*self.shared, *self._floating]
        pieces = dict(zip(names, state.vector.split(self.vector.sizes, dim=1), strict=True))
        self._resize(k)
        for name, param in self.params.items():
            start = self.private.get(name)
            if start is None:
                start = _unflatten(pieces[name], self.named_parameters[name])
            param.copy_(start)
            param.grad = None
            param.requires_grad_(self.named_parameters[name].requires_grad)
        counters = state.counters.expand(k, -1).split(self.counters.sizes, dim=1)
        pieces |= dict(zip(self._counting, counters, strict=True))
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

    def _resize(self, count: int) -> None:
        """Make place for so many lanes."""
        made = {
            id(param): (
                name,
                nn.Parameter(self._laid_out(param.new_empty(count, *param.shape[1:]))),
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
                stacks[key][lane] = row

    @torch.no_grad()
    def collect(self, state: ServerState, reuse: bool = False) -> tuple[Tensor, Tensor]:
        """Return the clients' moves and counters; see :meth:`LaneHost.collect`."""
        shared = (self.params[name] for name in self.shared)
        floating = [*shared, *(self.buffer_stack[n] for n in self._floating)]
        if not reuse or self._moves.shape != (self.count, state.vector.shape[1]):
            self._moves = state.vector.new_empty(self.count, state.vector.shape[1])
        local = torch.cat([_flatten(t) for t in floating], dim=1, out=self._moves)
        delta = self._moved(local, state)
        if self.buffers == "server" or not self._counting:
            return delta, state.counters.expand(self.count, -1)
        counters = torch.cat([_flatten(self.buffer_stack[n]) for n in self._counting], dim=1)
        return delta, counters.to(self.counters.dtype)

    @contextmanager
    def client(self, lane: int) -> Iterator[None]:
        """Let the module have a client's tensors for a while; see :meth:`LaneHost.client`."""
        stacks: Tensors = {**self.params, **self.buffer_stack}
        own = {**self.named_parameters, **self.named_buffers}
        before = {name: tensor.data for name, tensor in own.items()}
        try:
            for name, tensor in own.items():
                tensor.data = stacks[name].detach()[lane]
            yield
        finally:
            for name, tensor in own.items():
                tensor.data = before[name]

    def reported(self, outputs: Any) -> Tensor:
        """Return the clients' task losses; see :meth:`LaneHost.reported`."""
        return self.first_losses

    def rows(self) -> list[dict[str, Tensor]]:
        """Return the tensors that each client keeps for itself."""
        kept: Tensors = {f"parameter.{name}": self.params[name].detach() for name in self.private}
        if self.buffers == "local":
            kept |= {f"buffer.{name}": buffer for name, buffer in self.buffer_stack.items()}
        if self.keep_optimizer:
            kept |= self._optimizer_rows()
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

    def loss(self, batch: Any, sizes: Tensor, active: Tensor) -> tuple[Tensor, Outcome]:
        """Make the forward pass of all clients, and keep the buffers of those who still train.

        Lanes with fewer samples than others are weighted where the module knows weights, else they
        are mapped by themselves: filling them up would change their means.

        Args:
            batch: Samples, ``[k, B, ...]``, of which a lane has the first ``sizes``.
            sizes: ``[k]``.
            active: Who still trains, ``[k]``.

        Returns:
            The sum of losses, to go back from, and what else the step makes.
        """
        self.has_updated = False
        if self.channels_last:
            batch = tree_map(self._laid_out, batch)
        if self.at_once and self.is_even[self.step]:
            total, outcome = self._all(batch, None, True)
            self.buffer_stack = {name: b.detach() for name, b in outcome.buffers.items()}
            return total, outcome
        groups = [(sizes == size).nonzero()[:, 0] for size in sizes.unique()]
        if not self.at_once:
            total, outcome = self._one_by_one(batch, sizes, active)
        elif len(groups) == 1:
            total, outcome = self._all(_first(batch, int(sizes[0])), None, bool(active.all()))
        elif self.weighted:
            most = next(t.shape[1] for t in tree_leaves(batch))
            weight = (torch.arange(most) < sizes[:, None]).double() / sizes[:, None]
            like = next(iter(self.params.values()))
            total, outcome = self._all(
                batch, weight.to(like.device, like.dtype), bool(active.all())
            )
        else:
            each = [self._some(rows, batch, int(sizes[rows[0]])) for rows in groups]
            total = torch.stack([outcome.loss.sum() for outcome in each]).sum()
            at = torch.cat(groups)
            outcome = tree_map(lambda *t: _scattered(torch.cat(t), at, len(sizes)), *each)
        for name, before in self.buffer_stack.items():
            after = outcome.buffers[name].detach()
            if not active.all():
                after = torch.where(_beside(active, after), after, before)
            self.buffer_stack[name] = after
        return total, outcome

    def _all(self, batch: Any, weight: Tensor | None, is_whole: bool) -> tuple[Tensor, Outcome]:
        params: Tensors = dict(self.params)
        tensors = (params, self.buffer_stack, self.fixed, batch, weight)
        how: dict[str, Any] = {
            "fixed_is_shared": self.fixed_is_shared,
            "at_once": self.count > 1,
        }
        if self.graphs is not None and how["at_once"] and self._is_worth_a_graph(batch):
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
                is_whole and not self.clips and self._lane_ratios is None and graphs.can_update()
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

    def _one_by_one(self, batch: Any, sizes: Tensor, active: Tensor) -> tuple[Tensor, Outcome]:
        """Make the steps of clients one after another, each forward and back before the next.

        Who is done rests: a module may count its steps.
        """
        rows, each = active.nonzero()[:, 0], []
        wanted = {n: p for n, p in self.params.items() if p.requires_grad}
        known: Tensors = {}
        for row in rows.tolist():
            own = {
                n: p.detach()[row].requires_grad_(p.requires_grad) for n, p in self.params.items()
            }
            fixed = self.fixed
            if not self.fixed_is_shared:
                fixed = {n: t[row] for n, t in fixed.items()}
            buffers = {n: b[row] for n, b in self.buffer_stack.items()}
            samples = tree_map(lambda t, row=row: t[row, : sizes[row]], batch)
            with torch.enable_grad():
                outcome = self.local.one(own, buffers, fixed, samples, None)
            grads = torch.autograd.grad(
                outcome.loss, [own[name] for name in wanted], allow_unused=True
            )
            for (name, param), grad in zip(wanted.items(), grads, strict=True):
                if grad is not None:
                    if name not in known:
                        known[name] = self._gradient_place(name, param).zero_()
                    known[name][row] = grad
            each.append(tree_map(lambda t: t.detach(), outcome))
        stacked = tree_map(lambda *t: _scattered(torch.stack(t), rows, len(sizes)), *each)
        return _known_gradient(stacked.loss, self.params, known), stacked

    def _gradient_place(self, name: str, param: Tensor) -> Tensor:
        """Return memory for a gradient, the same each step: new memory takes longer than a copy."""
        if name not in self._gradients or self._gradients[name].shape != param.shape:
            self._gradients[name] = torch.empty_like(param)
        return self._gradients[name]

    def unused(self, batch: Any) -> list[str]:
        """Return the parameters that a step gives no gradient."""
        grads = self._trial_gradients(batch, at_once=self.at_once)
        wanted = [name for name, p in self.params.items() if p.requires_grad]
        return [name for name, grad in zip(wanted, grads, strict=True) if grad is None]

    def trial(self, batch: Any, at_once: bool) -> None:
        """Make a step forward and back, of which nothing remains."""
        if at_once:
            self._trial_gradients(batch, at_once)
            return
        k, size = tree_leaves(batch)[0].shape[:2]
        with seeded_rng(0), self.untouched():
            self._one_by_one(batch, torch.full((k,), size), torch.ones(k, dtype=torch.bool))

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Undo what a step writes to parameters by itself: to frozen ones, as averages are."""
        frozen = {n: p.detach().clone() for n, p in self.params.items() if not p.requires_grad}
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in frozen.items():
                    self.params[name].copy_(value)

    def _trial_gradients(self, batch: Any, at_once: bool) -> tuple[Tensor | None, ...]:
        params = {n: p.detach().requires_grad_(p.requires_grad) for n, p in self.params.items()}
        with torch.enable_grad(), seeded_rng(0), self.untouched():
            outcome = self.local.many(
                params,
                self.buffer_stack,
                self.fixed,
                batch,
                None,
                fixed_is_shared=self.fixed_is_shared,
                at_once=at_once,
            )
        wanted = [p for p in params.values() if p.requires_grad]
        return torch.autograd.grad(outcome.loss.sum(), wanted, allow_unused=True)

    def _some(self, rows: Tensor, batch: Any, size: int) -> Outcome:
        """Make the step of a few lanes that have as many samples as each other."""
        params: Tensors = _select(dict(self.params), rows)
        outcome = self.local.many(
            params,
            _select(self.buffer_stack, rows),
            self.fixed if self.fixed_is_shared else _select(self.fixed, rows),
            _first(_select(batch, rows), size),
            None,
            fixed_is_shared=self.fixed_is_shared,
            at_once=len(rows) > 1,
        )
        with torch.no_grad():  # what the step itself has written: a frozen teacher's average
            for name, param in self.params.items():
                if not param.requires_grad:
                    param[rows] = params[name]
        return outcome

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
        """Return what :meth:`after_step` needs of the time before the optimiser's step."""
        if self._lane_ratios is None and active.all():
            return []
        return [tensor.clone() for tensor in self._stepped()]

    @torch.no_grad()
    def after_step(self, before: list[Tensor], active: Tensor) -> None:
        r"""Give each lane its learning rate, and take the step back where a client was done.

        For an optimiser that is linear in its rate, a step at :math:`\eta_k` is
        :math:`w + \frac{\eta_k}{\eta} (w' - w)`, where :math:`w'` is the step at :math:`\eta`.
        """
        if not before:
            return
        # Not what the module itself has written into frozen parameters, nor the optimiser's state.
        steps = [param.requires_grad for param in self.params.values()]
        for i, (now, old) in enumerate(zip(self._stepped(), before, strict=False)):
            new = now
            if self._lane_ratios is not None and i < len(steps) and steps[i]:
                new = old.lerp(now, _beside(self._lane_ratios, now).to(now.dtype))
            now.copy_(torch.where(_beside(active, now), new, old))

    def _stepped(self) -> list[Tensor]:
        """What a step changes: parameters, then the optimiser's state if somebody keeps it."""
        params = [param.detach() for param in self.params.values()]
        return params + (list(self._optimizer_rows().values()) if self.keep_optimizer else [])

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
        for param, grad in zip(ctx.params, ctx.grads, strict=True):
            grad = grad if outer[0] == 1 else grad * outer[0]
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
    return lanes.to(stack.device).view(-1, *[1] * (stack.ndim - 1))


def _select(stacks: Any, rows: Tensor) -> Any:
    return tree_map(
        lambda t: t.index_select(0, rows.to(t.device)) if isinstance(t, Tensor) else t, stacks
    )


def _scattered(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Put the values of some lanes in their places, with zeros for the others."""
    values = values.detach()
    return values.new_zeros(count, *values.shape[1:]).index_copy_(0, rows.to(values.device), values)


def _first(batch: Any, count: int) -> Any:
    """The first samples of each lane."""
    return tree_map(lambda t: t[:, :count] if isinstance(t, Tensor) else t, batch)


def fresh(optimizer: torch.optim.Optimizer, param: Tensor, name: str) -> Tensor:
    """Return what a state of an optimiser is before its first step."""
    made = getattr(optimizer, "fresh", None)
    value: Tensor = torch.zeros_like(param) if made is None else made(param, name)
    return value.detach().clone()


def check_separable(optimizer: torch.optim.Optimizer, keep: bool) -> bool:
    """Refuse an optimiser whose step for one client depends on the others in the lanes.

    It trains two small tensors apart and stacked, with gradients of very different size.

    Returns:
        Whether its step is proportional to its learning rate.

    Raises:
        FederationError: If they differ, as with layer-wise norms (LARS) or line searches (LBFGS).
    """
    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    device = optimizer.param_groups[0]["params"][0].device
    random = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(2, 3, 4, generator=random, dtype=torch.float64) for _ in range(4))
    scale = torch.tensor([1.0, 1e3], dtype=torch.float64).view(2, 1, 1)

    def trained(rows: slice | int, ratio: float = 1, lr: float = 1) -> tuple[Tensor, Any]:
        param = nn.Parameter(start[rows].to(device, copy=True))
        rate = {"lr": options["lr"] * lr} if "lr" in options else {}
        made = kind([param], **{**options, **rate})
        for grad in grads:
            before, param.grad = param.detach().clone(), (grad * scale)[rows].to(device)
            made.step()
            param.data = before.lerp(param.detach(), ratio)
        return param.detach(), made

    refused = f"{kind.__name__} cannot train clients in lanes"
    remedy = "train the module itself instead of Lanes(module)"
    try:
        (stacked, made), apart = trained(slice(0, 2)), [trained(i)[0] for i in (0, 1)]
        ratio, rate = trained(0, ratio=0.5)[0], trained(0, lr=0.5)[0]
    except Exception as error:
        raise FederationError(f"{refused} ({type(error).__name__}: {error}): {remedy}") from error
    if not torch.allclose(stacked, torch.stack(apart), rtol=1e-10, atol=1e-12):
        raise FederationError(
            f"{refused}: its step for one client depends on the others (norms of whole tensors):"
            f" {remedy}"
        )
    shared = [n for s in made.state.values() for n, v in s.items() if getattr(v, "ndim", 1) == 0]
    if keep and (shared or options.get("dampening")):
        what = shared[0] if shared else "the first step of its dampening"
        raise FederationError(
            f"optimizer_state: keep does not work in lanes with {kind.__name__}, whose {what} is"
            f" one for all: choose reset, or {remedy}"
        )
    if keep:  # beside a client that has a state, one that has none begins with a fresh one
        param = nn.Parameter(start[0].to(device, copy=True))
        again = kind([param], **options)
        for name, value in made.state[made.param_groups[0]["params"][0]].items():
            if value is not None:
                again.state[param][name] = fresh(again, param, name)
        first = nn.Parameter(start[0].to(device, copy=True))
        other = kind([first], **options)
        for each, tensor in ((again, param), (other, first)):
            tensor.grad = grads[0][0].to(device)
            each.step()
        if not torch.allclose(param, first, rtol=1e-10, atol=1e-12):
            raise FederationError(
                f"optimizer_state: keep does not work in lanes with {kind.__name__}, whose state"
                f" does not begin at 0: give it a method fresh(param, name), choose reset, or"
                f" {remedy}"
            )
    return torch.allclose(ratio, rate, rtol=1e-10, atol=1e-12)
