"""Results of runs are saved in a file and restored in a folder, where scripts find them."""

import csv
import json

import pytest


def leave(folder, name, rounds, accuracy, options=("--trainer.max_epochs=3",)):
    """Leave a finished run in a folder."""
    place = folder / name
    (place / "version_0").mkdir(parents=True)
    with (place / "version_0" / "rounds.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["round", "val_acc"], *([i, i / 10] for i in range(rounds))])
    (place / "result.json").write_text(json.dumps({"test_acc": accuracy}))
    (folder / "options.json").write_text(json.dumps(["--data.init_args.root=/here", *options]))
    return place


def test_what_is_saved_is_restored(bench, tmp_path):
    first, second, path = tmp_path / "first", tmp_path / "second", tmp_path / "runs.jsonl"
    table = (leave(first, "a/short", 3, 0.5) / "version_0" / "rounds.csv").read_text()
    bench.main(["save", str(first), "--file", str(path)])
    leave(second, "b", 2, 0.7)
    bench.main(["save", str(second), "--file", str(path)])  # adds to it
    leave(second, "a/short", 9, 0.1)
    third = tmp_path / "third"
    for folder in (second, third):
        bench.main(["restore", str(folder), "--file", str(path)])
    assert json.loads((third / "a/short/result.json").read_text()) == {"test_acc": 0.5}
    assert (third / "a/short/version_0/rounds.csv").read_text() == table
    assert json.loads((third / "b/result.json").read_text()) == {"test_acc": 0.7}
    # What is there stays.
    assert json.loads((second / "a/short/result.json").read_text()) == {"test_acc": 0.1}


def test_long_tables_are_thinned(bench, tmp_path):
    leave(tmp_path / "runs", "long", 1001, 0.5)
    path = tmp_path / "runs.jsonl"
    assert bench.save(tmp_path / "runs", path) == 1
    _, found = bench.read(path)
    rounds = [int(each) for each in found["long"]["rounds"]["round"]]
    assert rounds == [*range(0, 1000, 5), 1000]


def test_results_with_other_options_are_not_mixed(bench, tmp_path):
    first, second, path = tmp_path / "first", tmp_path / "second", tmp_path / "runs.jsonl"
    leave(first, "a", 3, 0.5)
    leave(second, "a", 3, 0.6, options=["--trainer.max_epochs=4"])
    bench.save(first, path)
    with pytest.raises(SystemExit, match=r"max_epochs=3.*max_epochs=4"):
        bench.save(second, path)
    with pytest.raises(SystemExit, match="max_epochs=4"):
        bench.restore(path, second)
    with pytest.raises(SystemExit, match="no results"):
        bench.restore(tmp_path / "nothing.jsonl", second)
    assert json.loads((second / "a/result.json").read_text()) == {"test_acc": 0.6}


def test_a_folder_without_runs_is_refused(bench, tmp_path):
    with pytest.raises(SystemExit, match="has no runs"):
        bench.main(["save", str(tmp_path), "--file", str(tmp_path / "runs.jsonl")])
    assert not list(tmp_path.iterdir())
