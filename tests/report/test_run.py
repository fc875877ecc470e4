"""What is read of a run's folder."""

import gzip
import json
import math

import pytest

from lightning_fl.report import find_runs, read_run
from lightning_fl.types import FederationError


def test_a_folder_is_read(folder):
    test = json.dumps({"metrics": {"test_acc": 0.5, "loss": None}, "checkpoint": None})
    run = read_run(folder(test__json=test))
    assert run.name == "digits/version_0"
    assert (run.rounds, run.planned, run.is_finished, run.seed) == (4, 4, True, 1)
    assert run.column("val_acc") == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 0.5)]
    assert run.config["data"] == "Digits"
    assert run.config["data.batch_size"] == 32
    assert run.sizes == [3, 2]
    assert run.partition.class_counts == [{0: 3}, {1: 2}]
    assert run.outcomes.names[5] == "non-finite values"
    assert run.outcomes.codes.tolist() == [[1, 1], [1, 1], [1, 5], [1, 1]]
    row = {"client": 1, "train_samples": 2, "rounds": 4, "dropped": 1, "train_acc": 0.5}
    assert run.participation[1] == row
    assert run.test["metrics"]["test_acc"] == 0.5
    assert math.isnan(run.test["metrics"]["loss"])  # JSON has null


def test_a_table_of_rounds_is_enough(folder):
    others = ("config__yaml", "environment__json", "partition__json", "participation__csv")
    others += ("client_losses__csv__gz",)
    run = read_run(folder(**dict.fromkeys(others)))
    assert run.rounds == 4
    assert run.planned is None
    assert run.is_finished
    assert run.seed is None
    assert run.sizes == []


def test_runs_are_found_by_their_folder_or_the_one_above(folder, tmp_path):
    runs = [folder(f"digits/version_{i}") for i in (0, 2, 10)]
    (tmp_path / "digits" / "version_3").mkdir()
    assert find_runs([tmp_path / "digits"]) == (runs, ["digits/version_3: no round is completed"])
    assert find_runs([runs[1], tmp_path / "digits", runs[1]])[0] == [runs[1], runs[0], runs[2]]


@pytest.mark.parametrize("name", ["nowhere", ""])
def test_a_folder_without_a_run_is_an_error(tmp_path, name):
    with pytest.raises(FederationError, match="has no completed round: pass the folder of a run"):
        find_runs([tmp_path / name])


@pytest.mark.parametrize(
    ("state", "rounds", "finished"),
    [
        ("finished", 60, True),  # it stopped early
        ("started", 60, False),
        ("KeyboardInterrupt", 60, False),
        ("started", 4, True),  # killed after its last round
    ],
)
def test_a_run_says_whether_it_is_finished(folder, state, rounds, finished):
    run = read_run(folder(environment={"state": state, "rounds": rounds}))
    assert run.is_finished is finished


def test_values_too_large_to_draw_and_missing_cells(folder):
    run = read_run(folder(rounds__csv="round,val_acc,lr\n1,0.5,inf\n2,,1e31\n3,nan,0.1\n"))
    assert run.column("val_acc")[0] == (1, 0.5)
    assert [at for at, _ in run.column("val_acc")] == [1, 3]
    assert [math.isnan(value) for _, value in run.column("lr")] == [True, True, False]


@pytest.mark.parametrize("text", ["", "round\n"])
def test_a_table_without_rounds_raises(folder, text):
    with pytest.raises(FederationError, match=r"rounds\.csv has no rounds"):
        read_run(folder(rounds__csv=text))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("rounds__csv", "round,a\n1,oops\n"),
        ("config__yaml", "!!python/object/apply:os.system ['false']"),
        ("environment__json", "{"),
        ("partition__json", '{"clients": 3}'),
        ("client_losses__csv__gz", b"text"),
    ],
)
def test_damaged_file_raises_and_is_named(folder, file, content):
    with pytest.raises(FederationError, match=f"{file.replace('__', '.')} cannot be read"):
        read_run(folder(**{file: content}))


@pytest.mark.parametrize("name", ["config.yaml", "participation.csv", "environment.json"])
def test_a_file_that_is_a_symbolic_link_is_not_followed(folder, tmp_path, name):
    path = folder()
    secret = tmp_path / "secret"
    (path / name).rename(secret)
    (path / name).symlink_to(secret)
    with pytest.raises(FederationError, match=f"{name} cannot be read: it is a symbolic link"):
        read_run(path)


def test_losses_and_scores_are_read(folder):
    table = b"round,client,outcome,loss,score\n1,0,arrived,2.5,\n1,1,low_battery,nan,0.5\n"
    table += b"2,0,not_sampled,,0.25\n"
    outcomes = read_run(folder(client_losses__csv__gz=gzip.compress(table))).outcomes
    assert outcomes.names[:2] == ["not sampled", "arrived"]
    assert outcomes.names[-1] == "low battery"
    assert outcomes.codes.tolist() == [[1, 6], [0, 0]]
    losses, scores = (
        {c: v.tolist() for c, v in outcomes.curves(kind).items()} for kind in ("loss", "score")
    )
    assert losses == {0: [[1, 2.5]], 1: [[1, math.inf]]}
    assert scores == {0: [[2, 0.25]], 1: [[1, 0.5]]}


def test_other_callbacks_of_a_resumed_fit_are_told(folder, config):
    faults = {"class_path": "lightning_fl.callbacks.ClientFaults", "init_args": {"dropout": 0.2}}
    later = config(trainer__callbacks=[faults], trainer__max_epochs=9)
    told = "trainer.callbacks.0=ClientFaults, trainer.callbacks.0.dropout=0.2"
    run = read_run(folder(config_resumed_1__yaml=later))
    assert run.resumed == [f"resumed with {told} (config_resumed_1.yaml)"]


@pytest.mark.parametrize(
    ("environment", "left_out"),
    [
        ({"client_metric": None}, ["clients"]),
        ({"state": "started", "client_metric": "f1"}, []),
        ({"state": "finished"}, []),
    ],
)
def test_files_of_an_earlier_fit_are_left_out(folder, environment, left_out):
    clients = "client,server\n0,0.5\n"
    run = read_run(folder(environment=environment, clients__csv=clients))
    names = ("clients", "participation", "outcomes")
    assert [name for name in names if not getattr(run, name)] == left_out
