"""Compiled local steps: what they compute is what the module and its optimizer do."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.federation import vectorize
from lightning_fl.objectives import WeightDivergence
from lightning_fl.policies import Schedule
from lightning_fl.runners.compiled import compiled, sgd_groups, sgd_step
from lightning_fl.runners.local_step import LocalStep
from lightning_fl.runners.vectorized_runner import VectorizedRunner

# --- what a graph takes for constant --------------------------------------------------------------


SIGN = 1


class Scaled(torch.nn.Module):
    """Its factor is a number, which a graph takes for a constant, and so is the sign."""

    def __init__(self, counts):
        super().__init__()
        self.factor, self.counts, self.notes = 1.0, counts, [0]

    def times(self, x):
        if self.counts:
            self.notes[0] += 1
        return SIGN * x * self.factor


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("counts", [False, True])
def test_a_graph_follows_what_changes_in_its_module_between_calls(traced, monkeypatch, counts):
    module, results = Scaled(counts), []
    times = compiled(Scaled.times, on_a_gpu=False)
    for factor in (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, -1.0):
        module.factor = abs(factor)
        monkeypatch.setitem(globals(), "SIGN", math.copysign(1, factor))
        results.append(float(times(module, torch.ones(()))))
    assert results == [1, 1, 1, 2, 2, 2, -1]
    assert module.notes == [7 * counts]


def test_what_a_cuda_graph_returns_is_copied(monkeypatch):
    """On a CPU, with a function that returns the same memory each time, as a CUDA graph does."""
    place, modes = torch.zeros(()), []

    def compile(function, options, **_):
        modes.append(options["triton.cudagraphs"])
        return lambda module, x: place.copy_(function(module, x))

    monkeypatch.setattr(torch, "compile", compile)
    module = Scaled(counts=False)
    times = compiled(Scaled.times, on_a_gpu=True)
    first, second = (times(module, torch.tensor(x)) for x in (1.0, 2.0))
    assert (float(first), float(second)) == (1, 2)
    assert modes == [True]


def test_a_step_is_compiled_as_a_whole():
    """Also by torch 2.11, which compiles neither the removal of attributes nor what follows."""
    module = ClientModule(torch.nn.Linear(3, 2), [WeightDivergence()])
    params = {n: torch.nn.Parameter(p.detach()[None]) for n, p in module.named_parameters()}
    fixed = {name: param.detach() for name, param in params.items()}
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    batch = torch.ones(1, 4, 3), torch.ones(1, 4).long()
    local = LocalStep(module, {})
    whole = torch.compile(sgd_step, backend="eager", fullgraph=True)
    with torch.no_grad(), local.placeholders():
        own = {"buffers": {}, "fixed": fixed, "batch": batch, "weight": None}
        whole(local, params, sgd_groups(optimizer, params), **own)
    assert "log" not in vars(module)


CONVOLVES = nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("layers", "long_run", "is_compiled"),
    [((nn.Linear(6, 3),), 13, False), ((nn.Linear(6, 3),), 12, True), (CONVOLVES, 999, True)],
)
def test_long_runs_are_compiled_and_those_of_convolutions_sooner(
    fit, data, monkeypatch, layers, long_run, is_compiled
):
    """Two groups of clients make three steps in two rounds."""
    compiled = []
    monkeypatch.setattr(VectorizedRunner, "compile", lambda runner: compiled.append(runner))
    monkeypatch.setattr(vectorize, "LONG_RUN", long_run)
    monkeypatch.setattr(vectorize, "LONG_RUN_OF_CONVOLUTIONS", 12)
    module = ClientModule(nn.Sequential(*layers), optimizer=partial(torch.optim.SGD, lr=0.1))
    loop = FederatedLoop(policy=Schedule(num_steps=3), seed=1)
    fit(VectorizedClients(module.double(), group_size=2), loop, data(), rounds=2)
    assert bool(compiled) == is_compiled
