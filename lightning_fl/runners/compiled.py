"""Local steps as compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim.sgd import sgd
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fl.errors import first_line
from lightning_fl.functional.summation import compile_sums
from lightning_fl.runners.local_step import LocalStep, Outcome, Tensors

#: Maximum number of shapes, of batches and of weights of samples, to compile.
MOST_GRAPHS = 4
#: Options of SGD that torch's function for a step takes.
_OPTIONS = ("weight_decay", "momentum", "dampening", "nesterov", "maximize")
_sgd = partial(sgd, has_sparse_grad=False, foreach=False, fused=False)


class Graphs:
    """Compile a module's vectorized local step.

    For any optimizer, one graph computes the gradients. For ``torch.optim.SGD`` the graph includes
    the update, which saves writing and reading the gradients. On a GPU, CUDA graphs launch the
    whole step at once.

    The first step of a batch shape is made without a graph (:meth:`note`). A graph is used as long
    as torch finds it valid. If it does not, later steps are made without a graph.

    Args:
        local: The step.
        optimizer: The optimizer of the stacked parameters.
    """

    def __init__(self, local: LocalStep, optimizer: torch.optim.Optimizer) -> None:
        self.local, self.optimizer = local, optimizer
        self._on_a_gpu = any(p.is_cuda for group in optimizer.param_groups for p in group["params"])
        self._gradients = compiled(LocalStep.gradients, self._on_a_gpu)
        self._sgd_step = compiled(sgd_step, self._on_a_gpu)
        self._momentum: dict[tuple[str, int], Tensor] = {}
        #: Whether to compile for batches and weights, by :func:`shape_of`.
        self.shapes: dict[str, bool] = {}
        #: Shapes and kinds of steps (whether they update) with a graph.
        self._ready = set[tuple[str, bool]]()

    @property
    def can_update(self) -> bool:
        """Whether a graph can include the update: of SGD, with momentum buffers present."""
        optimizer = self.optimizer
        return type(optimizer) is torch.optim.SGD and all(
            not group["momentum"] or optimizer.state[p].get("momentum_buffer") is not None
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        )

    def note(self, shape: str, batch: Any, used: Collection[str], params: Tensors) -> None:
        """Decide whether to compile the steps of a batch shape, after one without a graph.

        A graph returns zeros for a parameter without a gradient, with which momentum and weight
        decay would change it. For batches of one sample and clients that train together, torch 2.14
        computes wrong gradients of some convolutions, whose channels it stores last.

        Args:
            shape: The shape.
            batch: Batches of that shape, ``[k, B, ...]``.
            used: Names of the parameters that the step uses.
            params: The parameters.
        """
        unused = [n for n, param in params.items() if param.requires_grad and n not in used]
        is_one = any(t.shape[1:2] == (1,) for t in tree_leaves(batch) if isinstance(t, Tensor))
        self.shapes[shape] = not unused and not is_one
        if unused:
            rank_zero_warn(
                f"steps are not compiled: they do not use {unused[0]}. To compile them, freeze the"
                " parameter with requires_grad_(False) or remove it"
            )

    def step(
        self, shape: str, updates: bool, params: Tensors, arguments: Mapping[str, Any]
    ) -> tuple[Tensors, Outcome] | None:
        """Make a compiled step.

        Args:
            shape: The shape of the batches.
            updates: Whether to update the parameters, as SGD does.
            params: Parameters, ``[k, ...]``.
            arguments: Further arguments of :meth:`LocalStep.many`.

        Returns:
            Gradients, which are empty after an update, and the outcome. None if there is no valid
            graph; nothing has changed then.
        """
        kind = shape, updates
        stance: Literal["fail_on_recompile", "default"]
        stance = "fail_on_recompile" if kind in self._ready else "default"
        try:
            with torch.no_grad(), self.local.placeholders(), torch.compiler.set_stance(stance):
                made = self._run(updates, params, arguments)
        except Exception as error:  # torch.compile and the compilers below it fail in many ways
            self.shapes[shape] = False
            rank_zero_warn(
                "steps are not compiled: a graph failed, or is no longer valid, for example since"
                f" training_step uses batch_idx ({first_line(error)})"
            )
            return None
        self._ready.add(kind)
        compile_sums()
        return made

    def _run(
        self, updates: bool, params: Tensors, arguments: Mapping[str, Any]
    ) -> tuple[Tensors, Outcome]:
        if not updates:
            found: tuple[Tensors, Outcome] = self._gradients(self.local, params, **arguments)
            return found
        if self._on_a_gpu:
            self._fix_addresses(params)
        groups = sgd_groups(self.optimizer, params)
        outcome: Outcome = self._sgd_step(self.local, params, groups, **arguments)
        return {}, outcome

    def _fix_addresses(self, params: Tensors) -> None:
        """Keep parameters and momentum where they are: a CUDA graph writes to fixed addresses only.

        A group of clients begins with new momentum, which moves to the memory of the first group.
        """
        for name, param in params.items():
            torch._dynamo.mark_static_address(param, guard=False)
            state = self.optimizer.state.get(param, {})
            if (buffer := state.get("momentum_buffer")) is None:
                continue
            kept = self._momentum.setdefault((name, len(param)), buffer)
            if kept is not buffer:
                state["momentum_buffer"] = kept.copy_(buffer)
            torch._dynamo.mark_static_address(kept, guard=False)


#: Names of the parameters of a group of SGD, its options, its rate, and the parameters' momentum.
SGDGroup = tuple[list[str], dict[str, Any], Tensor, list[Tensor | None]]


def sgd_groups(optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor]) -> list[SGDGroup]:
    """Return the parameter groups of SGD for :func:`sgd_step`.

    Args:
        optimizer: The optimizer of the stacked parameters; see :attr:`Graphs.can_update`.
        params: Its parameters by name, ``[k, ...]``.
    """
    names = {id(p): name for name, p in params.items()}
    device = next(iter(params.values())).device
    groups: list[SGDGroup] = []
    for group in optimizer.param_groups:
        own = [p for p in group["params"] if p.requires_grad]
        # A tensor, since a Python number would recompile the graph for every new rate.
        rate = _number(float(group["lr"]), device)
        momentum: list[Tensor | None] = [None] * len(own)
        if group["momentum"]:
            momentum = [optimizer.state[p]["momentum_buffer"] for p in own]
        options = {name: group[name] for name in _OPTIONS}
        groups.append(([names[id(p)] for p in own], options, rate, momentum))
    return groups


@lru_cache(maxsize=64)
def _number(value: float, device: torch.device) -> Tensor:
    """Return a number as a tensor on a device; a CUDA graph cannot read it from the CPU."""
    return torch.tensor(value, dtype=torch.float64).to(device, non_blocking=True)


def sgd_step(
    local: LocalStep, params: Tensors, groups: Sequence[SGDGroup], **arguments: Any
) -> Outcome:
    """Make a local step and SGD's in-place update of each parameter group."""
    grads, outcome = local.gradients(params, **arguments)
    for names, options, rate, momentum in groups:
        _sgd([params[n] for n in names], [grads[n] for n in names], momentum, lr=rate, **options)
    return outcome


def compiled(function: Any, on_a_gpu: bool) -> Callable[..., Any]:
    """Compile a function; torch checks before each call that its graph is still valid.

    Args:
        function: The function. It is copied with its code, since torch allows only eight graphs per
            code object.
        on_a_gpu: Whether to use CUDA graphs. Their outputs are copied, since the next launch
            overwrites them.
    """
    own = FunctionType(function.__code__.replace(), function.__globals__)
    own.__kwdefaults__ = function.__kwdefaults__
    options: dict[str, Any] = {"triton.cudagraphs": on_a_gpu}
    if hasattr(torch.compiler, "skip_guard_on_globals_unsafe"):  # torch 2.8
        options["guard_filter_fn"] = _guards
    graph = torch.compile(own, dynamic=False, options=options)
    if not on_a_gpu:
        return graph
    return lambda *args, **kwargs: tree_map(torch.clone, graph(*args, **kwargs))


def _guards(found: Sequence[Any]) -> list[bool]:
    """Return which guards to keep: all but those on functions of torch and Python.

    The lists of hooks of all modules are kept; they are variables of torch.
    """
    fixed = "G['__import_torch']", "G['__import_torch_dot_", "G['__builtins_dict_"
    return [not guard.name.startswith(fixed) or "_global_" in guard.name for guard in found]


def shape_of(batch: Any) -> str:
    """Return the shapes of a batch's tensors."""
    return str([list(t.shape) if isinstance(t, Tensor) else type(t) for t in tree_leaves(batch)])


def graph_of(loss: Tensor, params: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the trained parameters in the graph of a loss, which is kept."""
    nodes, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        if (node := waiting.pop()) is not None and node not in nodes:
            nodes.add(node)
            waiting += [node for node, _ in node.next_functions]
    return {
        name
        for name, param in params.items()
        if param.requires_grad and torch.autograd.graph.get_gradient_edge(param).node in nodes
    }


class _Known(torch.autograd.Function):
    """Assign known gradients to parameters in the backward pass of a sum of losses."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, grads: list[Tensor | None], *params: nn.Parameter
    ) -> Tensor:
        ctx.grads = grads
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.grads
        del ctx.grads  # so that autograd does not copy them
        return None, None, *grads


def with_gradients(
    loss: Tensor, params: Mapping[str, nn.Parameter], grads: Mapping[str, Tensor]
) -> Tensor:
    """Return the sum of losses; its backward pass yields the given gradients."""
    trained = {name: param for name, param in params.items() if param.requires_grad}
    found = [grads.get(name) for name in trained]
    total: Tensor = _Known.apply(loss, found, *trained.values())
    return total
