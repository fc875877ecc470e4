"""Local steps as compiled graphs."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch._dynamo.utils import counters
from torch.optim.sgd import sgd
from torch.utils._pytree import tree_map

from lightning_fl.runners.attributes import left_alone
from lightning_fl.runners.local_step import LocalStep, Outcome, Tensors

#: Options of SGD that torch's function for a step takes.
_OPTIONS = ("weight_decay", "momentum", "dampening", "nesterov", "maximize")
_sgd = partial(sgd, has_sparse_grad=False, foreach=False, fused=False)


class Graphs:
    """Compile a module's vectorized local step.

    For any optimizer, one graph computes the gradients. For ``torch.optim.SGD`` the graph includes
    the update, which saves writing and reading the gradients. On a GPU, CUDA graphs launch the
    whole step at once.

    Args:
        local: The step.
        optimizer: The optimizer of the stacked parameters.
        rewrites: Whether to rewrite graphs for a CPU.
    """

    def __init__(
        self, local: LocalStep, optimizer: torch.optim.Optimizer, rewrites: bool = True
    ) -> None:
        self.local, self.optimizer = local, optimizer
        self._on_a_gpu = any(p.is_cuda for group in optimizer.param_groups for p in group["params"])
        self._gradients = compiled(LocalStep.gradients, self._on_a_gpu, rewrites)
        self._sgd_step = compiled(sgd_step, self._on_a_gpu, rewrites)
        self._momentum: dict[tuple[str, int], Tensor] = {}

    def gradients(self, params: Tensors, *tensors: Any, **how: Any) -> tuple[Tensors, Outcome]:
        """Return the gradients and the outcome of a step; see :meth:`LocalStep.gradients`."""
        with self.local.placeholders():
            found: tuple[Tensors, Outcome] = self._gradients(self.local, params, *tensors, **how)
        return found

    def update(self, params: Tensors, *tensors: Any, **how: Any) -> Outcome:
        """Make the step and the optimizer's update; see :meth:`LocalStep.many`.

        Args:
            params: Parameters, ``[k, ...]``, updated in place.
            tensors: Further positional arguments of :meth:`LocalStep.many`.
            how: Keyword arguments of :meth:`LocalStep.many`.
        """
        if self._on_a_gpu:
            self._fix_addresses(params)
        groups = sgd_groups(self.optimizer, params)
        with self.local.placeholders():
            outcome: Outcome = self._sgd_step(self.local, params, groups, *tensors, **how)
        return outcome

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


def can_update(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a local step can include the update: SGD, with momentum buffers present."""
    # One pair of hooks is the runner's, for learning rates. Others must see the update.
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any(len(each) > 1 for each in hooks):
        return False
    return type(optimizer) is torch.optim.SGD and all(
        not group["momentum"] or optimizer.state[p].get("momentum_buffer") is not None
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    )


@torch.no_grad()
def sgd_update(
    optimizer: torch.optim.Optimizer,
    params: Mapping[str, Tensor],
    rows: int | slice,
    grads: Tensors,
) -> None:
    """Make SGD's in-place update of some clients.

    For one client, this saves copying its gradients into those of all clients.

    Args:
        optimizer: The optimizer of the stacked parameters; see :func:`can_update`.
        params: Parameters, ``[k, ...]``.
        rows: Position of a client, or positions of clients.
        grads: Their gradients by name. Parameters without one are not updated.
    """
    names = {id(p): name for name, p in params.items()}
    for group in optimizer.param_groups:
        own = [p for p in group["params"] if names[id(p)] in grads]
        state = [optimizer.state[p]["momentum_buffer"] if group["momentum"] else None for p in own]
        _sgd(
            [p[rows] for p in own],
            [grads[names[id(p)]] for p in own],
            [None if buffer is None else buffer[rows] for buffer in state],
            lr=group["lr"],
            **{option: group[option] for option in _OPTIONS},
        )


#: Names of the parameters of a group of SGD, its options, its rate, and the parameters' momentum.
SGDGroup = tuple[list[str], dict[str, Any], Tensor, list[Tensor | None]]


def sgd_groups(
    optimizer: torch.optim.Optimizer,
    params: Mapping[str, Tensor],
    rows: slice | None = None,
) -> list[SGDGroup]:
    """Return the parameter groups of SGD for :func:`sgd_step`.

    Args:
        optimizer: The optimizer of the stacked parameters; see :func:`can_update`.
        params: Its parameters by name, ``[k, ...]``.
        rows: Clients whose momentum is returned; None means all.
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
            kept = [optimizer.state[p]["momentum_buffer"] for p in own]
            momentum = [buffer if rows is None else buffer[rows] for buffer in kept]
        options = {name: group[name] for name in _OPTIONS}
        groups.append(([names[id(p)] for p in own], options, rate, momentum))
    return groups


@lru_cache(maxsize=64)
def _number(value: float, device: torch.device) -> Tensor:
    """Return a number as a tensor on a device; a CUDA graph cannot read it from the CPU."""
    return torch.tensor(value, dtype=torch.float64).to(device, non_blocking=True)


def sgd_step(
    local: LocalStep,
    params: Tensors,
    groups: Sequence[SGDGroup],
    *tensors: Any,
    **how: Any,
) -> Outcome:
    """Make a local step and SGD's in-place update of each parameter group."""
    grads, outcome = local.gradients(params, *tensors, **how)
    for names, options, rate, momentum in groups:
        wanted = [grads[name] for name in names]
        _sgd([params[name] for name in names], wanted, momentum, lr=rate, **options)
    return outcome


def reads_batch_idx(module: LightningModule) -> bool:
    """Return whether the code of ``training_step`` reads its argument ``batch_idx``.

    If the code is not available, as for some decorators, the answer is True.
    """
    step: Any = module.training_step
    code = getattr(getattr(step, "__func__", step), "__code__", None)
    at = 1 + isinstance(step, MethodType)
    if code is None or code.co_argcount <= at:
        return code is None or bool(code.co_flags & inspect.CO_VARARGS)
    name = code.co_varnames[at]
    if name in code.co_cellvars:
        return True
    return any(
        "LOAD" in line.opname
        and name in (line.argval if isinstance(line.argval, tuple) else (line.argval,))
        for line in dis.get_instructions(code)
    )


def depends_on_batch_idx(local: LocalStep, **arguments: Any) -> bool:
    """Return whether a new ``batch_idx`` changes the graph of a step; nothing is compiled.

    Args:
        local: The step.
        arguments: Arguments of :meth:`LocalStep.many`.
    """
    traced = torch.compile(own_code(LocalStep.gradients), dynamic=False, backend="eager")
    at, graphs = local.batch_idx, []
    try:
        for i in (at, at, at + 1):
            local.batch_idx = i
            with left_alone(local.module), local.placeholders():
                traced(local, **arguments)
            graphs.append(graphs_made())
    except Exception:  # compiling will raise it again
        return False
    finally:
        local.batch_idx = at
    return bool(graphs[2] != graphs[1])


def graphs_made() -> int:
    """Return the number of graphs that torch has traced in this process."""
    return counters["stats"]["unique_graphs"]


def compiled(
    function: Callable[..., Any], on_a_gpu: bool, rewrites: bool = True
) -> Callable[..., Any]:
    """Compile a function; torch checks before each call that its graph is still valid.

    Args:
        function: The function.
        on_a_gpu: Whether to use CUDA graphs. Their outputs are copied, since the next launch
            overwrites them.
        rewrites: Whether to rewrite graphs for a CPU, see :mod:`lightning_fl.runners.rewrites`.
    """
    if on_a_gpu:
        graph = torch.compile(own_code(function), dynamic=False, mode="reduce-overhead")
        return lambda *args, **kwargs: tree_map(torch.clone, graph(*args, **kwargs))
    options: dict[str, Any] = {}
    if rewrites:
        from lightning_fl.runners.rewrites import Rewrites  # imports torch's compiler

        options["post_grad_custom_post_pass"] = Rewrites()
    return torch.compile(own_code(function), dynamic=False, options=options)


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function with its code, since torch allows only eight graphs per code object."""
    assert isinstance(function, FunctionType)
    own = FunctionType(function.__code__.replace(), function.__globals__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own
