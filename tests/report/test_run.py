"""What is read of a run's folder, also where a stranger wrote it."""

import gzip
import json
import math
import os

import pytest

from lightning_fl.report import find_runs, read_run
from lightning_fl.report.run import LIMITS
from lightning_fl.types import FederationError


def test_a_folder_is_read(folder):
    run = read_run(folder(faults__csv="round,client,fault\n3,1,nan\n"))
    assert run.name == "digits/version_0"
    assert (run.rounds, run.planned, run.is_finished, run.seed) == (4, 4, True, 1)
    assert run.column("val_acc") == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 0.5)]
    assert run.config["data"] == "Digits"
    assert run.config["data.batch_size"] == 32
    assert run.partition["sizes"] == [3, 2]
    assert run.partition["classes"] == [1, 1]
    assert run.faults == [(3, 1, "nan")]
    assert run.participation[1] == {
        "client": 1,
        "train_samples": 2,
        "rounds": 4,
        "dropped": 1,
        "train_acc": 0.5,
    }
    assert not run.notes


def test_a_table_of_rounds_is_enough(folder):
    others = ("config__yaml", "environment__json", "partition__json", "participation__csv")
    run = read_run(folder(**dict.fromkeys(others)))
    assert run.rounds == 4
    assert run.planned is None
    assert run.is_finished
    assert not run.notes


def test_runs_are_found_by_their_folder_or_the_one_above(folder, tmp_path):
    runs = [folder(f"digits/version_{i}") for i in (0, 2, 10)]
    (tmp_path / "digits" / "version_3").mkdir()
    assert find_runs([tmp_path / "digits"]) == (runs, ["digits/version_3: no round is completed"])
    assert find_runs([runs[1], tmp_path / "digits", runs[1]])[0] == [runs[1], runs[0], runs[2]]


def test_a_folder_of_folders_of_runs_names_those(folder, tmp_path):
    for name in ("scaffold/version_0", "fedavg/version_0", "fedavg/version_1"):
        folder(f"script/{name}")
    inside = tmp_path / "script"
    with pytest.raises(FederationError, match=f"pass {inside}/fedavg, {inside}/scaffold$"):
        find_runs([inside])


@pytest.mark.parametrize(
    ("name", "words"), [("nowhere", "nowhere does not exist"), ("", "has a rounds.csv")]
)
def test_a_folder_without_a_run_is_an_error(tmp_path, name, words):
    with pytest.raises(FederationError, match=words):
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
    told = json.dumps({"state": state, "rounds": rounds})
    assert read_run(folder(environment__json=told)).is_finished is finished


def test_without_an_environment_all_rounds_are_to_be_done(folder, config):
    text = config(trainer__max_epochs=5)
    assert not read_run(folder(environment__json=None, config__yaml=text)).is_finished


def test_what_is_no_number_is_left_out_and_named(folder):
    run = read_run(
        folder(
            rounds__csv="round,val_acc,lr\n1,0.5,0.1\n2,oops,0.1\nx,0.7,0.1\n,,\n4,0.5,1e999\n"
            "5,0.5\n6,0.75,0.1,9,9\n"
        )
    )
    assert [row["round"] for row in run.rows] == [1, 2, 4, 5, 6]
    assert [r for r, _ in run.column("val_acc")] == [1, 4, 5, 6]
    assert math.isnan(run.rows[2]["lr"])
    assert "lr" not in run.rows[3]
    (note,) = run.notes
    assert "rounds.csv" in note
    assert "val_acc in line 3, line 4 (round is 'x'), line 5 (round is '')" in note


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no readable rounds"),
        ("round\n", "has no readable rounds"),
        ("clients,val_acc\n1,2\n", "has no column 'round'"),
        ("round,a,a\n1,2,3\n", "line 1 of .* has duplicate column names"),
        ('round,a\n1,"2\n', "could not be read"),
        ("round,a\n1," + "9" * 200_000 + "\n", "could not be read"),
        ("round\n-1\n1.5\n1e10\nnan\n", r"no readable rounds .*line 2 \(round is '-1'\)"),
    ],
)
def test_a_table_that_cannot_be_read_is_an_error_that_says_where(folder, text, words):
    path = folder(rounds__csv=text)
    with pytest.raises(FederationError, match=words) as error:
        read_run(path)
    assert "rounds.csv" in str(error.value)


BOMB = "a: &a [1, 2]\n" + "".join(
    f"{y}: &{y} [{', '.join([f'*{x}'] * 9)}]\n" for x, y in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config__yaml", "a: [1"),
        ("config__yaml", "just a text"),
        ("config__yaml", "!!python/object/apply:os.system ['false']"),
        ("config__yaml", "a: &a [*a]"),
        ("config__yaml", BOMB),
        ("config__yaml", "[" * 1000),
        ("config__yaml", "day: 2020-13-45"),
        ("environment__json", "{"),
        ("environment__json", "[1]"),
        ("environment__json", "[" * 100_000),
        ("partition__json", '{"clients": 3}'),
        ("partition__json", '{"clients": [3], "class_counts": [{}]}'),
        ("faults__csv", 'round,client,fault\n"1'),
        ("clients__csv", "name\nx\n"),
        ("aggregator__png", b"<svg onload='alert(1)'/>"),
    ],
)
def test_a_broken_file_is_left_out_and_noted(folder, file, content):
    run = read_run(folder(**{file: content}))
    assert len(run.notes) == 1
    assert file.replace("__", ".") in run.notes[0]
    assert run.rounds == 4


def test_lines_of_faults_that_cannot_be_read_are_left_out(folder):
    run = read_run(folder(faults__csv="round,client,fault\n1,0,late\n1,x,nan\n2\n"))
    assert run.faults == [(1, 0, "late")]
    assert run.notes == ["skipped 2 lines of faults.csv, the first is line 3"]


def test_names_with_line_breaks_are_read(folder):
    table = 'client,name,rounds\n0,"a\u2028b",1\n1,"c\nd",1\n'
    run = read_run(folder(participation__csv=table))
    assert run.names == {0: "a\u2028b", 1: "c\nd"}
    assert not run.notes


def test_other_callbacks_of_a_resumed_fit_are_told(folder, config):
    faults = {"class_path": "lightning_fl.callbacks.ClientFaults", "init_args": {"dropout": 0.2}}
    later = config(trainer__callbacks=[faults], trainer__max_epochs=9)
    told = "trainer.callbacks.0=ClientFaults, trainer.callbacks.0.dropout=0.2"
    run = read_run(folder(config_resumed_1__yaml=later))
    assert run.resumed == [f"resumed with {told} (config_resumed_1.yaml)"]
    unknown = read_run(folder("b/version_0", config__yaml="a: [1", config_resumed_1__yaml=later))
    assert not unknown.resumed


def test_numbers_of_a_test_that_are_too_large_are_not_finite(folder):
    test = json.dumps({"metrics": {"test_acc": 0.5, "count": 10**400, "loss": None}})
    metrics = read_run(folder(test__json=test)).test["metrics"]
    assert metrics["test_acc"] == 0.5
    assert math.isnan(metrics["count"])
    assert math.isnan(metrics["loss"])


def test_files_that_are_too_large_are_not_read(folder, monkeypatch):
    monkeypatch.setitem(LIMITS, ".yaml", 1e-5)
    run = read_run(folder())
    assert not run.config
    assert not run.config_text
    (note,) = run.notes
    assert "is larger than 1e-05 MiB" in note
    monkeypatch.setitem(LIMITS, ".csv", 1e-5)
    with pytest.raises(FederationError, match=r"rounds\.csv is larger"):
        read_run(folder("b/version_0"))


def test_a_pipe_is_no_file(folder):
    path = folder(faults__csv=None)
    os.mkfifo(path / "faults.csv")
    assert read_run(path).faults is None


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["round,0=a 1=b", "1,01", "2,0"], "one line of the same length per round"),
        (["round,0=a 1=b", "1,01", "3,01"], "one line of the same length per round"),
        (["round,0=a 1=b", "1,02"], "outcomes that its first line does not explain"),
        ([f"round,{' '.join(f'{chr(i)}=a' for i in range(256, 520))}", "1,0"], "first line"),
        (["round,0", "1,0"], "its first line does not explain the outcomes"),
        ([], "participation_by_round.csv.gz is skipped"),
        (["round,0=a 1=b"], "participation_by_round.csv.gz is skipped"),
        (["round,0=a 1=b", "one,01"], "participation_by_round.csv.gz is skipped"),
        (["round,0=a 1=b", "1"], "participation_by_round.csv.gz is skipped"),
    ],
)
def test_broken_outcomes_are_left_out_and_noted(folder, lines, words):
    path = folder()
    content = gzip.compress("\n".join(lines).encode())
    (path / "participation_by_round.csv.gz").write_bytes(content)
    run = read_run(path)
    assert run.outcomes is None
    assert words in run.notes[0]


@pytest.mark.parametrize(
    "content", [b"", b"text", gzip.compress(b"round")[:-9]], ids=["empty", "text", "cut short"]
)
def test_outcomes_that_cannot_be_decompressed_are_left_out(folder, content):
    path = folder()
    (path / "participation_by_round.csv.gz").write_bytes(content)
    run = read_run(path)
    assert run.outcomes is None
    assert "participation_by_round.csv.gz is skipped" in run.notes[0]


def test_outcomes_that_expand_too_much_are_left_out(folder, monkeypatch):
    monkeypatch.setattr("lightning_fl.report.run.MOST_EXPANDED", 1)
    path = folder()
    (path / "participation_by_round.csv.gz").write_bytes(gzip.compress(bytes(3 * 2**20)))
    assert "it has more than 1 MiB" in read_run(path).notes[0]


@pytest.mark.parametrize(
    ("environment", "left_out"),
    [
        ({"faults": False, "client_metric": "f1"}, ["faults"]),
        ({"faults": True, "client_metric": None}, ["clients"]),
        ({"state": "started"}, ["participation", "outcomes"]),
        ({"state": "finished"}, []),
    ],
)
def test_files_of_an_earlier_fit_are_left_out(folder, environment, left_out):
    files = {
        "faults__csv": "round,client,fault\n1,0,nan\n",
        "clients__csv": "client,server\n0,0.5\n",
        "participation_by_round__csv__gz": gzip.compress(b"round,0=no 1=yes\n1,01\n"),
    }
    run = read_run(folder(environment__json=json.dumps(environment), **files))
    names = ("faults", "clients", "participation", "outcomes")
    assert [name for name in names if not getattr(run, name)] == left_out
    assert not run.notes
