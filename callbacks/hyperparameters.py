"""Logging of the hyperparameters of a run and of one row of metrics per round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lightning_fl.federation.round import Fit
from lightning_fl.hooks import Method
from lightning_fl.types import plain_options


def named(name: str, rule: object) -> dict[str, Any]:
    """Return the class name and options of a rule as flat values; empty if the rule is None.

    Example:
        >>> from lightning_fl.partition import Dirichlet
        >>> named("partition", Dirichlet(alpha=0.5))
        {'partition': 'Dirichlet', 'partition/alpha': 0.5, 'partition/min_size': 1}
    """
    if rule is None:
        return {}
    options = {f"{name}/{option}": value for option, value in plain_options(rule).items()}
    return {name: type(rule).__name__, **options}


def describe_run(fit: Fit, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a run as flat values for loggers.

    Names that also occur in the hyperparameters of the module or the data module get the prefix
    ``federation/``, because some loggers do not allow values to change.

    Args:
        fit: Context of the rounds.
        options: Options of the :class:`FederatedLoop` by name.
    """
    data, user, policy = fit.data, fit.runner.module, named("policy", fit.policy)
    lr, max_epochs = policy.get("policy/lr"), fit.trainer.max_epochs or -1
    values = {
        "seed": fit.federation.seed,
        "rounds": max_epochs if max_epochs > 0 else None,
        "num_clients": fit.federation.num_clients,
        "batch_size": getattr(data, "batch_size", None),
        "lr": fit.runner.base_lr if lr is None else lr,
        "module": type(user).__name__,
        "network": type(user.net).__name__ if hasattr(user, "net") else None,
        **named("partition", getattr(data, "partition", None)),
        **named("aggregator", fit.aggregator),
        **policy,
        **options,
    }
    taken = {*user.hparams, *data.hparams}
    return {f"federation/{k}" if k in taken else k: value for k, value in values.items()}


@rank_zero_only
def log_hyperparameters(trainer: Trainer, values: Mapping[str, Any], resumed: bool) -> None:
    """Log the hyperparameters of a run to each logger.

    Args:
        trainer: The Trainer, at the start of a fit.
        values: Flat values by name.
        resumed: Whether the run is resumed. If a logger then cannot change values that it logged
            before, they are kept with a warning.
    """
    flat = {
        name: value if isinstance(value, int | float | str | None) else str(value)
        for name, value in values.items()
    }
    for logger in trainer.loggers:
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
    the round. Metrics of single steps are logged unchanged.

    Args:
        trainer: The Trainer of the fit.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._held: dict[str, Any] = {}
        self._figures: dict[str, float] | None = None

    def end_round(self, figures: Mapping[str, float]) -> None:
        """Set the metrics to add to the next row that Lightning logs.

        Args:
            figures: Number of the round and its metrics; empty for an interrupted round.
        """
        self._figures = dict(figures)

    def receive(self, log: Method) -> Method:
        """Return the replacement of Lightning's ``log_metrics``.

        Args:
            log: Lightning's method.
        """

        def log_once(metrics: dict[str, Any], step: int | None = None) -> None:
            if self._trainer.validating:
                self._held |= metrics
            elif self._figures is not None:
                row = {**self._figures, **self._held, **metrics}
                self._figures, self._held = None, {}
                log(row, step)
            else:
                log(metrics, step)

        return log_once
