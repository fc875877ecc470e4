"""Compatibility checks for differentially private rules."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping

from lightning_fl.contracts.context import Federation
from lightning_fl.errors import FederationError
from lightning_fl.policies import HyperparameterPolicy


def check_run(name: str, federation: Federation) -> None:
    """Raise an error if the run would reveal data of single clients or share it between them.

    Args:
        name: Class name of the rule.
        federation: Description of the run.

    Raises:
        FederationError: If an option of the loop, the policy, buffers, a scheduler or the precision
            would reveal data of a client.
    """
    if federation.min_clients > 1:
        raise FederationError(
            f"{name} requires min_clients=1, got {federation.min_clients}: a round that keeps the"
            " model would reveal the number of returned clients"
        )
    policy = federation.policy
    if policy is not None and policy.learns_from - {"val_loss"}:
        raise FederationError(
            f"{type(policy).__name__} learns from reports of single clients, which {name} must not"
            " reveal: use another policy, or let it learn from the validation loss"
        )
    layout = federation.layout
    has_buffers = layout is not None and layout.has_buffers
    if has_buffers and federation.buffers != "server":
        raise FederationError(
            f"{name} does not protect buffers that clients change (BatchNorm running statistics,"
            " counters): set buffers='server' to keep the global buffers, or use a network without"
            " buffers"
        )
    if federation.trainer is not None:
        _check_training(name, federation.trainer)


def _check_training(name: str, trainer: Trainer) -> None:
    """Raise an error if local training would pass data from one client to another."""
    is_manual = not trainer.lightning_module.automatic_optimization
    if any(is_manual or config.interval == "step" for config in trainer.lr_scheduler_configs):
        raise FederationError(
            f"{name} is incompatible with a scheduler that counts local steps: it continues from"
            " the client with the most steps, so one client's size would set the learning rate of"
            ' all. Let Lightning step it, with interval="epoch", which counts rounds'
        )


def check_monitors(name: str, federation: Federation, of_clients: Collection[str]) -> None:
    """Raise an error if a callback, scheduler or policy monitors client metrics without noise.

    The check runs after a round has logged its metrics and before they are used, because the hook
    that logs a metric is not known earlier.

    Args:
        name: Class name of the rule.
        federation: Description of the run, in a fit, at the end of a round.
        of_clients: Names of additional client metrics.

    Raises:
        FederationError: If a callback, a scheduler or the policy monitors such a metric.
    """
    trainer = federation.trainer
    results: Any = trainer.fit_loop.epoch_loop._results
    logged = [metric.meta.name for metric in results.values()]
    unsafe = {name + suffix for name in logged for suffix in ("", "_step", "_epoch")}
    policies = reversed([*federation.policy.modules()])  # from the inside
    learning = [p for p in policies if isinstance(p, HyperparameterPolicy) and p.learns]
    deciding = [c for c in trainer.callbacks if isinstance(c, EarlyStopping | Checkpoint)]
    plateaus = [c for c in trainer.lr_scheduler_configs if c.reduce_on_plateau]
    monitors = [(part, getattr(part, "monitor", None)) for part in (*deciding, *learning)]
    for part, monitor in [*monitors, *((c.scheduler, c.monitor) for c in plateaus)]:
        if monitor in unsafe or monitor in of_clients:
            raise FederationError(
                f"{type(part).__name__} monitors {monitor!r}, which clients report without noise:"
                f" {name} does not protect it. Monitor a validation metric"
            )
