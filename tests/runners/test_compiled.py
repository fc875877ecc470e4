"""Compiled local steps: what they compute is what the module and its optimizer do."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.objectives import WeightDivergence
from lightning_fl.policies import Schedule
from lightning_fl.runners import vectorized_clients
from lightning_fl.runners.compiled import (
    Graphs,
    compiled,
    sgd_groups,
    sgd_step,
)
from lightning_fl.runners.local_step import LocalStep
from lightning_fl.runners.vectorized_runner import VectorizedRunner

SGD = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "dampening": {"momentum": 0.5, "dampening": 0.3, "maximize": True},
}


@pytest.fixture
def ready(tiny):
    """A module's step, stacked parameters, and an optimizer that has made a step."""

    def make(k=3, **options):
        torch.manual_seed(0)
        module = tiny()
        params = {
            name: torch.nn.Parameter(torch.stack([p.detach() + i for i in range(k)]))
            for name, p in module.named_parameters()
        }
        first, *rest = params.values()
        groups = [{"params": [first], "lr": 0.3}, {"params": rest}]
        optimizer = torch.optim.SGD(groups, lr=0.1, **options)
        for param in params.values():
            param.grad = torch.ones_like(param)
        optimizer.step()
        features = next(module.net.parameters()).shape[1]
        x = torch.randn(k, 4, features, dtype=first.dtype)
        return LocalStep(module), params, optimizer, (x, torch.randint(3, (k, 4)))

    return make


def arguments(batch):
    return {"buffers": {}, "fixed": {}, "batch": batch, "weight": None}


def train_both(graphs, params, batch, local, expected, optimizer, steps):
    """Make steps by a graph with the update in it, and by the step and its optimizer."""
    for _ in range(steps):
        graphs.shapes["a shape"] = True
        assert graphs.step("a shape", True, params, arguments(batch)) is not None
        outcome = local.many(expected, {}, {}, batch, None)
        optimizer.zero_grad()
        outcome.loss.sum().backward()
        optimizer.step()


@pytest.mark.parametrize("options", SGD.values(), ids=SGD)
def test_a_step_with_its_update_is_that_of_the_optimizer(ready, monkeypatch, options):
    """Not compiled: what the graph computes."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    local, params, optimizer, batch = ready(**options)
    expected_local, expected, expected_optimizer, _ = ready(**options)
    graphs = Graphs(local, optimizer)
    assert graphs.can_update
    train_both(graphs, params, batch, expected_local, expected, expected_optimizer, steps=2)
    for name, param in params.items():
        torch.testing.assert_close(param, expected[name], rtol=0, atol=1e-12)


def test_gradients_are_those_of_autograd(ready):
    local, params, _, batch = ready()
    grads, found = local.gradients(params, {}, {}, batch, None)
    outcome = local.many(params, {}, {}, batch, None)
    expected = torch.autograd.grad(outcome.loss.sum(), list(params.values()))
    torch.testing.assert_close(list(grads.values()), list(expected), rtol=0, atol=1e-13)
    torch.testing.assert_close(found.loss, outcome.loss)


def test_what_is_frozen_has_no_gradient(ready):
    local, params, _, batch = ready()
    frozen = next(iter(params))
    params[frozen].requires_grad_(False)
    assert frozen not in local.gradients(params, {}, {}, batch, None)[0]


def test_only_sgd_that_has_begun_is_updated_in_a_step(ready):
    local, params, _, _ = ready()
    for optimizer, can in (
        (torch.optim.SGD(params.values()), True),
        (torch.optim.SGD(params.values(), momentum=0.9), False),
        (torch.optim.Adam(params.values()), False),
    ):
        assert Graphs(local, optimizer).can_update is can


# --- what a graph takes for constant --------------------------------------------------------------


class Scaled(torch.nn.Module):
    """Its factor is a number, which a graph takes for a constant."""

    def __init__(self, counts):
        super().__init__()
        self.factor, self.counts, self.notes = 1.0, counts, [0]

    def times(self, x):
        if self.counts:
            self.notes[0] += 1
        return x * self.factor


@pytest.fixture
def eager(monkeypatch):
    """Graphs without a compiler below them, for speed."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("counts", [False, True])
def test_a_graph_follows_what_changes_in_its_module_between_calls(eager, counts):
    module, results = Scaled(counts), []
    times = compiled(Scaled.times, on_a_gpu=False)
    for factor in (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0):
        module.factor = factor
        results.append(float(times(module, torch.ones(()))))
    assert results == [1, 1, 1, 2, 2, 2, 1]
    assert module.notes == [7 * counts]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_step_with_another_number_in_each_step_is_not_compiled_for_long(ready, tiny, eager):
    class Counts(tiny.kind):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1]) * (1 + batch_idx)

    _, params, optimizer, batch = ready()
    graphs, losses = Graphs(LocalStep(tiny(Counts)), optimizer), []

    def train():
        for graphs.local.batch_idx in range(6):
            if graphs.shapes.setdefault("a shape", True):
                made = graphs.step("a shape", False, params, arguments(batch))
                losses.append(made and made[1].loss / (1 + graphs.local.batch_idx))

    with pytest.warns(UserWarning, match=r"steps are not compiled: .* batch_idx"):
        train()
    assert [loss is None for loss in losses] == [False, True]


def test_what_a_cuda_graph_returns_is_copied(monkeypatch):
    """On a CPU, with a function that returns the same memory each time, as a CUDA graph does."""
    place, modes = torch.zeros(()), []

    def compile(function, mode, **_):
        modes.append(mode)
        return lambda module, x: place.copy_(function(module, x))

    monkeypatch.setattr(torch, "compile", compile)
    module = Scaled(counts=False)
    times = compiled(Scaled.times, on_a_gpu=True)
    first, second = (times(module, torch.tensor(x)) for x in (1.0, 2.0))
    assert (float(first), float(second)) == (1, 2)
    assert modes == ["reduce-overhead"]


def test_a_step_is_compiled_as_a_whole():
    """Also by torch 2.11, which compiles neither the removal of attributes nor what follows."""
    module = ClientModule(torch.nn.Linear(3, 2), [WeightDivergence()])
    params = {n: torch.nn.Parameter(p.detach()[None]) for n, p in module.named_parameters()}
    fixed = {name: param.detach() for name, param in params.items()}
    optimizer, batch = torch.optim.SGD(params.values(), lr=0.1), (torch.ones(1, 4, 3), LABELS)
    local = LocalStep(module)
    whole = torch.compile(sgd_step, backend="eager", fullgraph=True)
    with torch.no_grad(), local.placeholders():
        own = arguments(batch) | {"fixed": fixed}
        whole(local, params, sgd_groups(optimizer, params), **own)
    assert "log" not in vars(module)


LABELS = torch.tensor([[0, 1, 1, 0]])


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
    monkeypatch.setattr(vectorized_clients, "LONG_RUN", long_run)
    monkeypatch.setattr(vectorized_clients, "LONG_RUN_OF_CONVOLUTIONS", 12)
    module = ClientModule(nn.Sequential(*layers), optimizer=partial(torch.optim.SGD, lr=0.1))
    loop = FederatedLoop(policy=Schedule(num_steps=3), seed=1)
    fit(VectorizedClients(module.double(), group_size=2), loop, data(), rounds=2)
    assert bool(compiled) == is_compiled
