"""Logging of the hyperparameters of a run and of one row of metrics per round."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lightning_fl.federation.fit import Fit
from lightning_fl.hooks import Method, replaced
from lightning_fl.options import describe, plain_options


def named(name: str, rule: object) -> dict[str, Any]:
    """Return the class name and options of a rule as flat values; empty if the rule is None.

    Example:
        >>> from lightning_fl.partition import ByLabel
        >>> named("partition", ByLabel(2))
        {'partition': 'ByLabel', 'partition/classes_per_client': 2}
    """
    if rule is None:
        return {}
    options = {f"{name}/{option}": value for option, value in plain_options(rule).items()}
    return {name: type(rule).__name__, **options}


def describe_run(fit: Fit) -> dict[str, Any]:
    """Return the hyperparameters of a run as flat values for loggers.

    Names that also occur in the hyperparameters of the module or the data module get the prefix
    ``federation/``, because some loggers do not allow values to change.

    Args:
        fit: Objects of the fit.
    """
    data: Any = fit.data
    user, options, policy = fit.runner.module, fit.options, named("policy", fit.policy)
    lr, max_epochs = policy.get("policy/lr"), fit.trainer.max_epochs or -1
    values = {
        "seed": fit.progress.seed,
        "rounds": max_epochs if max_epochs > 0 else None,
        "num_clients": fit.federation.num_clients,
        "batch_size": data.batch_size,
        "lr": fit.runner.base_lr if lr is None else lr,
        "module": type(user).__name__,
        "network": network_name(user),
        **named("partition", data.partition),
        **named("aggregator", fit.aggregator),
        **policy,
        **named("sampler", options.sampler),
        "update_transforms": ", ".join(map(describe, options.update_transforms)),
        **options.plain,
    }
    taken = {*user.hparams, *data.hparams}
    return {f"federation/{k}" if k in taken else k: value for k, value in values.items()}


def network_name(module: LightningModule) -> str | None:
    """Return the class name of the network ``module.net``; None if the module has none."""
    net = dict(module.named_children()).get("net")
    return None if net is None else type(net).__name__


@rank_zero_only
def log_hyperparameters(fit: Fit) -> None:
    """Log the hyperparameters of a run to each logger.

    If the run is resumed and a logger cannot change values that it logged before, they are kept
    with a warning.

    Args:
        fit: Objects of the fit.
    """
    resumed = fit.trainer.ckpt_path is not None
    flat = {
        name: value if isinstance(value, int | float | str | None) else str(value)
        for name, value in describe_run(fit).items()
    }
    for logger in fit.trainer.loggers:
        try:
            logger.log_hyperparams(flat)
        except Exception as error:
            if not resumed:
                raise
            rank_zero_warn(f"{type(logger).__name__} keeps its previous hyperparameters: {error}")
        if isinstance(logger, TensorBoardLogger) and not resumed:
            # TensorBoardLogger writes this file once, before the fit starts.
            save_hparams_to_yaml(Path(logger.log_dir, logger.NAME_HPARAMS_FILE), logger.hparams)


class RoundLog:
    """Log all metrics of a round as one row.

    Lightning logs the metrics of validation, training epochs and callbacks separately, which makes
    several rows in a CSV file. This class wraps Lightning's method, holds back the validation
    metrics of a round, and adds them to the last call together with the index and the metrics of
    the round. The step of the row, the x-axis of loggers, is the round. Metrics of single steps are
    logged unchanged.

    Args:
        trainer: The Trainer of the fit.
        undo: Clean-up functions of the fit, to which that of the method is added.
    """

    def __init__(self, trainer: Trainer, undo: ExitStack) -> None:
        self._trainer: Any = trainer
        self._held: dict[str, Any] = {}
        self._figures: dict[str, float] | None = None
        undo.enter_context(replaced(trainer._logger_connector, "log_metrics", self._receive))

    def end_round(self, round: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a round with the next row of Lightning.

        ``LightningModule.log_dict`` would take 20 times as long.

        Args:
            round: Number of the round, from 1.
            metrics: Metrics of the round by name.
        """
        own = {f"federation/{name}": float(value) for name, value in metrics.items()}
        self._trainer.callback_metrics.update({k: torch.tensor(v) for k, v in own.items()})
        self._figures = {"round": round, **own}

    def _receive(self, log: Method) -> Method:
        """Return the replacement of Lightning's ``log_metrics``."""

        def log_once(metrics: dict[str, Any], step: int | None = None) -> None:
            if self._trainer.validating:
                self._held |= metrics
            elif self._figures is not None:
                row = {**self._figures, **self._held, **metrics}
                if "step" not in row:  # not the module's own step
                    row.setdefault("epoch", self._trainer.current_epoch)
                    step = int(self._figures["round"])
                self._figures, self._held = None, {}
                log(row, step)
            else:
                log(metrics, step)

        return log_once
