"""The script runs and its contestants train the same clients; no time is judged."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overhead.py"
TINY = {
    "--clients": (2, 3),
    "--grid": (1, 2),
    "--steps": (3,),
    "--samples": (8,),
    "--batch-size": (3,),
    "--sizes": (5, 4, 2),
    "--repeats": (2,),
    "--rounds": (1,),
    "--memory-clients": (),
}


@pytest.fixture(scope="module")
def overhead():
    # By its path: a package called benchmarks may come from anywhere.
    spec = importlib.util.spec_from_file_location("lightning_fl_overhead", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def outcome(overhead, tmp_path_factory):
    folder = tmp_path_factory.mktemp("overhead")
    tables, figures = folder / "out.md", folder / "out.json"
    options = {**TINY, "--json": (figures,), "--markdown": (tables,)}
    returned = overhead.main([str(a) for name, values in options.items() for a in (name, *values)])
    return returned, json.loads(figures.read_text()), tables.read_text()


def test_the_file_holds_what_main_returns(outcome):
    returned, written, _ = outcome
    assert json.loads(json.dumps(returned)) == written


def test_every_contestant_is_timed_once_a_repeat(overhead, outcome):
    _, written, _ = outcome
    assert [r["clients"] for r in written["rounds"]] == [2, 3]
    assert [(r["clients"], r["steps"]) for r in written["grid"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for result in written["rounds"] + written["grid"]:
        assert set(result["seconds"]) == set(result["ratio"]) == set(overhead.CONTESTANTS)
        assert all(len(seconds) == 2 for seconds in result["all_seconds"].values())
        assert set(result["setup_seconds"]) >= {"library", "library, plain module"}


def test_contestants_agree_in_parameters(overhead, outcome):
    _, written, _ = outcome
    for result in written["rounds"] + written["grid"]:
        assert set(result["difference"]) == set(overhead.FEDERATIONS)
        assert max(result["difference"].values()) < 1e-6


def test_training_moves_the_server(overhead):
    problem = overhead.Problem(2, 3, samples=8, batch_size=3, sizes=(5, 4, 2))
    start = torch.nn.utils.parameters_to_vector(problem.net.parameters())
    assert (overhead.bare(problem, 1).parameters - start).abs().max() > 1e-3


def test_costs_are_given_a_step_a_client_and_a_round(overhead, outcome):
    _, written, _ = outcome
    assert set(written["costs"]) == set(overhead.COSTS)
    for costs in written["costs"].values():
        assert set(costs) == {"step", "client", "round"}
        assert all(len(figures) == 3 for figures in costs.values())


def test_the_fit_finds_known_costs(overhead):
    problems = [
        overhead.Problem(clients, steps, samples=1, batch_size=1, sizes=(1, 2))
        for clients in overhead.GRID
        for steps in overhead.GRID
    ]
    grid = [overhead.Result(problem, 1) for problem in problems]
    for result in grid:
        bare = 1e-3 * result.clients
        extra = (50 * result.clients * result.steps + 300 * result.clients + 2000) * 1e-6
        for name in overhead.CONTESTANTS:
            result.seconds[name] = [bare if name == "bare" else bare + extra] * 3
    costs = overhead.fit_costs(grid)["library"]
    assert costs["step"] == pytest.approx([50] * 3)
    assert costs["client"] == pytest.approx([300] * 3)
    assert costs["round"] == pytest.approx([2000] * 3)


def test_the_tables_name_the_machine_and_what_was_scaled(overhead, outcome):
    _, written, tables = outcome
    assert f"torch {torch.__version__}" in tables
    assert "scaled" not in tables
    written["rounds"][0]["clients"] = 1000
    assert "measured on 100 of the clients and scaled up" in overhead.markdown(written)


def test_fit_per_client_is_scaled_from_a_hundred_clients(overhead, monkeypatch):
    monkeypatch.setattr(overhead, "MOST_FITS", 2)
    problem = overhead.Problem(3, 1, samples=4, batch_size=4, sizes=(5, 2))
    with overhead._quiet(1):
        (result,) = overhead.measure([problem], repeats=1, rounds=1)
    assert not result.seconds["Lightning alone"]
    assert max(result.difference.values()) < 1e-6


@pytest.mark.slow
def test_memory_is_measured_in_fresh_processes(overhead):
    measured = overhead.memory([2, 4], repeats=1)
    assert set(measured["peak_mib"]) == {"2", "4"}
    assert min(measured["peak_mib"].values()) > measured["model_mib"]
    assert measured["growth_models"] == pytest.approx(
        measured["growth_mib"] / measured["model_mib"]
    )
