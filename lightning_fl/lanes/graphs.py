"""Local steps as compiled graphs."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Hashable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim.sgd import sgd
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fl.lanes.attributes import left_alone
from lightning_fl.lanes.local_step import LocalStep, Outcome, Tensors

#: Options of SGD that torch's function for a step takes.
_OPTIONS = ("weight_decay", "momentum", "dampening", "nesterov", "maximize")


class Graphs:
    """Compiled forms of a module's local step in lanes.

    Gradients are one graph for any optimiser. With ``torch.optim.SGD`` its update is in the graph
    too, which saves writing the gradients and reading them again. On a GPU they are CUDA graphs,
    which launch all of a step at once.

    Args:
        local: The step.
        optimizer: The optimiser of the stacked parameters.
    """

    def __init__(self, local: LocalStep, optimizer: torch.optim.Optimizer) -> None:
        self.local, self.optimizer = local, optimizer
        self._reads_batch_idx = reads_batch_idx(local.module)
        on_a_gpu = any(p.is_cuda for group in optimizer.param_groups for p in group["params"])
        self._gradients = Repeated(LocalStep.gradients, local.module, on_a_gpu)
        self._sgd_step = Repeated(sgd_step, local.module, on_a_gpu)

    def restart(self) -> None:
        """Take nothing for granted: other code has run since the last step, or will."""
        self._gradients.restart()
        self._sgd_step.restart()

    def can_update(self) -> bool:
        """Say whether the optimiser is one whose update can be in the graph, and has begun."""
        groups, made = self.optimizer.param_groups, self.optimizer
        # Ours set the client's rate; those of others see the update itself.
        hooks = (made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks)
        if any(len(each) > 1 for each in hooks):
            return False
        return type(made) is torch.optim.SGD and all(
            not group["momentum"] or self.optimizer.state[p].get("momentum_buffer") is not None
            for group in groups
            for p in group["params"]
        )

    def gradients(self, params: Tensors, *tensors: Any, **how: Any) -> tuple[Tensors, Outcome]:
        """Return gradients and what the step made; see :meth:`LocalStep.gradients`."""
        found: tuple[Tensors, Outcome] = self._gradients(
            self._kind(tensors, how), self.local, params, *tensors, **how
        )
        return found

    def update(self, params: Tensors, *tensors: Any, ratio: float, **how: Any) -> Outcome:
        """Make the step and the optimiser's update; see :meth:`LocalStep.many`.

        Args:
            params: Parameters, ``[k, ...]``, which are changed.
            tensors: What else the step is given.
            ratio: Factor of the learning rates.
            how: Its options.
        """
        for param in params.values():
            if param.is_cuda:  # a CUDA graph writes to tensors that stay where they are
                torch._dynamo.mark_static_address(param)
        names = {id(p): name for name, p in params.items()}
        groups, rates, buffers = [], [], []
        for group in self.optimizer.param_groups:
            own = [p for p in group["params"] if p.requires_grad]
            groups.append(([names[id(p)] for p in own], {o: group[o] for o in _OPTIONS}))
            # A tensor: with a number in it, every new rate would be a new graph.
            rates.append(torch.tensor(float(group["lr"]) * ratio, dtype=torch.float64))
            state = self.optimizer.state
            buffers.append(
                [state[p].get("momentum_buffer") if group["momentum"] else None for p in own]
            )
        kind = (*self._kind(tensors, how), *(tuple(options.values()) for _, options in groups))
        outcome: Outcome = self._sgd_step(
            kind, self.local, params, groups, rates, buffers, *tensors, **how
        )
        return outcome

    def _kind(self, tensors: Sequence[Any], how: dict[str, Any]) -> tuple[Hashable, ...]:
        """Return what a graph depends on that changes within a Lightning batch."""
        _, _, batch, weight = tensors
        shapes = tuple((t.shape, t.stride(), t.dtype) for t in tree_leaves(batch))
        # A step that is handed batch_idx may look at it some day.
        index = self.local.batch_idx if self._reads_batch_idx else None
        return (*shapes, weight is None, index, *how.values())


def sgd_step(
    local: LocalStep,
    params: Tensors,
    groups: Sequence[tuple[list[str], dict[str, Any]]],
    rates: Sequence[Tensor],
    buffers: Sequence[list[Tensor | None]],
    *tensors: Any,
    **how: Any,
) -> Outcome:
    """Make a local step and SGD's update, in place, for each parameter group."""
    grads, outcome = local.gradients(params, *tensors, **how)
    for (names, options), rate, momentum in zip(groups, rates, buffers, strict=True):
        sgd(
            [params[name] for name in names],
            [grads[name] for name in names],
            momentum,
            has_sparse_grad=False,
            foreach=False,
            fused=False,
            lr=rate,
            **options,
        )
    return outcome


def reads_batch_idx(module: LightningModule) -> bool:
    """Say whether the code of ``training_step`` reads its argument ``batch_idx`` at all.

    A step whose code is not known, as of a decorator, may do so.
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


def depends_on_batch_idx(local: LocalStep, *tensors: Any, **how: Any) -> bool:
    """Say whether another ``batch_idx`` makes another graph of a step; nothing is compiled."""
    traced = torch.compile(_own(LocalStep.gradients), dynamic=False, backend="eager")
    at, graphs = local.batch_idx, []
    try:
        for i in (at, at, at + 1):
            local.batch_idx = i
            with left_alone(local.module):
                traced(local, *tensors, **how)
            graphs.append(counters["frames"]["total"])
    except Exception:  # the compiler's to say
        return False
    finally:
        local.batch_idx = at
    return bool(graphs[2] != graphs[1])


class Repeated:
    """A compiled function for calls that follow each other with nothing in between.

    Before each call torch checks all that a graph was compiled for: its guards, which take as long
    as a tenth of a small model's step. Here they are checked twice. When they hold for the second
    call, which sees what the first has left, and that leaves the module as it was, they hold for
    every later call of the same kind. Where a module has objects whose inside is not known, they
    are checked always.

    Args:
        function: What to compile.
        module: Whose attributes the function may read and write.
        on_a_gpu: Whether to make CUDA graphs.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module, on_a_gpu: bool) -> None:
        compiled = _compiled(function, "reduce-overhead" if on_a_gpu else None)
        # The next launch of a CUDA graph writes over what the last has returned.
        self.function = _copied(compiled) if on_a_gpu else compiled
        self.module = module
        self._seen, self._settled = set[Hashable](), set[Hashable]()

    def restart(self) -> None:
        """Check the guards again."""
        self._seen.clear()
        self._settled.clear()

    def __call__(self, kind: Hashable, *args: Any, **kwargs: Any) -> Any:
        """Call the function; calls of one kind differ in the values of tensors only."""
        if kind in self._settled:
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                return self.function(*args, **kwargs)
        if kind not in self._seen:
            self._seen.add(kind)
            return self.function(*args, **kwargs)
        before, compiled = _attributes(self.module), counters["frames"]["total"]
        result = self.function(*args, **kwargs)
        is_same = before is not None and _are_same(before, _attributes(self.module))
        if is_same and counters["frames"]["total"] == compiled:
            self._settled.add(kind)
        return result


class _OpaqueError(Exception):
    """An object whose inside is not known."""


#: Whose objects are taken to stay as they are, or to have no part in a step.
_KNOWN = {
    *("torch", "torchmetrics", "torchvision", "torchaudio", "lightning", "lightning_utilities"),
    *("lightning_fl", "jsonargparse", "numpy", "builtins", "functools", "inspect", "pathlib"),
    *("re", "weakref"),
}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type)
#: What has no state of its own, or one that is looked at elsewhere.
_STATELESS = (FunctionType, BuiltinFunctionType, nn.Module)


def _attributes(module: nn.Module) -> list[Any] | None:
    """Return all that a module and its children hold, containers by content; None if unknown."""
    try:
        return [_content(value) for m in module.modules() for value in vars(m).values()]
    except _OpaqueError:
        return None


def _content(value: Any) -> Any:
    if isinstance(value, dict):
        return [*value.keys(), *map(_content, value.values())]
    if isinstance(value, list | tuple | set | frozenset):
        return [_content(part) for part in value]
    if isinstance(value, MethodType):
        return _content(value.__self__)
    is_known = type(value).__module__.partition(".")[0] in _KNOWN
    if isinstance(value, _PLAIN + _STATELESS) or is_known:
        return value
    raise _OpaqueError


def _are_same(before: Any, after: Any) -> bool:
    if type(before) is list and type(after) is list:
        return len(before) == len(after) and all(map(_are_same, before, after))
    return before is after or (isinstance(before, _PLAIN) and before == after)


def _copied(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: tree_map(torch.clone, function(*args, **kwargs))


def _compiled(function: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(_own(function), dynamic=False, mode=mode)
    return compiled


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function, its code too: torch counts the graphs of each, and gives up at eight."""
    assert isinstance(function, FunctionType)
    own = FunctionType(function.__code__.replace(), function.__globals__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own
