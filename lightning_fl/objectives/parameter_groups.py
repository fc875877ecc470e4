"""Parameters of a term with optimizer options of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fl.contracts.personal import PersonalModel
from lightning_fl.errors import FederationError
from lightning_fl.optimizers import Combined


class ParameterGroup(NamedTuple):
    """Parameters of a term with optimizer options of their own.

    Args:
        params: The parameters.
        lr_factor: Factor of the learning rate.
        decays: Whether weight decay applies.
        optimizer: Function that creates the optimizer of the parameters; None means that of the
            module.
    """

    params: Sequence[nn.Parameter]
    lr_factor: float = 1.0
    decays: bool = True
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None = None


def split_groups(optimizer: Optimizer, groups: Iterable[ParameterGroup]) -> Optimizer:
    """Move parameters of an optimizer to groups of their own, with the other options unchanged.

    Args:
        optimizer: The optimizer, before its first step; it is changed.
        groups: The parameters and their options.

    Returns:
        The optimizer, combined with those that the groups create.

    Raises:
        FederationError: If a group creates an optimizer, and the given one has a personal model.

    Example:
        >>> import torch
        >>> net = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        >>> optimizer = split_groups(optimizer, [ParameterGroup([net.bias], lr_factor=0.1)])
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.5, 0.05]
    """
    others: list[Optimizer] = []
    for params, lr_factor, decays, create in groups:
        wanted = {id(param) for param in params}
        for group in list(optimizer.param_groups):
            moved = [p for p in group["params"] if id(p) in wanted]
            if not moved:
                continue
            group["params"] = [p for p in group["params"] if id(p) not in wanted]
            if create is not None:
                others.append(create(moved))
                for other in others[-1].param_groups:
                    other["lr"] = group["lr"] * lr_factor
                continue
            own = {**group, "params": moved, "lr": group["lr"] * lr_factor}
            if not decays and "weight_decay" in own:
                own["weight_decay"] = 0.0
            optimizer.add_param_group(own)
    if others and isinstance(optimizer, PersonalModel):
        raise FederationError(
            f"{type(optimizer).__name__} has a personal model of all parameters, so no term can"
            " have another optimizer: use SGD, or remove the optimizer of the term"
        )
    return Combined(optimizer, *others) if others else optimizer
