"""What a private rule asks of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping

from lightning_fl.aggregators import Aggregator
from lightning_fl.policies import HyperParameterPolicy
from lightning_fl.types import FederationError, configuration


def check_options(
    rule: Aggregator,
    policy: HyperParameterPolicy,
    min_clients: int,
    on_client_error: Literal["skip", "raise"],
) -> None:
    """Refuse options of the loop that let something of single clients out."""
    name = type(rule).__name__
    if min_clients > 1:
        raise FederationError(
            f"{name} has an answer in each round: one that keeps the model would give away how many"
            " clients returned. Set min_clients=1"
        )
    if on_client_error == "raise":
        raise FederationError(
            f"{name} cannot be combined with on_client_error='raise': a run that ends would reveal"
            " that a client with an unusable update took part. Set on_client_error='skip'"
        )
    if policy.needs_credits or policy.hears_clients:
        raise FederationError(
            f"{type(policy).__name__} learns from what single clients report, which {name} is to"
            " hide: choose another policy, or let it learn from the validation loss"
        )


def check_training(rule: Aggregator, trainer: Trainer) -> None:
    """Refuse what passes from one client to the others during local training."""
    name = type(rule).__name__
    if any(config.interval == "step" for config in trainer.lr_scheduler_configs):
        raise FederationError(
            f'{name} cannot be combined with a scheduler of interval="step": it continues from the'
            " client with the most steps, so one client's size would set the learning rate of all."
            ' Set interval="epoch", which counts rounds'
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise FederationError(
            f"{name} cannot be combined with precision={trainer.precision!r}: its loss scale is"
            " shared, so one client's gradients would change the steps of others. Set"
            " precision='bf16-mixed' or '32-true'"
        )


def check_monitors(rule: Aggregator, trainer: Trainer, of_clients: Collection[str]) -> None:
    """Refuse decisions that follow metrics of clients, which have no noise.

    It is checked when the first round has logged its metrics and before any decision: which hook
    logs a metric is not known earlier.

    Args:
        rule: A private one.
        trainer: At the end of a round.
        of_clients: Names of further metrics that clients determine.
    """
    results: Any = trainer.fit_loop.epoch_loop._results
    logged = [metric.meta.name for metric in results.values()]
    unsafe = {name + suffix for name in logged for suffix in ("", "_step", "_epoch")}
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by the connector
    deciding = [(c, getattr(c, "monitor", None)) for c in callbacks]
    monitored = [
        *((type(c).__name__, m) for c, m in deciding if isinstance(c, EarlyStopping | Checkpoint)),
        *(
            (type(config.scheduler).__name__, config.monitor)
            for config in trainer.lr_scheduler_configs
            if config.reduce_on_plateau
        ),
    ]
    for who, monitor in monitored:
        if monitor in unsafe or monitor in of_clients:
            raise FederationError(
                f"{who} monitors {monitor!r}, which clients report without noise:"
                f" {type(rule).__name__} would not hide them. Monitor a validation metric"
            )


def noise_key(trainer: Trainer, module: LightningModule, *parts: Any) -> int:
    """Return a digest of everything known that changes what a run computes.

    Noise is drawn from it: two continuations of one checkpoint with different options do not share
    the noise of a round, which the difference of their models would otherwise not contain. Paths,
    the number of processes, vectorization and the number of rounds are not part of it.

    Args:
        trainer: At the start of a fit, with its optimizers as the module configured them.
        module: The user's.
        parts: Further objects and options of the run.
    """
    options: Any = trainer
    groups = [
        (type(optimizer), [_without_params(group) for group in optimizer.param_groups])
        for optimizer in trainer.optimizers
    ]
    schedulers = [
        (type(config.scheduler), config.scheduler.state_dict(), config.monitor)
        for config in trainer.lr_scheduler_configs
    ]
    frozen = [name for name, param in module.named_parameters() if not param.requires_grad]
    training = [str(trainer.precision), options.gradient_clip_val, options.gradient_clip_algorithm]
    text = configuration([groups, schedulers, module, frozen, training, parts])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
