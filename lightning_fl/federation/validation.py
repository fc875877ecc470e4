"""Validation of the global model in a fit."""

from __future__ import annotations

from contextlib import ExitStack

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torchmetrics import Metric

from lightning_fl.contracts.data import FederatedData
from lightning_fl.errors import FederationError
from lightning_fl.federation.processes import Processes
from lightning_fl.federation.run_options import RunOptions
from lightning_fl.federation.table import RoundTable


class Validation:
    """Validation of the global model. Its loss may influence the run.

    If validation results influence the run, each process validates on all samples. Each process
    then uses the same batches as a single process, without reductions. Otherwise rounding would
    depend on the number of processes, and so would the run.

    Args:
        trainer: The Trainer of the fit.
        data: The data module.
        options: Options of the run.
        processes: The processes of the fit.
    """

    def __init__(
        self, trainer: Trainer, data: FederatedData, options: RunOptions, processes: Processes
    ) -> None:
        self._trainer, self._policy = trainer, options.policy
        learns = "val_loss" in self._policy.learns_from
        self._monitor = self._policy.monitor if learns else "val_loss"
        acts = options.policy.learns or bool(options.policy.learns_from)
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

    def loss(self, table: RoundTable) -> float | None:
        """Return the validation loss, the same on all processes; None if it was not logged.

        Args:
            table: The table of rounds, which knows the metrics of earlier rounds.

        Raises:
            FederationError: If the policy learns from the validation loss, but there is none.
        """
        metrics = self._trainer.callback_metrics
        is_fresh = table.is_fresh(self._monitor, metrics)
        val_loss: float | None = float(metrics[self._monitor]) if is_fresh else None
        # The module may not have synchronized it, but policies must agree on all processes.
        val_loss = self._trainer.strategy.broadcast(val_loss)
        if val_loss is None and "val_loss" in self._policy.learns_from:
            raise FederationError(
                f"{type(self._policy).__name__} learns from {self._monitor!r}, which validation"
                f" does not log (logged: {sorted(metrics)}): set its monitor, or provide validation"
                " samples (data.init_args.val_size, trainer.limit_val_batches)"
            )
        return val_loss

    def close(self) -> None:
        """Let processes split the validation samples again, at the end of a fit."""
        self.end()
        self._data.shares_validation = True


def leave_interrupted(trainer: Trainer) -> None:
    """Undo what an interrupted epoch or validation of a fit leaves in the module.

    Otherwise, a later fit of the module would add to the values that its metrics have accumulated,
    and train it in the mode of evaluation.

    Args:
        trainer: The Trainer.
    """
    loop, stage = trainer.fit_loop.epoch_loop, trainer.state.stage
    for results in (loop._results, loop.val_loop._results):
        results.reset()
    if trainer.state.fn == TrainerFn.FITTING and stage is not None and stage.evaluating:
        loop.val_loop._on_evaluation_model_train()
