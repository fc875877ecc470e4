"""What rules that look into local training refuse of it."""

from __future__ import annotations

from typing import Any

import torch

from lightning_fl.contracts.context import Federation
from lightning_fl.errors import FederationError


def check_automatic(name: str, federation: Federation) -> None:
    """Refuse modules that optimize manually.

    Args:
        name: What refuses them.
        federation: The run. Outside a fit nothing is checked.

    Raises:
        FederationError: If the module optimizes manually.
    """
    module = federation.module
    if module is not None and not module.automatic_optimization:
        raise FederationError(
            f"{name} needs one optimizer step in each local step, and {type(module).__name__}"
            " optimizes manually: use automatic optimization, or a rule such as FedAvg or FedOpt"
        )


def check_sgd(name: str, federation: Federation) -> float:
    """Refuse local training that is not SGD, or not at one rate; return its momentum.

    Args:
        name: What refuses it.
        federation: The run. Outside a fit nothing is checked.

    Returns:
        The momentum; 0 is plain SGD.

    Raises:
        FederationError: Says what of the optimizer, the schedulers or the precision does not fit.
    """
    check_automatic(name, federation)
    if federation.phases:
        raise FederationError(
            f"{name} divides a client's move by its local steps, and with phases a parameter is not"
            " trained in all of them: remove phases, or use FedAvg"
        )
    if (trainer := federation.trainer) is None:
        return 0.0
    if trainer.accumulate_grad_batches != 1:
        raise FederationError(
            f"{name} divides a client's move by its local steps, and accumulate_grad_batches makes"
            " fewer optimizer steps: increase batch_size instead"
        )
    optimizer: Any = trainer.optimizers[0]
    kind, groups = type(optimizer), optimizer.param_groups
    if kind is not torch.optim.SGD:
        raise FederationError(
            f"{name} divides a client's move by its gradient steps, which is known for"
            f" torch.optim.SGD, and the optimizer is {kind.__name__}: choose SGD"
        )
    for option in ("dampening", "nesterov", "maximize"):
        if any(group[option] for group in groups):
            raise FederationError(f"{name} does not support SGD({option}=...): leave it out")
    for option in ("lr", "momentum"):
        if len({float(group[option]) for group in groups}) > 1:
            raise FederationError(
                f"{name} needs one {option} for all parameters, and the optimizer has groups with"
                " different ones: use one group, and lr_factor=1 in terms"
            )
    if any(config.interval == "step" for config in trainer.lr_scheduler_configs):
        raise FederationError(
            f"{name} needs a learning rate that is constant in a round, and a scheduler has"
            ' interval="step": set interval="epoch", which counts rounds'
        )
    if federation.optimizer_state == "keep" and groups[0]["momentum"]:
        raise FederationError(
            f"{name} needs a momentum that starts at 0 in every round: set optimizer_state='reset'"
        )
    return float(groups[0]["momentum"])


def check_plain_sgd(name: str, federation: Federation) -> None:
    """Refuse local training that is not SGD without momentum and gradient clipping.

    Args:
        name: What refuses it.
        federation: The run. Outside a fit nothing is checked.

    Raises:
        FederationError: See :func:`check_sgd`; if there is momentum, or gradients are clipped.
    """
    if check_sgd(name, federation):
        raise FederationError(f"{name} does not support SGD(momentum=...): set momentum=0")
    if federation.trainer is not None and federation.trainer.gradient_clip_val:
        raise FederationError(
            f"{name} cannot be combined with gradient clipping: leave out trainer.gradient_clip_val"
        )


def check_constant_sizes(rule: object, weighting: str, federation: Federation) -> None:
    """Refuse weights by numbers of samples that change in the run.

    Args:
        rule: Rule that weights clients over rounds.
        weighting: Its weighting.
        federation: Description of the run.
    """
    if weighting == "samples" and getattr(federation.data, "stream_steps", 1) > 1:
        raise FederationError(
            f"{type(rule).__name__}(weighting='samples') requires clients of a constant size, and"
            " the data module has stream_steps: set weighting='uniform'"
        )
