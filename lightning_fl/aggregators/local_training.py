"""What rules that look into local training refuse of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from lightning_fl.contracts.client_part import check_losses
from lightning_fl.contracts.context import Federation
from lightning_fl.errors import FederationError


def check_training(rule: Any, federation: Federation) -> None:
    """Refuse local training that does not have what a rule needs.

    A rule declares it in ``needs``: ``losses`` of samples, ``sgd`` without clipping,
    ``plain_sgd`` without momentum, or ``no_decay`` of weights. Rules that weight clients over
    rounds need ``constant_sizes`` if their ``weighting`` is ``samples``.

    Args:
        rule: The rule.
        federation: The run. Outside a fit nothing is checked.

    Raises:
        FederationError: If something is missing.
    """
    name, needs = type(rule).__name__, rule.needs
    if "losses" in needs:
        check_losses(rule, federation.module)
    refused = {"plain_sgd": "momentum", "no_decay": "weight_decay"}
    if {"sgd", "plain_sgd"} & set(needs):
        check_sgd(name, federation, [refused[n] for n in needs if n in refused], clips=False)
    streams = getattr(federation.data, "stream_steps", 1) > 1
    if "constant_sizes" in needs and streams and rule.weighting == "samples":
        raise FederationError(
            f"{name}(weighting='samples') requires clients of a constant size, and"
            " the data module has stream_steps: set weighting='uniform'"
        )


def check_sgd(
    name: str, federation: Federation, refused: Collection[str] = (), clips: bool = True
) -> float:
    """Refuse local training that is not SGD, or not at one rate; return its momentum.

    Args:
        name: What refuses it.
        federation: The run. Outside a fit nothing is checked.
        refused: Options of SGD that must be 0.
        clips: Whether gradients may be clipped.

    Returns:
        The momentum; 0 is plain SGD.

    Raises:
        FederationError: Says what of the optimizer, the schedulers or the precision does not fit.
    """
    if (trainer := federation.trainer) is None:
        return 0.0
    optimizer: Any = trainer.optimizers[0]
    kind, groups = type(optimizer), optimizer.param_groups
    momentum = float(groups[0].get("momentum") or 0)
    is_stepwise = any(config.interval == "step" for config in trainer.lr_scheduler_configs)
    module = federation.module
    is_manual = module is not None and not module.automatic_optimization
    keeps = federation.optimizer_state == "keep" and momentum > 0
    found = {
        f"{type(module).__name__} optimizes manually: choose a rule such as FedAvg": is_manual,
        "gradient_clip_val is set: leave it out": not clips and trainer.gradient_clip_val,
        "phases do not train each parameter in all of them: remove phases": federation.phases,
        "accumulate_grad_batches makes fewer: increase batch_size instead": (
            trainer.accumulate_grad_batches != 1
        ),
        f"the optimizer is {kind.__name__}: choose SGD": kind is not torch.optim.SGD,
        'a scheduler has interval="step": set interval="epoch", which counts rounds': is_stepwise,
        "the momentum does not start at 0: set optimizer_state='reset'": keeps,
    }
    for option in ("dampening", "nesterov", "maximize", *refused):
        is_set = any(group.get(option) for group in groups)
        found[f"the optimizer is SGD({option}=...): leave it out"] = is_set
    for option in ("lr", "momentum"):
        differs = len({float(group.get(option) or 0) for group in groups}) > 1
        found[f"parameters have different {option}: use one group, and lr_factor=1 in terms"] = (
            differs
        )
    for reason, is_so in found.items():
        if is_so:
            raise FederationError(
                f"{name} divides a client's move by its local steps, and {reason}"
            )
    return momentum
