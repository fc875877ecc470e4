"""The script runs and its contestants train the same clients; no time is judged."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def speed(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))  # it takes its yardsticks from overhead.py
    spec = importlib.util.spec_from_file_location("lightning_fl_speed", FOLDER / "speed.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    tiny = module.Workload(4, 3, 2, 8, 4, (5,), lambda: nn.Linear(5, 10), 2)
    monkeypatch.setitem(module.WORKLOADS, "W1", tiny)
    yield module
    sys.modules.pop("overhead", None)


# What compiles takes too long here, and "auto" may.
NAMES = ("bare loop, 1 thread", "library, one client at a time", "1 lane", "10 lanes")


def test_it_writes_a_table_and_figures(speed, tmp_path):
    table, figures = tmp_path / "out.md", tmp_path / "out.json"
    written = ("--json", str(figures), "--markdown", str(table))
    speed.main(["--workloads", "W1", "--contestants", *NAMES, "--repeats", "2", *written])
    seconds = json.loads(figures.read_text())["seconds"]["W1"]
    assert list(seconds) == list(NAMES)
    assert all(len(times) == 2 and min(times) > 0 for times in seconds.values())
    rows = table.read_text().splitlines()
    assert len(rows) == 2 + len(NAMES)
    assert rows[2].endswith("(1.00) |")


def test_the_library_trains_in_lanes_what_it_trains_without(speed):
    problem = speed.Federation(speed.WORKLOADS["W1"])
    plain, lanes = (
        speed.library(problem, 2, **options).parameters for options in ({}, {"lanes": 3})
    )
    torch.testing.assert_close(plain, lanes, rtol=0, atol=1e-6)
    assert not torch.equal(plain, torch.nn.utils.parameters_to_vector(problem.net.parameters()))


def test_a_yardstick_is_needed(speed, capsys):
    with pytest.raises(SystemExit):
        speed.main(["--contestants", "1 lane"])
    assert "bare loop" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contestants", "11 lanes"], "no contestant '11 lanes'"),
        (["--peer", "flower"], "run_flower.py, says how"),
        pytest.param(
            ["--device", "cuda"],
            "no CUDA GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_is_not_there_is_said_at_the_start(
    speed, capsys, monkeypatch, tmp_path, arguments, message
):
    monkeypatch.setenv("LIGHTNING_FL_PEERS", str(tmp_path))
    with pytest.raises(SystemExit):
        speed.main(arguments)
    assert message in capsys.readouterr().err


def test_a_peer_takes_part(speed, monkeypatch, tmp_path):
    """Any program may be a peer: it gets the workload and writes seconds."""
    python = tmp_path / "flower" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"""#!{sys.executable}
import json, sys
what = json.loads(sys.argv[2])
assert what["cohort"] == 3 and what["shape"] == [5] and what["lr"] == 0.1
open(sys.argv[3], "w").write(json.dumps([float(n) for n in range(what["rounds"])]))
""")
    python.chmod(0o755)
    monkeypatch.setenv("LIGHTNING_FL_PEERS", str(tmp_path))
    least = ("--workloads", "W1", "--contestants", "bare loop, 1 thread", "--repeats", "1")
    outcome = speed.main([*least, "--peer", "flower"])
    assert outcome["seconds"]["W1"]["flower"] == [1.0]


def test_time_from_client_to_client(speed, monkeypatch):
    monkeypatch.setattr(speed, "GRID", (1, 2))
    least = ("--workloads", "W1", "--contestants", "bare loop, 1 thread", "--repeats", "1")
    outcome = speed.main([*least, "--switch"])
    assert {"step", "client", "round"} == set(outcome["costs"]["library"])


@pytest.mark.slow  # the workload is a real one
def test_two_processes_take_part(speed):
    names = ["bare loop, 1 thread", "2 processes, one client at a time"]
    contestants = {name: speed.CONTESTANTS[name] for name in names}
    found, first = speed.measure(["W4"], contestants, 1)
    assert all(times[0] > 0 for times in found["W4"].values())
    assert all(time > 0 for time in first["W4"].values())


def test_a_federation_that_grows(speed, monkeypatch):
    monkeypatch.setattr(speed, "GROWTH", speed.WORKLOADS["W1"])
    found = speed.grown(6, rounds=2)
    assert found["seconds"] > 0
    assert found["MiB"] > 0
