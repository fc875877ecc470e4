"""Trial steps of small copies of an optimizer, for checks before a fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fl.runners.optimizer_state import NUMBERS, OptimizerState
from lightning_fl.runners.optimizer_values import holds_tensors, params_of

#: Maximum sizes of dimensions in a trial; some optimizers treat matrices from 128 on differently.
_LONG, _SHORT = 130, 3


def trial_shape(state: OptimizerState, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a tensor in a trial: the same number of dimensions, but small.

    Args:
        state: State of the optimizer to check.
        shape: Shape of its parameter.
    """
    if holds_tensors(state.optimizers):  # these tensors require the original shapes
        return tuple(shape)
    long = sorted(range(len(shape)), key=lambda i: -shape[i])[:2]
    return tuple(min(n, _LONG if i in long else _SHORT) for i, n in enumerate(shape))


def take_steps(
    optimizer: Optimizer,
    starts: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor | None]],
    ratio: float = 1.0,
    with_closure: bool = True,
) -> list[Tensor]:
    """Make steps of an optimizer, and return the parameters after the last step.

    The gradients depend on the parameters, since some optimizers evaluate them at several points
    (SAM).

    Args:
        optimizer: The optimizer.
        starts: Values of its parameters before the first step.
        gradients: For each step, one gradient per parameter; None for no gradient.
        ratio: Factor that scales the change of parameters in each step.
        with_closure: Whether steps get a closure. Lightning always passes one; vectorized training
            passes none in most steps.
    """
    params = params_of(optimizer)
    for param, start in zip(params, starts, strict=True):
        param.data.copy_(start)
    for given in gradients:

        def closure(given: Sequence[Tensor | None] = given) -> Tensor:
            for param, gradient in zip(params, given, strict=True):
                param.grad = None if gradient is None else gradient + 0.1 * param.detach()
            return params[0].detach().abs().sum()

        before = [param.detach().clone() for param in params] if ratio != 1 else []
        closure()
        optimizer.step(closure if with_closure else None)  # type: ignore[arg-type]
        for param, old in zip(params, before, strict=False):
            param.data = old + ratio * (param.detach() - old)
    return [param.detach() for param in params]


def random_problem(
    optimizer: Optimizer, steps: int, random: torch.Generator
) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """Return random parameters and gradients for :func:`take_steps`.

    Gradients are the sum of a drift and noise, with a scale that varies between steps.

    Args:
        optimizer: The optimizer; its parameters give shapes and dtypes.
        steps: Number of steps.
        random: The random generator.
    """

    def normal(like: Tensor) -> Tensor:
        dtype = torch.complex128 if like.is_complex() else torch.float64
        return torch.randn(like.shape, generator=random, dtype=dtype).to(like)

    params = params_of(optimizer)
    starts, drifts = ([normal(p.detach()) for p in params] for _ in range(2))
    gradients = [
        [
            (drift + normal(drift)) * 10.0 ** (t % 3 - 1) if p.requires_grad else None
            for p, drift in zip(params, drifts, strict=True)
        ]
        for t in range(steps)
    ]
    return starts, gradients


def stood_still(optimizer: Optimizer, ends: Sequence[Tensor], starts: Sequence[Tensor]) -> bool:
    """Return whether no trained parameter changed, so that a comparison is meaningless."""
    trained = [p.requires_grad and p.numel() > 0 for p in params_of(optimizer)]
    pairs = zip(ends, starts, trained, strict=True)
    return any(trained) and not any(is_on and not torch.equal(a, b) for a, b, is_on in pairs)


def scalars(state: OptimizerState) -> dict[str, Any]:
    """Return the learned values that are single numbers, which all entries of a tensor share."""
    values = {
        f"{which}.{index}.{name}": value
        for (which, _, index), _, entries in state.states()
        for name, value in entries.items()
    }
    places = dict(state.places())
    for place, key in state.learned_keys():
        values[f"{place}.{key}"] = places[place].get(key)
    return {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in values.items()
        if (isinstance(value, Tensor) and value.numel() == 1) or isinstance(value, NUMBERS)
    }
