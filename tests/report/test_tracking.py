"""Trackers get hyperparameters, one row per round, and the files of a run; without a network."""

import csv
import json
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_fl.callbacks import FederatedLoop, RunReport
from lightning_fl.policies import Schedule
from lightning_fl.report import LogFiles, tracking
from lightning_fl.types import FederationError
from tutorial import Net, trainer
from two_classes import samples

ROUNDS = 3


def fit(folder, logger, *callbacks, module=None):
    loop = FederatedLoop(policy=Schedule(lr=0.2, num_steps=2), seed=1)
    callbacks = callbacks or (RunReport(), LogFiles())
    made = trainer(folder, loop, *callbacks, rounds=ROUNDS, logger=logger, log_every_n_steps=1)
    made.fit((module or Net()).double(), datamodule=samples(3))
    return made


def table(made):
    """Return the rows that a CSVLogger has written."""
    text = Path(made.logger.log_dir, "metrics.csv").read_text()
    return list(csv.DictReader(text.splitlines()))


def test_the_step_of_a_row_is_the_round(tmp_path):
    made = fit(tmp_path, CSVLogger(tmp_path, name="csv"))
    rows = table(made)
    assert [float(row["step"]) for row in rows] == [1, 2, 3]
    assert [float(row["round"]) for row in rows] == [1, 2, 3]
    assert [float(row["epoch"]) for row in rows] == [0, 1, 2]
    assert "step" not in made.logged_metrics
    assert not (tmp_path / "report.html").exists()  # other loggers get no files


class WithStep(Net):
    """A module that logs a step of its own, which Lightning takes."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("step", 100.0 + self.current_epoch)


def test_the_step_that_a_module_logs_takes_precedence(tmp_path):
    made = fit(tmp_path, CSVLogger(tmp_path, name="csv"), module=WithStep())
    assert [float(row["step"]) for row in table(made)] == [100, 101, 102]


def test_tensorboard_gets_rounds_hyperparameters_and_pictures(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fit(tmp_path, TensorBoardLogger(tmp_path, name="", version=""))
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in found.Scalars("val_acc")] == [1, 2, 3]
    assert {"partition", "rounds"} <= set(found.Tags()["images"])
    assert "aggregator: FedAvg" in (tmp_path / "hparams.yaml").read_text()
    assert not (tmp_path / "report.html").exists()  # nobody would keep it


@pytest.mark.filterwarnings("ignore")  # MLflow's own, of its database
def test_mlflow_gets_rounds_hyperparameters_and_files(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason='needs pip install ".[tracking]"')
    pytest.importorskip("sqlalchemy")
    from lightning.pytorch.loggers import MLFlowLogger

    logger = MLFlowLogger(
        "federation",
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
        artifact_location=str(tmp_path / "artifacts"),
    )
    fit(tmp_path, logger)
    client = mlflow.tracking.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.get_run(logger.run_id)
    assert run.data.params["aggregator"] == "FedAvg"
    assert run.data.params["policy/lr"] == "0.2"
    assert [each.step for each in client.get_metric_history(logger.run_id, "val_acc")] == [1, 2, 3]
    files = {each.path for each in client.list_artifacts(logger.run_id)}
    assert {"report.html", "partition.png", "rounds.csv", "participation.csv"} <= files


def test_weights_and_biases_gets_rounds_hyperparameters_and_files(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason='needs pip install ".[tracking]"')
    from lightning.pytorch.loggers import WandbLogger

    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(project="federation", offline=True, save_dir=tmp_path)
    given, rows = [], []
    run = logger.experiment
    keep, log = run.log_artifact, run.log
    monkeypatch.setattr(
        run, "log_artifact", lambda path, **o: (given.append((path, o)), keep(path, **o))[1]
    )
    monkeypatch.setattr(run, "log", lambda row, **o: (rows.append(row), log(row, **o))[1])
    fit(tmp_path, logger)
    assert run.config["aggregator"] == "FedAvg"
    assert [r["trainer/global_step"] for r in rows if "val_acc" in r] == [1, 2, 3]
    names = {Path(path).name for path, _ in given}
    assert {"report.html", "partition.png", "rounds.csv"} <= names
    assert {options["type"] for _, options in given} == {"federation"}
    assert any("partition" in row for row in rows)  # a picture, too
    wandb.finish()
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


class Failing(Net):
    """A module that fails in the second round."""

    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


def test_an_interrupted_run_gives_what_there_is(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with pytest.raises(SystemExit):
        fit(tmp_path, TensorBoardLogger(tmp_path, name="", version=""), module=Failing())
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert "rounds" in found.Tags()["images"]
    assert json.loads((tmp_path / "environment.json").read_text())["state"] == "KeyboardInterrupt"


def test_a_tracker_that_takes_no_files_does_not_fail_the_run(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    logger = TensorBoardLogger(tmp_path, name="", version="")
    monkeypatch.setattr(type(logger.experiment), "add_image", lambda *a, **o: 1 / 0)
    with pytest.warns(UserWarning, match="did not accept .*png: division by zero"):
        made = fit(tmp_path, logger)
    assert made.current_epoch == ROUNDS


class FailingAtOnce(Net):
    """A module that fails at its first batch."""

    def training_step(self, batch, batch_idx):
        raise ValueError("at once")


def test_files_of_an_earlier_fit_are_not_logged(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(tracking, "_log_one", lambda logger, file: given.append(file.name))
    fit(tmp_path, False)
    for name in ("report.html", "config.yaml"):
        (tmp_path / name).write_text("of an earlier fit")
    with pytest.raises(ValueError, match="at once"):
        fit(tmp_path, DummyLogger(), module=FailingAtOnce())
    assert (tmp_path / "rounds.csv").exists()  # as it was
    assert set(given) == {"partition.png", "partition.json", "environment.json"}


@pytest.mark.parametrize("callbacks", [[LogFiles()], [LogFiles(), RunReport()]])
def test_a_report_must_come_first(tmp_path, callbacks):
    with pytest.raises(FederationError, match="LogFiles requires a RunReport before it"):
        fit(tmp_path, False, *callbacks)
