"""The script runs cells once, goes on where it was, and shows tables; no accuracy is judged."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def mostafa(monkeypatch):
    spec = importlib.util.spec_from_file_location("mostafa2019", FOLDER / "mostafa2019.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def commands(mostafa, monkeypatch):
    """Stand in for the command line: a table of two rounds, an accuracy by method."""
    seen = []

    def run(line, **options):
        seen.append(line)
        folder = Path(next(a for a in line if "root_dir" in a).partition("=")[2])
        if "fail" in line:
            return subprocess.CompletedProcess(line, 1, "", "no data")
        if "fit" in line:
            (folder / "version_0").mkdir(parents=True)
            (folder / "version_0" / "rounds.csv").write_text("round\n1\n2\n")
        accuracy = 0.9 if "fa_rm" in folder.name else 0.5 + 0.01 * int(folder.name[-1])
        return subprocess.CompletedProcess(line, 0, f"│ test_acc │ {accuracy} │", "")

    monkeypatch.setattr(mostafa.subprocess, "run", run)
    return seen


def test_cells_run_once_and_tables_show_means(mostafa, commands, tmp_path, capsys):
    least = ["--tasks", "kws", "--splits", "noniid", "--out", str(tmp_path / "out")]
    least += ["--seeds", "1", "3", "--participation", "1.0", "--methods", "fa"]
    mostafa.main(least)
    assert len(commands) == 4
    fit = " ".join(commands[0])
    assert "kws.yaml" in fit
    assert "noniid.yaml" in fit
    assert "fa.yaml" in fit
    assert "--federation.participation=1.0" in fit
    written = tmp_path / "docs" / "table.md"
    found = mostafa.main([*least, "fa_rm", "--jobs", "2", "--markdown", str(written)])
    assert len(commands) == 8
    assert len(found) == 4
    text = written.read_text()
    assert "| C=1 noniid | 52.0 ± 1.4 (28.4) | - (29.9) | - (81.1) | 90.0 ± 0.0 (79.2) |" in text
    assert "2 seed(s), 2 rounds" in text
    assert capsys.readouterr().out.endswith(text + "\n")


def test_a_cell_that_fails_is_named_and_the_others_go_on(mostafa, commands, tmp_path, capsys):
    given = ["--tasks", "mnist", "--methods", "fa", "--seeds", "1", "--out", str(tmp_path)]
    found = mostafa.main([*given, "--", "fail"])
    assert found == {}
    assert "mnist-iid-1-fa-1 failed:\nno data" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        mostafa.main([*given, "--", "--trainer.max_epochs=3"])
    assert "choose another --out" in capsys.readouterr().err
    assert json.loads((tmp_path / "options.json").read_text()) == ["fail"]
