"""Files of a run in experiment trackers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fl.callbacks.client_history import HISTORY
from lightning_fl.callbacks.config import RunConfig
from lightning_fl.callbacks.federated_loop import loop_of
from lightning_fl.callbacks.report import RunReport, run_folder
from lightning_fl.errors import FederationError
from lightning_fl.federation.table import TABLE
from lightning_fl.report.write import report

#: Files that are written at the start of a fit, and those that exist after its first round.
STARTED = ("partition.json", "environment.json")
FINISHED = ("rounds.png", "participation.csv", HISTORY, TABLE)


class LogFiles(Callback):
    """Log the files of a run to the loggers of the Trainer.

    The picture of the partition is logged at the start of a fit; the report, the other pictures and
    the tables at its end, also after an interruption.

    - Weights & Biases keeps them as artifacts of the type ``federation``, and shows the pictures.
    - MLflow keeps them as artifacts of the run.
    - TensorBoard shows the pictures; ``lightning-fl report`` writes the report.

    Files that an earlier fit has left in the folder are not logged. The callback comes after
    :class:`~lightning_fl.callbacks.RunReport`, which writes the files. The command line adds both.

    Raises:
        FederationError: At the start of a fit, if there is no ``RunReport`` before this callback.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the files are written before they are logged."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        before = callbacks[: callbacks.index(self)]
        if stage == "fit" and not any(isinstance(callback, RunReport) for callback in before):
            raise FederationError(
                "LogFiles requires a RunReport before it, which writes the files: use"
                " Trainer(callbacks=[FederatedLoop(...), RunReport(), LogFiles()])"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the picture of the partition."""
        folder = run_folder(trainer)  # on all processes: the first one broadcasts it
        self._folder = folder if trainer.is_global_zero else None
        self._log(trainer, "partition.png")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the report, and log it and the other files."""
        if self._folder is None:
            return
        has_config = any(isinstance(each, RunConfig) for each in trainer.callbacks)  # type: ignore[attr-defined]
        names = [*STARTED, *["config.yaml"] * has_config]
        if loop_of(trainer, "LogFiles").rows:
            names += FINISHED
            if any(isinstance(each, WandbLogger | MLFlowLogger) for each in trainer.loggers):
                names.append(report(self._folder).name)
        self._log(trainer, *names)
        self._folder = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Log the files so far."""
        self.on_fit_end(trainer, pl_module)

    def _log(self, trainer: Trainer, *names: str) -> None:
        if self._folder is None:
            return
        for logger in trainer.loggers:
            for file in filter(Path.is_file, (self._folder / name for name in names)):
                try:
                    _log_one(logger, file)
                except Exception as error:  # of a tracker or its network: must not fail the run
                    rank_zero_warn(f"{type(logger).__name__} did not accept {file}: {error}")


def _log_one(logger: Any, file: Path) -> None:
    match logger:
        case WandbLogger():
            name = f"{file.stem}-{logger.experiment.id}"
            logger.experiment.log_artifact(str(file), name=name, type="federation")
            if file.suffix == ".png":
                logger.log_image(file.stem, [str(file)])
        case MLFlowLogger():
            logger.experiment.log_artifact(logger.run_id, str(file))
        case TensorBoardLogger() if file.suffix == ".png":
            from matplotlib.image import imread  # it has drawn the picture

            logger.experiment.add_image(file.stem, imread(file), dataformats="HWC")
