"""The optimizer of local training: fresh for each client, kept per client, or stacked."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from itertools import starmap
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import LBFGS, Optimizer

#: Optimizers whose steps are elementwise and proportional to the learning rate.
PROPORTIONAL = {
    *(optim.SGD, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Adam, optim.AdamW),
    *(optim.Adamax, optim.NAdam, optim.RAdam),
}
#: Shapes of the tensors of a client with which an optimizer is tried.
SHAPES = (), (3,), (20, 4), (3, 2, 5)
#: Optimizers whose steps are elementwise: they treat all entries of a parameter alike.
ELEMENTWISE = {*PROPORTIONAL, optim.ASGD, optim.Rprop}


# --- any optimizer --------------------------------------------------------------------------------


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors in nested mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def optimizers_in(configured: Any) -> Iterator[Optimizer]:
    """Yield the optimizers in the result of ``configure_optimizers``, in any of its forms."""
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, dict):
        yield from optimizers_in(configured.get("optimizer"))
    elif isinstance(configured, list | tuple):
        for part in configured:
            yield from optimizers_in(part)


def evaluates_often(optimizers: Iterable[Optimizer]) -> Optimizer | None:
    """Return the first optimizer that evaluates the loss several times in a step, or None."""
    inner = (each for optimizer in optimizers for each in with_inner(optimizer))
    return next((o for o in inner if isinstance(o, LBFGS) or hasattr(o, "evaluations")), None)


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and the optimizers in its attributes, also inside lists."""
    optimizers = [optimizer]
    for each in optimizers:
        for value in vars(each).values():
            values = value if isinstance(value, list | tuple) else [value]
            values = list(value.values()) if isinstance(value, dict) else values
            for inner in values:
                is_known = any(inner is other for other in optimizers)
                if isinstance(inner, Optimizer) and not is_known:
                    optimizers.append(inner)
    return optimizers


def step_hooks_of(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks before and after the steps of an optimizer and its inner optimizers."""
    names = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    return [
        hook
        for each in with_inner(optimizer)
        for name in names
        for hook in getattr(each, name, {}).values()
    ]


def around_steps(
    optimizer: Optimizer,
    before: Callable[[Callable[[], Any] | None], Callable[[], Any] | None],
    after: Callable[[], None],
) -> Callable[[], None]:
    """Call functions before and after each step of an optimizer.

    Step hooks would not do: a wrapper that never calls ``Optimizer.__init__`` has none.

    Args:
        optimizer: The optimizer.
        before: Called before each step with its closure; returns the closure to use.
        after: Called after each step.

    Returns:
        A function that ends the calls.
    """
    step, was_set = optimizer.step, "step" in vars(optimizer)

    @wraps(step)
    def stepped(_: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        result = step(closure=before(closure), **options)
        after()
        return result

    vars(optimizer)["step"] = MethodType(stepped, optimizer)  # as schedulers do

    def undo() -> None:
        if was_set:
            vars(optimizer)["step"] = step
        else:
            vars(optimizer).pop("step", None)

    return undo


# --- stacked clients ------------------------------------------------------------------------------


def restack(
    optimizer: Optimizer, stacks: Mapping[int, nn.Parameter], removed: Iterable[Tensor] = ()
) -> None:
    """Replace the parameters of an optimizer by stacked parameters, ``[1, ...]``.

    Args:
        optimizer: The optimizer, which is changed.
        stacks: The stacked parameters, by the ``id`` of the parameters that they replace.
        removed: Parameters that it shall not train.
    """
    unwanted = {id(param) for param in removed}
    for each in with_inner(optimizer):
        for group in each.param_groups:
            kept = (param for param in group["params"] if id(param) not in unwanted)
            group["params"] = [stacks.get(id(param), param) for param in kept]
        for param in [p for p in each.state if id(p) in unwanted or id(p) in stacks]:
            del each.state[param]  # of Adagrad, which makes it anew


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to treat all entries of a parameter alike."""
    return type(optimizer) in ELEMENTWISE or bool(
        getattr(optimizer, "federated_elementwise", False)
    )


def why_not_elementwise(optimizer: Optimizer, keep: bool) -> str | None:
    """Return the reason why an optimizer cannot train stacked clients, or None.

    Args:
        optimizer: The optimizer, before its first step.
        keep: Whether clients keep the state of their optimizers.
    """
    name = type(optimizer).__name__
    if not is_elementwise(optimizer):
        return (
            f"the steps of {name} are not known to be elementwise (set federated_elementwise = True"
            " in the class if they are)"
        )
    if any(each.state for each in with_inner(optimizer)):
        try:
            trial(optimizer)
        except Exception:  # a KeyError, or any error of an optimizer
            return f"{name} has state before its first step, which it does not make anew"
    if keep and not is_kept_per_client(optimizer):
        return f"clients would share a part of the state of {name}, as they keep it"
    return None


def is_kept_per_client(optimizer: Optimizer) -> bool:
    """Return whether each client has a state of its own, of stacked tensors only.

    It has if the optimizer is SGD without dampening, or has a method ``fresh``; see :func:`fresh`.
    """
    is_sgd = type(optimizer) is optim.SGD
    if is_sgd and not any(group["dampening"] for group in optimizer.param_groups):
        return True
    return hasattr(optimizer, "fresh")


def fresh(optimizer: Optimizer, param: Tensor, name: str) -> Tensor:
    """Return the initial state of a parameter: zero, or the result of the optimizer's ``fresh``."""
    made = getattr(optimizer, "fresh", None)
    value: Tensor = torch.zeros_like(param) if made is None else made(param, name)
    return value.detach().clone()


def trial(optimizer: Optimizer) -> tuple[bool, bool]:
    """Return whether steps of stacked clients are those of each, and proportional to the rate.

    Args:
        optimizer: The optimizer, before its first step.
    """
    # Each parameter has each shape once.
    found = [_trial(optimizer, shift) for shift in range(len(SHAPES))]
    return all(is_apart for is_apart, _ in found), all(is_linear for _, is_linear in found)


def _trial(optimizer: Optimizer, shift: int) -> tuple[bool, bool]:
    """Train the tensors of 20 clients by a copy of an optimizer, and those of one client by others.

    Each copy gets the gradients and the sum of losses of its clients.
    """
    params, generator = params_of(optimizer), torch.Generator().manual_seed(0)

    def drawn(i: int, param: Tensor) -> Tensor:
        shape = (20, *SHAPES[(i + shift) % len(SHAPES)])
        dtype = torch.complex128 if param.is_complex() else torch.float64
        return torch.randn(shape, generator=generator, dtype=dtype).to(param.device)

    starts, grads = list(starmap(drawn, enumerate(params))), list(starmap(drawn, enumerate(params)))
    losses = torch.rand(20, generator=generator)

    def moves(rows: slice | int, rate: float, ratio: float = 1.0) -> list[Tensor]:
        """Return the changes of the parameters after four steps, times a ratio each."""
        own = [nn.Parameter(start[rows].clone()) for start in starts]
        copied: Any = _copied_onto(
            {id(p): new for p, new in zip(params, own, strict=True)}, optimizer
        )
        for group in copied.param_groups:
            group["lr"] = rate
        for scale in (1.0, 1e3, 1e-3, 1.0):
            before = [param.detach().clone() for param in own]
            for param, grad in zip(own, grads, strict=True):
                param.grad = scale * grad[rows]
            copied.step(closure=(scale * losses[rows].sum()).clone)
            for param, old in zip(own, before, strict=True):
                param.data = old + ratio * (param.detach() - old)
        return [param.detach() - start[rows] for param, start in zip(own, starts, strict=True)]

    def is_close(one: Tensor, other: Tensor) -> bool:
        return torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(one.abs().max()))

    alone = map(torch.stack, zip(moves(0, 0.1), moves(1, 0.1), strict=True))
    is_apart = all(map(is_close, alone, [move[:2] for move in moves(slice(20), 0.1)]))
    halves = moves(slice(20), 0.1, ratio=0.5), moves(slice(20), 0.05)
    return is_apart, all(map(is_close, *halves))


def _copied_onto(params: Mapping[int, nn.Parameter], optimizer: Optimizer) -> Optimizer:
    """Return a copy of an optimizer with other parameters and without state.

    Args:
        params: The new parameters, by the ``id`` of the originals.
        optimizer: The optimizer, with its inner ones, before its first step.
    """
    memo: dict[int, Any] = dict(params)
    optimizers = with_inner(optimizer)
    for each in optimizers:
        memo[id(each)] = object.__new__(type(each))
    for each in optimizers:
        for name, value in vars(each).items():
            if name.startswith("_optimizer_"):
                vars(memo[id(each)])[name] = OrderedDict()  # hooks
            elif name == "state":
                vars(memo[id(each)])[name] = defaultdict(dict)
            elif name != "step":  # the wrapper of a scheduler, which counts steps
                vars(memo[id(each)])[name] = copy.deepcopy(value, memo)
    copied: Optimizer = memo[id(optimizer)]
    return copied
