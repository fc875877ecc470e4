"""The script runs and its contestants train the same clients; no time is judged."""

import json

import pytest
import torch
from torch import nn

# What compiles takes too long here, and "auto" may.
NAMES = (
    "bare loop, 1 thread",
    "library, sequential",
    "vectorized, groups of 1",
    "vectorized, groups of 10",
)
COSTS = (
    *("costs", "--clients", "2", "--grid", "2", "--steps", "3", "--samples", "8"),
    *("--batch-size", "3", "--sizes", "5", "4", "2", "--repeats", "1", "--rounds", "1"),
    "--memory-clients",
)


@pytest.mark.slow
def test_smoke(script, monkeypatch, tmp_path, capsys):
    """All commands run on tiny workloads; sequential, vectorized and bare give the same."""
    speed = script("speed")
    tiny = speed.growth.Workload(4, 3, 2, 8, 4, (5,), lambda: nn.Linear(5, 10), 2)
    monkeypatch.setitem(speed.WORKLOADS, "W1", tiny)
    monkeypatch.setattr(speed.growth, "GROWN", tiny)
    table, figures = tmp_path / "out.md", tmp_path / "out.json"
    written = ("--json", str(figures), "--markdown", str(table))

    def turn(name, contestant, rounds, device):  # without a process, which knows no tiny workload
        out = tmp_path / "turn.json"
        speed.alone(name, contestant, str(rounds), "0", str(out), device)
        return json.loads(out.read_text())

    monkeypatch.setattr(speed, "turn", turn)
    monkeypatch.setattr(speed, "matmul_peak", lambda: 1e9)
    folder, page = tmp_path / "records", tmp_path / "performance.md"
    monkeypatch.setattr(speed.records, "FOLDER", folder)
    monkeypatch.setattr(speed.records, "PAGE", page)
    chosen = ["--workloads", "W1", "--contestants", *NAMES, "--repeats", "1", "--record"]
    speed.main(["rounds", *chosen, *written])
    outcome = json.loads(figures.read_text())
    assert list(outcome["workloads"]["W1"]["turns"]) == list(NAMES)
    assert len(list(folder.glob("*.json"))) == 1
    assert table.read_text() == speed.records.tables(outcome)
    assert all(f"| {name} |" in page.read_text() for name in NAMES)
    turns = outcome["workloads"]["W1"]["turns"]
    loop, *others = (turns[name][0]["accuracy"] for name in NAMES)
    assert others == [others[0]] * 3  # the loop samples other clients
    assert min(loop, *others) > 0.15

    problem = speed.Federation(tiny)
    plain, group_size = (
        speed.library(problem, 2, **options).parameters for options in ({}, {"group_size": 3})
    )
    torch.testing.assert_close(plain, group_size, rtol=0, atol=1e-6)

    outcome = speed.main(["agreement", "--workloads", "W1", "--contestants", *NAMES])
    for found in outcome["agreement"]["W1"].values():
        assert found["float64"] < 1e-12
        assert found["float32"] < 1e-6
        assert found["moved"] > 1e-3

    for state in ("0", "1"):
        speed.main(["growth", "--grown", "6", "4", state])
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert list(found) == list(speed.growth.COLUMNS)
        assert min(found[what] for what in ("setup", "seconds", "MiB", "saving", "size")) > 0
        assert len(speed.growth.rows([found])[0]) == len(found)

    outcome = speed.main([*COSTS, *written])
    assert json.loads(figures.read_text()) == json.loads(json.dumps(outcome))
    assert f"torch {torch.__version__}" in table.read_text()
    for result in outcome["rounds"] + outcome["grid"]:
        assert set(result["seconds"]) == set(speed.costs.CONTESTANTS)
        assert max(result["difference"].values()) < 1e-6
    start = nn.utils.parameters_to_vector(problem.net.parameters())
    assert (speed.bare(problem, 1).parameters - start).abs().max() > 1e-3

    with pytest.raises(SystemExit):
        speed.main(["rounds", "--contestants", "vectorized, groups of 1"])
    assert "bare loop" in capsys.readouterr().err


def test_a_record_is_shown_beside_the_faster_loop(script):
    records = script("records")
    turns = {
        "bare loop, 1 thread": [{"seconds": [9.0, 0.4, 0.2, 0.3], "first": 3.0, "MiB": 100.0}],
        "bare loop, 2 threads": [{"seconds": [9.0, s], "first": 3.0, "MiB": 50} for s in (1, 5, 2)],
        "auto": [{"seconds": [9.0, 0.1], "first": 20.0, "MiB": 1234.5, "accuracy": 0.925}],
        "slow": [{"seconds": [1.0, 3.0]}],
        "fails": [{"seconds": [float("nan")] * 2}],
    }
    outcome = {
        "time": "2026-01-02T10:00:00",
        "commit": "abc",
        "command": "python benchmarks/speed.py rounds",
        "machine": {"cpus": 2, "gpu": None},
        "peak": 2e9,
        "workloads": {"W1": {"steps": 50, "flops": 2e6, "turns": turns}},
    }
    rows = [[c.strip() for c in line.split("|")] for line in records.tables(outcome).splitlines()]
    found = {row[1]: row[2:-1] for row in rows if len(row) > 3}
    assert found["bare loop, 1 thread"][:2] == ["0.3000", "1.00"]
    assert found["bare loop, 2 threads"][:2] == ["2.00", "0.15"]
    assert found["auto"] == ["0.1000", "3.00", "500", "50 %", "20.0", "1,234.5", "92.5%"]
    assert found["slow"] == ["3.00", "0.10", "17", "2 %", "", "", ""]
    assert found["fails"][0] == "nan"
    old = outcome | {"time": "2025-12-31T10:00:00", "commit": "old"}
    old["workloads"] = {"W2": outcome["workloads"]["W1"]} | outcome["workloads"]
    page = records.page([outcome, old])
    assert "| W1 |  | 3.00 | cpus 2 | 2026-01-02 | `abc` |" in page
    assert page.count("2025-12-31") == 3  # two rows, and the latest measurement of W2
    assert page.count("### ") == 2
    del turns["auto"][0]["accuracy"]  # as in measurements of earlier versions
    assert "accuracy |" not in records.tables(outcome)
    assert page.index("### W1") < page.index("commit `abc`") < page.index("### W2")
    assert page.index("### W2") < page.index("commit `old`") < page.index("## All")


def test_the_work_of_a_step_is_counted(script):
    contestants = script("contestants")
    problem = contestants.mlp_federation(2, 3, 8, 4, (5, 7, 10))
    # Two products forward; backward two for each weight, but none for the samples.
    assert problem.flops() == 2 * 4 * (5 * 7 * 2 + 7 * 10 * 3)


def test_the_fit_finds_known_costs(script):
    costs = script("costs")
    grid = [
        costs.Result(costs.mlp_federation(clients, steps, 1, 1, (1, 2)), 1)
        for clients in costs.GRID
        for steps in costs.GRID
    ]
    for result in grid:
        bare = 1e-3 * result.clients
        extra = (50 * result.clients * result.steps + 300 * result.clients + 2000) * 1e-6
        for name in costs.CONTESTANTS:
            result.seconds[name] = [bare if name == "bare" else bare + extra] * 3
    found = costs.fit_costs(grid)["library"]
    assert [found[kind] for kind in ("step", "client", "round")] == [
        pytest.approx([known] * 3) for known in (50, 300, 2000)
    ]
