"""What loggers are told of a federation: its hyperparameters, and one row of figures a round."""

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
    """Return the class of a rule and its options as flat values; nothing if there is no rule.

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
    """Return what describes a run, as flat values for loggers.

    A name that the module's or the data module's own hyperparameters have gets the prefix
    ``federation/``: some loggers refuse to change a value.

    Args:
        fit: The fit.
        options: The loop's own options by name.
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
    """Give the hyperparameters of a run to each logger.

    Args:
        trainer: The Trainer, at the start of a fit.
        values: Flat values by name.
        resumed: A logger that goes on with the record of a resumed run may have other values
            already, which not every logger can change: then they are kept, with a warning.
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
            rank_zero_warn(f"{type(logger).__name__} keeps its hyperparameters: {error}")
        if isinstance(logger, TensorBoardLogger) and not resumed:
            # It writes this file once, before the fit has started.
            save_hparams_to_yaml(Path(logger.log_dir, logger.NAME_HPARAMS_FILE), logger.hparams)


class RoundLog:
    """Send what Lightning logs at the end of a round to the loggers as one row.

    Lightning logs validation, training epochs and callbacks one after another, which are several
    rows of a CSV file. This takes the place of its method, holds the validation metrics of a round
    back, and adds the number of the round and the federation's figures to the last call. Metrics of
    single steps pass.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._held: dict[str, Any] = {}
        self._figures: dict[str, float] | None = None

    def end_round(self, figures: Mapping[str, float]) -> None:
        """Note the figures of a round, for the row that Lightning is about to log.

        Args:
            figures: The number of the round and its figures; empty for a round that was cut short.
        """
        self._figures = dict(figures)

    def receive(self, log: Method) -> Method:
        """Return what takes the place of Lightning's method.

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
