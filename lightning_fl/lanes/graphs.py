"""Local steps as compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from lightning_fl.lanes.local_step import LocalStep, Outcome, Tensors

#: Options of SGD that torch's function for a step takes.
_OPTIONS = ("weight_decay", "momentum", "dampening", "nesterov", "maximize")


class Graphs:
    """Compiled forms of a module's local step in lanes.

    Gradients are one graph for any optimiser. With ``torch.optim.SGD`` its update is in the graph
    too, which saves writing the gradients and reading them again.

    Args:
        local: The step.
        optimizer: The optimiser of the stacked parameters.
    """

    def __init__(self, local: LocalStep, optimizer: torch.optim.Optimizer) -> None:
        self.local, self.optimizer = local, optimizer
        self.gradients = _compiled(LocalStep.gradients)
        self._sgd_step = _compiled(sgd_step)

    def can_update(self) -> bool:
        """Say whether the optimiser is one whose update can be in the graph, and has begun."""
        groups = self.optimizer.param_groups
        return type(self.optimizer) is torch.optim.SGD and all(
            not group["momentum"] or self.optimizer.state[p].get("momentum_buffer") is not None
            for group in groups
            for p in group["params"]
        )

    def update(self, params: Tensors, *tensors: Any, ratio: float, **how: Any) -> Outcome:
        """Make the step and the optimiser's update; see :meth:`LocalStep.many`.

        Args:
            params: Parameters, ``[k, ...]``, which are changed.
            tensors: What else the step is given.
            ratio: Factor of the learning rates.
            how: Its options.
        """
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
        outcome: Outcome = self._sgd_step(
            self.local, params, groups, rates, buffers, *tensors, **how
        )
        return outcome


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


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # A code object of its own: torch counts the graphs of each, and gives up at eight.
    assert isinstance(function, FunctionType)
    own = FunctionType(function.__code__.replace(), function.__globals__)
    own.__kwdefaults__ = function.__kwdefaults__
    compiled: Callable[..., Any] = torch.compile(own, dynamic=False)
    return compiled
