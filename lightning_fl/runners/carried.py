"""State outside of parameters and buffers, through which clients affect each other's steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.runners.attributes import left_alone
from lightning_fl.runners.optimizer_values import Options, options_of, options_set
from lightning_fl.runners.samples import Samples, copied
from lightning_fl.runners.tensors import is_equal
from lightning_fl.runners.vectorized import VectorizedStep

#: Name of the options of the optimizer in messages.
OPTIONS = "the optimizer's options"


def carried(step: VectorizedStep, samples: Samples) -> list[str]:
    """Return the values through which a step of one client affects that of another.

    A client's first and second step are made twice from the current attributes, and once with a
    step of another client before the last one, each time on the same tensors, batch and random
    numbers. In a group of one client, the other one has the same batch, but other parameters. Only
    the returned losses and gradients are compared, so that a list of losses for the end of an epoch
    is allowed. Steps have the right ``batch_idx``, since a module may reset its state if it is 0.

    Args:
        step: The step; its clients and its module are not changed.
        samples: The samples of the local step.

    Returns:
        The names of all attributes that a step changes, if another step depends on them, or the
        optimizer's options if each step moves them. The list is empty if a step depends on none, or
        if it draws from random generators other than torch's.
    """
    module, at = step.module, step.local.batch_idx
    one, other, *_ = [i for i in range(step.stacks.count) if samples.client(i) is not None] * 2
    first, second, between = (other, 0, False), (other, 1, False), (one, 0, True)

    def results(*steps: tuple[int, int, bool]) -> list[Tensor]:
        """Return loss and gradients of the last of some steps.

        Args:
            steps: The client, its step, and whether its parameters are perturbed.
        """
        attributes.restore()
        for client, number, is_perturbed in steps:
            batch = copied(samples.client(client))
            step.local.batch_idx = at + number
            with (
                seeded_rng(0, module.device),
                step.stacks.untouched(),
                step.stacks.client(client),
                torch.enable_grad(),
            ):
                for param in module.parameters():
                    if is_perturbed and param.requires_grad:
                        param.data.mul_(1 + 2**-6)
                outcome, grads = step.local.by_itself({}, batch)
        return [outcome.loss.detach(), *grads.values()]

    with left_alone(module) as attributes:
        try:
            after = list[Options]()  # an option may be set anew in each step, but not moved
            optimizer = module.trainer.optimizers[0]
            with options_set(optimizer, options_of(optimizer)):
                for _ in range(2):
                    results(first)
                    after.append(options_of(optimizer))
            if after[0] != after[1]:
                return [OPTIONS]
            for alone in ([first, second], [first]):
                expected, names = results(*alone), attributes.changed()
                if not names or not is_equal(expected, results(*alone)):
                    return []
                if not is_equal(expected, results(*alone[:-1], between, alone[-1])):
                    return names
        finally:
            step.local.batch_idx = at
    return []


def comparison(result: Callable[..., list[Tensor]]) -> Callable[..., bool] | None:
    """Return a function that tells whether a step with some arguments has another result.

    Args:
        result: Function that makes the step, and returns what follows from it; empty if it fails.

    Returns:
        The function. None if the step fails, or if its results always differ, as by random numbers
        from elsewhere.
    """
    expected = result()

    def differs(*args: Any, **options: Any) -> bool:
        changed = result(*args, **options)
        return bool(changed) and not is_equal(changed, expected)

    return None if not expected or differs() else differs
