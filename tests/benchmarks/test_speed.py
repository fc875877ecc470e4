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


def test_smoke(script, monkeypatch, tmp_path, capsys):
    """All commands run on tiny workloads; sequential, vectorized and bare give the same."""
    speed = script("speed")
    tiny = speed.Workload(4, 3, 2, 8, 4, (5,), lambda: nn.Linear(5, 10), 2)
    monkeypatch.setitem(speed.WORKLOADS, "W1", tiny)
    monkeypatch.setattr(speed, "GROWTH", tiny)
    table, figures = tmp_path / "out.md", tmp_path / "out.json"
    written = ("--json", str(figures), "--markdown", str(table))

    speed.main(["rounds", "--workloads", "W1", "--contestants", *NAMES, "--repeats", "1", *written])
    seconds = json.loads(figures.read_text())["seconds"]["W1"]
    assert list(seconds) == list(NAMES)
    assert all(times[0] > 0 for times in seconds.values())
    assert table.read_text().splitlines()[2].endswith("(1.00) |")
    problem = speed.Federation(tiny)
    plain, group_size = (
        speed.library(problem, 2, **options).parameters for options in ({}, {"group_size": 3})
    )
    torch.testing.assert_close(plain, group_size, rtol=0, atol=1e-6)

    speed.main(["growth", "--grown", "6"])
    assert min(json.loads(capsys.readouterr().out.splitlines()[-1]).values()) > 0

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
