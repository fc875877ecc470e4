"""Optimizers of local training: what is in them, their steps, and whether they may be stacked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_leaves

from lightning_fl.hooks import attributes_set

#: Optimizers whose steps are elementwise and proportional to the learning rate.
PROPORTIONAL = {
    *(optim.SGD, optim.RMSprop, optim.Adadelta, optim.Adam, optim.AdamW),
    *(optim.Adamax, optim.NAdam, optim.RAdam),
}
#: Optimizers whose steps are elementwise: they treat all entries of a parameter alike.
ELEMENTWISE = {*PROPORTIONAL, optim.ASGD, optim.Rprop}


# --- any optimizer --------------------------------------------------------------------------------


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested mappings, lists and tuples."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def optimizers_in(configured: Any) -> list[Optimizer]:
    """Return the optimizers in the result of ``configure_optimizers``, in any of its forms."""
    return [leaf for leaf in tree_leaves(configured) if isinstance(leaf, Optimizer)]


def evaluates_often(optimizers: Iterable[Optimizer]) -> Optimizer | None:
    """Return the first optimizer that evaluates the loss several times in a step, or None."""
    inner = (each for optimizer in optimizers for each in with_inner(optimizer))
    return next((o for o in inner if isinstance(o, LBFGS) or hasattr(o, "evaluations")), None)


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and the optimizers in its attributes, also inside lists."""
    optimizers = [optimizer]
    for each in optimizers:
        optimizers += [o for o in optimizers_in(vars(each)) if o not in optimizers]
    return optimizers


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether an optimizer or an inner one has hooks before or after its steps."""
    names = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    return any(getattr(each, name, None) for each in with_inner(optimizer) for name in names)


def around_steps(
    optimizer: Optimizer,
    before: Callable[[Callable[[], Any] | None], Callable[[], Any] | None],
    after: Callable[[], None],
) -> AbstractContextManager[None]:
    """Call functions before and after each step of an optimizer within a ``with`` block.

    Step hooks would not do: a wrapper that never calls ``Optimizer.__init__`` has none.

    Args:
        optimizer: The optimizer.
        before: Called before each step with its closure; returns the closure to use.
        after: Called after each step.
    """
    step = optimizer.step

    @wraps(step)
    def stepped(_: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        result = step(closure=before(closure), **options)
        after()
        return result

    return attributes_set(optimizer, {"step": MethodType(stepped, optimizer)})  # as schedulers do


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


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to treat all entries of a parameter alike."""
    return type(optimizer) in ELEMENTWISE or bool(
        getattr(optimizer, "federated_elementwise", False)
    )


def is_proportional(optimizer: Optimizer) -> bool:
    """Return whether the steps of an optimizer are proportional to its learning rate."""
    return type(optimizer) in PROPORTIONAL or getattr(optimizer, "_is_proportional", False)


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
        return f"{name} has state before its first step"
    # Of SGD, or with a method fresh, the state of a client consists of stacked tensors only.
    is_sgd = type(optimizer) is optim.SGD
    is_sgd = is_sgd and not any(group["dampening"] for group in optimizer.param_groups)
    if keep and not is_sgd and not hasattr(optimizer, "fresh"):
        return f"clients would share a part of the state of {name}, as they keep it"
    return None


def fresh(optimizer: Optimizer, param: Tensor, name: str) -> Tensor:
    """Return the initial state of a parameter: zero, or the result of the optimizer's ``fresh``."""
    make = getattr(optimizer, "fresh", None)
    return torch.zeros_like(param) if make is None else make(param, name).detach().clone()
