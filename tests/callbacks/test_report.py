"""Pictures of a run: which files, when, and what is in them."""

import os

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fl import ClientModule
from lightning_fl.callbacks import FederatedLoop, RunReport
from lightning_fl.callbacks.report import round_figure
from lightning_fl.partition import Manifest
from lightning_fl.types import FederationError

PNG = b"\x89PNG\r\n"


@pytest.fixture
def run(trainer, data):
    """Fit a classifier of blobs with a report."""

    def fit(rounds=2, callbacks=(), loop=None, datamodule=None, **options):
        loop = FederatedLoop() if loop is None else loop
        datamodule = data() if datamodule is None else datamodule
        module = ClientModule(nn.Linear(6, 3)).double()
        runner = trainer(loop, rounds, callbacks=[RunReport(), *callbacks], **options)
        runner.fit(module, datamodule=datamodule)
        return datamodule

    return fit


def names(folder):
    return sorted(path.name for path in folder.iterdir())


ALL = ["partition.json", "partition.png", "rounds.csv", "rounds.png"]


@pytest.mark.parametrize("num_clients", [3, 30])
def test_a_run_leaves_these_files_however_many_clients(run, data, tmp_path, num_clients):
    run(datamodule=data(num_clients=num_clients))
    assert names(tmp_path) == ALL
    for name in ("partition.png", "rounds.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_the_manifest_is_that_of_the_split(run, tmp_path):
    federated = run()
    assert Manifest.read(tmp_path / "partition.json") == federated.manifest()


class Count(Callback):
    """How often each file was written, by the end of the fit."""

    def __init__(self, monkeypatch):
        self.written = []
        replace = os.replace
        monkeypatch.setattr(os, "replace", lambda a, b: (self.note(b), replace(a, b)))
        from matplotlib.figure import Figure

        save = Figure.savefig
        monkeypatch.setattr(
            Figure, "savefig", lambda fig, path, **k: (self.note(path), save(fig, path, **k))[1]
        )

    def note(self, path):
        self.written.append(os.path.basename(path))


def test_each_picture_is_drawn_once_a_run(run, monkeypatch):
    count = Count(monkeypatch)
    run(rounds=4)
    pictures = [name for name in count.written if name != "rounds.csv"]
    assert pictures == ["partition.json", "partition.png", "rounds.png"]


class Break(Callback):
    """Ends the run in its third round."""

    def __init__(self, error):
        self.error = error

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 2:
            raise self.error


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_interrupted_run_is_drawn_as_far_as_it_went(run, tmp_path, error, monkeypatch):
    drawn = []
    import lightning_fl.callbacks.report as report

    def watched(rows):
        drawn.extend(row["round"] for row in rows)
        return round_figure(rows)

    monkeypatch.setattr(report, "round_figure", watched)
    with pytest.raises((error, SystemExit)):
        run(rounds=5, callbacks=[Break(error)])
    assert names(tmp_path) == ALL
    assert drawn == [1, 2]


def test_a_run_that_breaks_before_its_first_round_ended_has_no_rounds_to_draw(run, tmp_path):
    class AtOnce(Callback):
        def on_train_batch_end(self, *args):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(callbacks=[AtOnce()])
    assert names(tmp_path) == ["partition.json", "partition.png"]


@pytest.mark.parametrize("why", ["table", "fast_dev_run"])
def test_where_no_table_is_written_there_is_no_report(run, tmp_path, why):
    if why == "table":
        run(loop=FederatedLoop(table=None))
    else:
        run(fast_dev_run=True)
    assert names(tmp_path) == []


@pytest.mark.parametrize("labels", ["real", "several"])
def test_data_without_classes_are_split_without_a_picture(fit, linear, data, tmp_path, labels):
    x = torch.rand(40, 3, dtype=torch.float64)
    y = x.sum(1) if labels == "real" else torch.stack([x.sum(1), x[:, 0]], 1)
    train = TensorDataset(x, y)
    module = linear()
    if labels == "several":
        module.training_step = lambda batch, batch_idx: (
            (module.net(batch[0]) - batch[1]).square().mean()
        )
        module.validation_step = lambda batch, batch_idx: None
    fit(module, datamodule=data(train, val=train), rounds=1, callbacks=[RunReport()])
    assert names(tmp_path) == ["partition.json", "rounds.csv", "rounds.png"]


def test_a_figure_shows_every_accuracy_and_loss_where_it_is_known():
    rows = [
        {"round": 1, "lr": 0.1, "train_loss": 2.0},
        {"round": 2, "lr": 0.1, "train_loss": 1.0, "val_loss": 1.5, "val_acc": 0.5},
        {"round": 4, "lr": 0.1, "train_loss": 0.5, "val_loss": 0.75, "val_acc": 0.75},
    ]
    accuracy, loss = round_figure(rows).axes
    assert (accuracy.get_ylabel(), loss.get_ylabel()) == ("accuracy", "loss")
    assert accuracy.get_xlabel() == loss.get_xlabel() == "round"
    found = {
        line.get_label(): line.get_xydata().tolist()
        for axes in (accuracy, loss)
        for line in axes.lines
    }
    assert found == {
        "val_acc": [[2, 0.5], [4, 0.75]],
        "train_loss": [[1, 2], [2, 1], [4, 0.5]],
        "val_loss": [[2, 1.5], [4, 0.75]],
    }


def test_a_figure_of_a_module_that_logs_nothing_shows_the_rate():
    (axes,) = round_figure([{"round": 1, "lr": 0.5}, {"round": 2, "lr": 0.25}]).axes
    assert axes.get_ylabel() == "lr"
    assert axes.lines[0].get_xydata().tolist() == [[1, 0.5], [2, 0.25]]


def test_points_are_marked_while_there_are_few():
    for count, marker in ((39, "."), (40, "")):
        rows = [{"round": i, "loss": 1.0} for i in range(count)]
        assert round_figure(rows).axes[0].lines[0].get_marker() == marker


def test_without_a_federation_there_is_nothing_to_report(trainer, data):
    module = ClientModule(nn.Linear(6, 3)).double()
    with pytest.raises(FederationError, match="RunReport reports rounds: add a FederatedLoop"):
        trainer(False, callbacks=[RunReport()]).fit(module, datamodule=data())
