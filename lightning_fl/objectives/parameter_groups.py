"""Parameters of a term with optimizer options of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer


class ParameterGroup(NamedTuple):
    """Parameters of a term with optimizer options of their own.

    Args:
        params: The parameters.
        lr_factor: Factor of the learning rate.
        decays: Whether weight decay applies.
    """

    params: Sequence[nn.Parameter]
    lr_factor: float = 1.0
    decays: bool = True


def split_groups(optimizer: Optimizer, groups: Iterable[ParameterGroup]) -> None:
    """Move parameters of an optimizer to groups of their own, with the other options unchanged.

    Args:
        optimizer: The optimizer, before its first step; it is changed.
        groups: The parameters and their options.

    Example:
        >>> import torch
        >>> net = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        >>> split_groups(optimizer, [ParameterGroup([net.bias], lr_factor=0.1)])
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.5, 0.05]
    """
    for params, lr_factor, decays in groups:
        wanted = {id(param) for param in params}
        for group in list(optimizer.param_groups):
            moved = [p for p in group["params"] if id(p) in wanted]
            if not moved:
                continue
            group["params"] = [p for p in group["params"] if id(p) not in wanted]
            own = {**group, "params": moved, "lr": group["lr"] * lr_factor}
            if not decays and "weight_decay" in own:
                own["weight_decay"] = 0.0
            optimizer.add_param_group(own)
