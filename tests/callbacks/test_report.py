"""Pictures of a run: which files, when, and what is in them."""

import csv
import gzip
import json
import math
import os
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import TensorDataset

from keeping import keep
from lightning_fl import ClientModule
from lightning_fl.aggregators import PFNM, ClusteredFL, FedAvg, Gossip
from lightning_fl.callbacks import (
    FederatedLoop,
    LabelFlip,
    PersonalizedEvaluation,
    RoundProgress,
    RunReport,
)
from lightning_fl.callbacks.report import round_figure
from lightning_fl.objectives import FedEM, Proximal, RepresentationMatching
from lightning_fl.policies import Schedule, Stragglers
from lightning_fl.report import read_run
from lightning_fl.types import FederationError

PNG = b"\x89PNG\r\n"
pytestmark = pytest.mark.usefixtures("quick_pictures")


def environment(folder):
    return json.loads((folder / "environment.json").read_text())


def clients(folder):
    return list(csv.DictReader((folder / "participation.csv").read_text().splitlines()))


def history(folder):
    text = gzip.decompress((folder / BY_ROUND).read_bytes()).decode()
    return list(csv.DictReader(text.splitlines()))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


AT_START = ["environment.json", "partition.json", "partition.png"]
BY_ROUND = "client_losses.csv.gz"
ALL = sorted([*AT_START, "participation.csv", BY_ROUND, "rounds.csv", "rounds.png"])


@pytest.mark.parametrize("num_clients", [3, 30])
def test_a_run_leaves_these_files_however_many_clients(
    train, data, tmp_path, num_clients, pictures
):
    loop = FederatedLoop(optimizer_state="keep")
    train(RunReport(), loop=loop, datamodule=data(num_clients=num_clients))
    assert names(tmp_path) == ALL
    assert environment(tmp_path)["optimizer_state"] == "keep"
    for name in ("partition.png", "rounds.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)


class Break(Callback):
    """Ends the run in its third round."""

    def __init__(self, error):
        self.error = error

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 2:
            raise self.error


@pytest.mark.parametrize("error", [ZeroDivisionError("by\nzero"), KeyboardInterrupt()])
def test_an_interrupted_run_is_drawn_as_far_as_it_went(train, tmp_path, error, monkeypatch):
    drawn = []
    import lightning_fl.callbacks.report as report

    def watched(rows):
        drawn.extend(row["round"] for row in rows)
        return round_figure(rows)

    monkeypatch.setattr(report, "round_figure", watched)
    with pytest.raises((type(error), SystemExit)):
        train(RunReport(), Break(error), rounds=5)
    assert names(tmp_path) == ALL
    assert drawn == [1, 2]
    states = "ZeroDivisionError: by", "KeyboardInterrupt"
    assert environment(tmp_path)["state"] == states[isinstance(error, KeyboardInterrupt)]
    rows = clients(tmp_path)
    assert [row["rounds"] for row in rows] == ["2"] * 4
    assert "train_acc" not in rows[0]


class AtOnce(Callback):
    """Ends the run in its first round."""

    def on_train_batch_end(self, *args):
        raise ZeroDivisionError


def test_a_run_that_breaks_before_its_first_round_ended_has_no_rounds_to_draw(train, tmp_path):
    with pytest.raises(ZeroDivisionError):
        train(RunReport(), AtOnce())
    assert names(tmp_path) == AT_START


@pytest.mark.parametrize("why", ["table", "fast_dev_run"])
def test_where_no_table_is_written_there_is_no_report(train, tmp_path, why):
    loop = FederatedLoop()
    if why == "table":
        loop.table_name = None
    train(RunReport(), loop=loop, fast_dev_run=why == "fast_dev_run")
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
    (tmp_path / "partition.png").write_text("of an earlier partition")
    fit(module, datamodule=data(train, val=train), rounds=1, callbacks=[RunReport()])
    assert names(tmp_path) == [name for name in ALL if name != "partition.png"]
    assert environment(tmp_path)["no train_acc"].startswith("NotImplementedError: Module [Linear]")


@pytest.mark.parametrize(
    "callback", [RunReport(), RoundProgress(), LabelFlip()], ids=lambda each: type(each).__name__
)
def test_a_callback_without_a_federation_is_refused(trainer, data, callback):
    module = ClientModule(nn.Linear(6, 3)).double()
    words = f"{type(callback).__name__} requires a FederatedLoop"
    with pytest.raises(FederationError, match=words):
        trainer(False, callbacks=[callback], enable_progress_bar=True).fit(module, data())


# --- who took part --------------------------------------------------------------------------------


class Poison(Callback):
    """Client 2 sends what is not finite, whenever it takes part."""

    def on_client_updates(self, plan, clients, delta, dropped):
        delta[clients == 2] = torch.nan
        return delta


@pytest.mark.filterwarnings("ignore:.*dropped")
@pytest.mark.parametrize("policy", [None, Stragglers(0.5)])
def test_who_took_part_is_counted(train, tmp_path, policy):
    seen = []

    class Note(Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.extend(loop.plan_of_the_round.clients.tolist())

    loop = FederatedLoop(clients_per_round=3, policy=policy, seed=0)
    train(RunReport(), Poison(), Note(), rounds=5, loop=loop)
    rows = clients(tmp_path)
    assert [row["client"] for row in rows] == ["0", "1", "2", "3"]
    assert [int(row["rounds"]) for row in rows] == [seen.count(client) for client in range(4)]
    assert [int(row["dropped"]) for row in rows] == [0, 0, seen.count(2), 0]
    assert seen.count(2)
    assert len(seen) == sum(row["clients"] for row in loop.rows)
    table = history(tmp_path)
    assert list(table[0]) == ["round", "client", "outcome", "loss", "score"]
    for number, row in enumerate(loop.rows, 1):
        outcomes = {
            each["client"]: each["outcome"] for each in table if each["round"] == f"{number}"
        }
        assert len(outcomes) == row["clients"]
        dropped = [client for client, outcome in outcomes.items() if outcome == "non_finite"]
        assert " ".join(dropped) == row["dropped_clients"]
        assert set(outcomes.values()) <= {"arrived", "non_finite"}


class FirstLosses(Callback):
    """Computes the loss of the model that a client received on its first batch."""

    def __init__(self):
        self.by_round = []

    def on_train_epoch_start(self, trainer, module):
        self.by_round.append([])

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx % 2 == 0:
            x, y = batch
            self.by_round[-1].append(nn.functional.cross_entropy(module.net(x), y).item())


@pytest.mark.filterwarnings("ignore:.*dropped")
def test_the_loss_of_each_client_is_that_of_the_model_which_it_received(train, tmp_path):
    losses = FirstLosses()
    train(RunReport(), losses, Poison())
    table = history(tmp_path)
    assert [row["client"] for row in table] == ["0", "1", "2", "3"] * 2
    assert [row["loss"] for row in table] == [f"{v:g}" for each in losses.by_round for v in each]
    assert {row["score"] for row in table} == {""}


def test_scores_of_clients_are_in_the_rounds_that_evaluate_them(train, data, tmp_path):
    evaluation = PersonalizedEvaluation(every_n_rounds=2)
    loop = FederatedLoop(clients_per_round=2, seed=0)
    federated = data(local_test_size=0.5)
    train(evaluation, RunReport(), loop=loop, datamodule=federated, rounds=3)
    table = history(tmp_path)
    scores = {int(row["client"]): float(row["score"]) for row in table if row["round"] == "3"}
    assert scores == {
        row["client"]: pytest.approx(row["server"], abs=1e-6) for row in evaluation.rows
    }
    assert [row["outcome"] for row in table if row["round"] == "2"].count("not_sampled") == 2
    assert [row["score"] for row in table if row["round"] == "1"] == [""] * 2
    assert sum(int(row["rounds"]) for row in clients(tmp_path)) == 6


def interrupted(train, folder, rounds, *callbacks, **options):
    """Fit a module in ``folder``, with a checkpoint and a report."""
    folder.mkdir(exist_ok=True)
    options = {"default_root_dir": folder, **keep(folder, *callbacks), **options}
    loop = FederatedLoop(clients_per_round=2, seed=0)
    train(RunReport(), loop=loop, rounds=rounds, **options)


def test_a_resumed_run_counts_on(train, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    interrupted(train, whole, 6)
    with pytest.raises(ZeroDivisionError):
        interrupted(train, parts, 6, Break(ZeroDivisionError()))
    assert clients(parts) != clients(whole)
    interrupted(train, parts, 6, ckpt_path=parts / "last.ckpt")
    for name in ("participation.csv", BY_ROUND, "environment.json"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    saved = torch.load(parts / "last.ckpt", weights_only=True)["callbacks"]["RunReport"]
    assert len(saved["rounds"]) == 6


def test_a_finished_run_resumed_changes_nothing(train, tmp_path, pictures):
    def files():
        return {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.suffix != ".ckpt"}

    interrupted(train, tmp_path, 3)
    before = files()
    interrupted(train, tmp_path, 3, ckpt_path=tmp_path / "last.ckpt")
    assert files() == before


@pytest.mark.parametrize("missing", [["participation.csv", BY_ROUND], []])
def test_a_run_that_was_killed_before_its_last_file_is_finished_when_resumed(
    train, tmp_path, missing
):
    interrupted(train, tmp_path, 3)
    for name in missing:
        (tmp_path / name).unlink()
    started = environment(tmp_path) | {"state": "started"}
    (tmp_path / "environment.json").write_text(json.dumps(started))
    interrupted(train, tmp_path, 3, ckpt_path=tmp_path / "last.ckpt")
    assert sum(int(row["rounds"]) for row in clients(tmp_path)) == len(history(tmp_path)) == 6
    assert environment(tmp_path)["state"] == "finished"
    assert len(read_run(tmp_path).outcomes.rows) == 6


def test_tables_of_clients_of_an_earlier_fit_are_removed(train, tmp_path):
    train(RunReport())
    with pytest.raises(ZeroDivisionError):
        train(RunReport(), AtOnce())
    assert not {"participation.csv", BY_ROUND} & set(names(tmp_path))


def test_a_run_that_began_without_a_report_does_not_count_half(train, tmp_path):
    train(loop=FederatedLoop(clients_per_round=2, seed=0), **keep(tmp_path))
    interrupted(train, tmp_path, 4, ckpt_path=tmp_path / "last.ckpt")
    assert list(clients(tmp_path)[0]) == ["client", "train_samples", "train_acc"]
    assert not (tmp_path / BY_ROUND).exists()


# --- how well the server's model does for each client ---------------------------------------------


RANDOM = torch.Generator().manual_seed(0)
NOISE = TensorDataset(torch.randn(120, 6, generator=RANDOM).double(), torch.arange(120) // 40)


def right(vector, data, client, most=200):
    part = data.parts[client]
    x, y = data.train.fetch(part[:: math.ceil(len(part) / most)])
    return ((x @ vector[:18].view(3, 6).T + vector[18:]).argmax(1) == y).double().mean().item()


@pytest.mark.parametrize("group_size", [None, 2])
@pytest.mark.parametrize("most", [5, 200])
def test_the_servers_model_is_measured_on_training_samples(
    train, data, tmp_path, flat, most, group_size
):
    federated = data(NOISE, eval_batch_size=4)
    module, _, made = train(RunReport(most), datamodule=federated, group_size=group_size)
    found = [float(row["train_acc"]) for row in clients(tmp_path)]
    assert found == [right(flat(module), made, client, most) for client in range(4)]
    assert [int(row["train_samples"]) for row in clients(tmp_path)] == made.num_samples.tolist()


@pytest.mark.parametrize("is_first", [True, False])
def test_attackers_are_measured_on_the_original_samples(train, tmp_path, flat, is_first):
    """Wherever the callback of the attack is."""
    callbacks = [RunReport(), LabelFlip([0, 1])]
    module, _, made = train(*callbacks[:: 1 if is_first else -1])
    found = [float(row["train_acc"]) for row in clients(tmp_path)]
    assert found == [right(flat(module), made, client) for client in range(4)]


@pytest.mark.parametrize(
    "rule", [Gossip("ring"), ClusteredFL(eps1=9.0, eps2=0.0, warmup=1)], ids=["gossip", "clusters"]
)
def test_each_client_is_measured_with_the_model_that_it_would_start_from(
    train, data, tmp_path, flat, rule
):
    loop = FederatedLoop(aggregator=rule, policy=Schedule(lr=0.3, num_steps=3))
    module, _, made = train(RunReport(), loop=loop, datamodule=data(NOISE), rounds=3)
    models = rule.models_for(torch.arange(4))
    found = [float(row["train_acc"]) for row in clients(tmp_path)]
    assert found == [right(models[client], made, client) for client in range(4)]
    assert found != [right(flat(module), made, client) for client in range(4)]
    # What the module has is the server's again.
    torch.testing.assert_close(flat(module), models.mean(0))


def test_what_stays_with_clients_is_measured_with_them(train, tmp_path):
    module = FedEM(nn.Linear(6, 3), 2, lambda p: torch.optim.SGD(p, lr=0.1)).double()
    train(RunReport(), module=module, loop=FederatedLoop(policy=Schedule(num_steps=3)))
    assert len({row["train_acc"] for row in clients(tmp_path)} - {""}) >= 1
    # The logarithm of 0.5 was rounded to float32 when the module was made.
    torch.testing.assert_close(module.weights, torch.full((2,), 0.5).double(), atol=1e-8, rtol=0)


def test_a_network_that_is_replaced_is_measured_as_it_is(train, tmp_path):
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    module, loop = ClientModule(net).double(), FederatedLoop(aggregator=PFNM())
    _, _, made = train(RunReport(), module=module, loop=loop)
    for client, row in enumerate(clients(tmp_path)):
        x, y = made.train.fetch(made.parts[client])
        wanted = (module(x).argmax(1) == y).double().mean().item()
        assert float(row["train_acc"]) == wanted


class Noise(nn.Module):
    """Draws, also when it evaluates."""

    def forward(self, x):
        return x + 0.01 * torch.rand_like(x)


class Blind(PersonalizedEvaluation):
    def on_train_epoch_end(self, trainer, pl_module):
        pass


@pytest.mark.parametrize("group_size", [None, 2])
@pytest.mark.parametrize(
    ("callbacks", "rule"),
    [
        ([RunReport(), RunReport(0)], lambda: Gossip("ring")),
        ([PersonalizedEvaluation(every_n_rounds=1), Blind()], FedAvg),
    ],
    ids=["report", "evaluation"],
)
def test_the_run_is_as_if_nobody_had_looked(train, data, flat, callbacks, rule, group_size):
    """BatchNorm, dropout, terms, matching layers, kept momentum, models of each client."""

    class Draw(Callback):
        def on_train_end(self, trainer, module):
            self.drawn = torch.rand(3)

    def run(callback):
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2), Noise(), nn.Linear(5, 3)
        )
        sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        module = ClientModule(net, [Proximal(0.1), RepresentationMatching(0.1)], sgd).double()
        options = {"buffers": "average", "optimizer_state": "keep", "client_fraction": 0.5}
        loop, draw = FederatedLoop(rule(), seed=0, **options), Draw()
        options = {"datamodule": data(local_test_size=0.3), "group_size": group_size}
        train(callback, draw, rounds=4, loop=loop, module=module, **options)
        return flat(module), draw.drawn, loop.rows

    looked, alone = map(run, callbacks)
    assert torch.equal(looked[0], alone[0])
    assert torch.equal(looked[1], alone[1])
    for row, expected in zip(looked[2], alone[2], strict=True):
        assert {name: row[name] for name in expected} == expected
        added = row.keys() - expected.keys()
        assert ("personal/mean" in added) == bool(added) == (rule is FedAvg)


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("0", "client_samples=0"),
        ("personalized", "PersonalizedEvaluation uses test samples"),
        ("forward", "NotImplementedError"),
        ("loss", "the module does not return class scores"),
    ],
)
def test_where_nothing_can_be_measured_the_reason_is_noted(
    train, data, tmp_path, foreign, linear, why, words
):
    module, callbacks, federated = None, [RunReport(0 if why == "0" else 200)], data()
    if why == "personalized":
        callbacks, federated = [RunReport(), PersonalizedEvaluation()], data(local_test_size=0.2)
    elif why == "forward":
        module = foreign()  # a module without forward
    elif why == "loss":  # least squares: one output
        module = linear(features=6)
        module.forward = lambda x: module.net(x)
    loop = FederatedLoop(buffers="average")
    train(*callbacks, module=module, loop=loop, datamodule=federated, rounds=3)
    assert words in environment(tmp_path)["no train_acc"]
    assert "train_acc" not in clients(tmp_path)[0]


def test_what_the_run_ran_with_is_written_and_nothing_personal(trainer, data, tmp_path):
    """Groups of runs made in Python differ in it."""

    def margins(module, batch):
        return module(batch[0]).amax(1)

    optimizer = partial(torch.optim.Adam, lr=0.01)
    module = ClientModule(nn.Linear(6, 3), terms=[Proximal(mu=0.5)], optimizer=optimizer)
    callbacks = [RunReport(), PersonalizedEvaluation(metric=margins)]
    runner = trainer(FederatedLoop(clients_per_round=2, seed=5), 1, callbacks=callbacks)
    runner.fit(module.double(), datamodule=data(local_test_size=0.5))
    found = environment(tmp_path)
    wanted = {"state": "finished", "rounds": 1, "seed": 5, "clients": 4}
    wanted |= {"module": "ClientModule", "network": "Linear", "parameters": 21}
    wanted |= {"terms": ["Proximal(mu=0.5)"], "client_metric": "margins"}
    assert {name: found[name] for name in wanted} == wanted
    assert found["aggregator"] == "FedAvg(weighting='samples', normalization='round')"
    assert found["optimizer"].startswith("Adam(lr=0.01, betas=(0.9, 0.999)")
    assert found["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert found["machine"]["processes"] == 1
    text = (tmp_path / "environment.json").read_text()
    assert os.uname().nodename not in text
    assert str(tmp_path) not in text
