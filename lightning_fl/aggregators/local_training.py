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

    A rule declares it in ``needs``: ``losses`` of samples, ``automatic`` optimization, ``sgd``,
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
    if "automatic" in needs:
        check_automatic(name, federation)
    refused = {"plain_sgd": "momentum", "no_decay": "weight_decay"}
    if {"sgd", "plain_sgd"} & set(needs):
        check_unclipped_sgd(name, federation, [refused[n] for n in needs if n in refused])
    streams = getattr(federation.data, "stream_steps", 1) > 1
    if "constant_sizes" in needs and streams and rule.weighting == "samples":
        raise FederationError(
            f"{name}(weighting='samples') requires clients of a constant size, and"
            " the data module has stream_steps: set weighting='uniform'"
        )


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
    if (trainer := federation.trainer) is None:
        return 0.0
    optimizer: Any = trainer.optimizers[0]
    kind, groups = type(optimizer), optimizer.param_groups
    momentum = float(groups[0].get("momentum") or 0)
    is_stepwise = any(config.interval == "step" for config in trainer.lr_scheduler_configs)
    keeps = federation.optimizer_state == "keep" and momentum > 0
    found = {
        "phases do not train each parameter in all of them: remove phases": federation.phases,
        "accumulate_grad_batches makes fewer: increase batch_size instead": (
            trainer.accumulate_grad_batches != 1
        ),
        f"the optimizer is {kind.__name__}: choose SGD": kind is not torch.optim.SGD,
        'a scheduler has interval="step": set interval="epoch", which counts rounds': is_stepwise,
        "the momentum does not start at 0: set optimizer_state='reset'": keeps,
    }
    for option in ("dampening", "nesterov", "maximize"):
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


def check_unclipped_sgd(name: str, federation: Federation, refused: Collection[str]) -> None:
    """Refuse local training that is not SGD, with some options, or with gradient clipping.

    Args:
        name: What refuses it.
        federation: The run. Outside a fit nothing is checked.
        refused: Options of SGD that must be 0.

    Raises:
        FederationError: See :func:`check_sgd`; if an option is set, or gradients are clipped.
    """
    check_sgd(name, federation)
    if (trainer := federation.trainer) is None:
        return
    for option in refused:
        if any(group[option] for group in trainer.optimizers[0].param_groups):
            raise FederationError(f"{name} does not support SGD({option}=...): set {option}=0")
    if trainer.gradient_clip_val:
        raise FederationError(
            f"{name} cannot be combined with gradient clipping: leave out trainer.gradient_clip_val"
        )
