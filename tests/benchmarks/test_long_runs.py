"""The long runs are begun in order, kept, and not repeated."""

import shutil

import pytest

ROUNDS = "round,val_acc\n1,0.1\n50,0.3\n"


@pytest.fixture(autouse=True)
def _results(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.kept, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()


def test_all_runs_are_run_once_and_restored(bench, command_line, tmp_path, capsys):
    commands = command_line(ROUNDS)
    out = tmp_path / "runs"
    given = ["--out", str(out), "--data", str(tmp_path)]
    bench.main(given)
    names = [run.name for run in bench.RUNS]
    assert len(set(names)) == len(names)
    assert {path.stem for path in (tmp_path / "results").iterdir()} == set(names)
    fits = [" ".join(line) for line in commands if "fit" in line]
    of_run = [next(name for name in names if f"/{name}/" in line) for line in fits]
    assert list(dict.fromkeys(of_run)) == names
    for line in fits:
        run = next(run for run in bench.RUNS if f"/{run.name}/" in line)
        is_authors = "reduction=sum" in run.matching and "-fa_rm" in line
        assert ("terms.reduction=sum" in line) == is_authors
        assert "--threads=1" in line
    before = len(commands)
    shutil.rmtree(out)
    bench.main(given)
    assert len(commands) == before
    assert "| cifar10-half-0.1: cifar10-noniid-1-fa_rm-1 | 50 | 30.0 |" in capsys.readouterr().out


def test_a_run_that_fails_does_not_end_the_others(bench, command_line, tmp_path, capsys):
    commands = command_line(ROUNDS, printed="no accuracy")
    only = ["--only", "cifar10-half-0.1", "cifar10-central"]
    bench.main([*only, "--out", str(tmp_path / "runs")])
    assert any("cifar10-central" in word for line in commands for word in line)
    assert not list((tmp_path / "results").iterdir())
    assert "runs failed" in capsys.readouterr().err
    bench.main([*only, "--state", "--out", str(tmp_path / "empty")])
    assert "| cifar10-central: not begun |" in capsys.readouterr().out
    bench.main([*only, "--curves", str(tmp_path / "a.png"), "--out", str(tmp_path / "runs")])
    assert (tmp_path / "a.png").stat().st_size > 1000
