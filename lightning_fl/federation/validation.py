"""Validation with several processes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torchmetrics import Metric

from lightning_fl.federation.processes import Processes
from lightning_fl.policies import HyperparameterPolicy


class Validation:
    """Let each process validate on all samples if validation results influence the run.

    Each process then uses the same batches as a single process, without reductions. Otherwise
    rounding would depend on the number of processes, and so would the run.

    Args:
        trainer: The Trainer of the fit.
        data: The data module.
        policy: The hyperparameter policy.
        processes: The processes of the fit.
    """

    def __init__(
        self, trainer: Trainer, data: Any, policy: HyperparameterPolicy, processes: Processes
    ) -> None:
        acts = policy.learns or bool(policy.learns_from)
        acts |= any(isinstance(c, EarlyStopping) for c in trainer.callbacks)  # type: ignore[attr-defined]
        acts |= any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
        self._data, self._processes = data, processes
        #: Whether each process validates on all samples.
        self.is_repeated = acts and trainer.world_size > 1
        #: Restores the synchronization of metrics after a repeated validation.
        self._alone = ExitStack()
        data.shares_validation = not self.is_repeated
        processes.repeat_validation(self.is_repeated)

    def begin(self, module: nn.Module) -> None:
        """Disable the synchronization of the metrics of a module if validation is repeated."""
        if self.is_repeated:
            for metric in (m for m in module.modules() if isinstance(m, Metric)):
                self._alone.callback(
                    setattr, metric, "distributed_available_fn", metric.distributed_available_fn
                )
                metric.distributed_available_fn = lambda: False

    def end(self) -> None:
        """Enable the synchronization of metrics again."""
        self._alone.close()

    def close(self) -> None:
        """Let processes split the validation samples again, at the end of a fit."""
        self.end()
        self._data.shares_validation = True
