"""Steps of small copies of an optimizer, by which it is tried before a fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fl.runners.optimizer_state import NUMBERS, OptimizerState
from lightning_fl.runners.optimizer_values import holds_tensors, params_of

#: Rows and columns of a tensor in a trial: some optimizers treat matrices from 128 on differently.
_LONG, _SHORT = 130, 3


def trial_shape(state: OptimizerState, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a tensor in a trial: as many dimensions, of a small size.

    Args:
        state: Of the optimizer to try.
        shape: Shape of its parameter.
    """
    if holds_tensors(state.optimizers):  # they fit the parameters as they are
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
    """Let an optimizer make steps, and return the parameters after the last.

    The gradients that it gets depend on the parameters, since some optimizers evaluate them at
    several points (SAM).

    Args:
        optimizer: The optimizer.
        starts: Values of its parameters before the first step.
        gradients: Of each step, one gradient for each parameter; None for no gradient.
        ratio: The share of each step that the parameters take.
        with_closure: Whether steps get a closure. Lightning always passes one; lanes pass none
            in most steps.
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

    Gradients are a drift and noise, in some steps larger than in others.

    Args:
        optimizer: The optimizer, whose parameters give shapes and dtypes.
        steps: Number of steps.
        random: The source of the numbers.
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
    """Return whether no trained parameter moved, so that a comparison would prove nothing."""
    trained = [p.requires_grad and p.numel() > 0 for p in params_of(optimizer)]
    pairs = zip(ends, starts, trained, strict=True)
    return any(trained) and not any(is_on and not torch.equal(a, b) for a, b, is_on in pairs)


def scalars(state: OptimizerState) -> dict[str, Any]:
    """Return single numbers that were learned, each one for all entries of a tensor."""
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
