"""Compiled local steps: what they compute is what the module and its optimiser do."""

import pytest
import torch

from lightning_fl.lanes.graphs import Graphs, sgd_step
from lightning_fl.lanes.local_step import LocalStep

SGD = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "dampening": {"momentum": 0.5, "dampening": 0.3, "maximize": True},
}


@pytest.fixture
def ready(tiny):
    """A module's step, stacked parameters, and an optimiser that has made a step."""

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


HOW = {"fixed_is_shared": True, "at_once": True}


@pytest.mark.parametrize("options", SGD.values(), ids=SGD)
def test_a_step_with_its_update_is_that_of_the_optimiser(ready, monkeypatch, options):
    """Not compiled: what the graph computes."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    local, params, optimizer, batch = ready(**options)
    expected_local, expected, expected_optimizer, _ = ready(**options)
    graphs = Graphs(local, optimizer)
    assert graphs.can_update()
    for _ in range(2):
        with torch.no_grad():
            graphs.update(params, {}, {}, batch, None, ratio=0.5, **HOW)
        outcome = expected_local.many(expected, {}, {}, batch, None, **HOW)
        expected_optimizer.zero_grad()
        outcome.loss.sum().backward()
        for group in expected_optimizer.param_groups:
            group["lr"] *= 0.5
        expected_optimizer.step()
        for group in expected_optimizer.param_groups:
            group["lr"] *= 2
    for name, param in params.items():
        torch.testing.assert_close(param, expected[name], rtol=0, atol=1e-12)


def test_gradients_are_those_of_autograd(ready):
    local, params, _, batch = ready()
    grads, found = local.gradients(params, {}, {}, batch, None, **HOW)
    outcome = local.many(params, {}, {}, batch, None, **HOW)
    expected = torch.autograd.grad(outcome.loss.sum(), list(params.values()))
    torch.testing.assert_close(list(grads.values()), list(expected), rtol=0, atol=1e-13)
    torch.testing.assert_close(found.loss, outcome.loss)


def test_what_is_frozen_has_no_gradient(ready):
    local, params, _, batch = ready()
    frozen = next(iter(params))
    params[frozen].requires_grad_(False)
    assert frozen not in local.gradients(params, {}, {}, batch, None, **HOW)[0]


def test_only_sgd_that_has_begun_is_updated_in_a_graph(ready):
    local, params, _, _ = ready()
    for optimizer, can in (
        (torch.optim.SGD(params.values()), True),
        (torch.optim.SGD(params.values(), momentum=0.9), False),
        (torch.optim.Adam(params.values()), False),
    ):
        assert Graphs(local, optimizer).can_update() is can


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["plain", "nesterov"])
def test_compiled_it_is_the_same(ready, name):
    local, params, optimizer, batch = ready(**SGD[name])
    expected_local, expected, expected_optimizer, _ = ready(**SGD[name])
    graphs = Graphs(local, optimizer)
    with torch.no_grad():
        graphs.update(params, {}, {}, batch, None, ratio=1.0, **HOW)
    groups = [
        ([n for n, p in expected.items() if any(p is q for q in g["params"])], options(g))
        for g in expected_optimizer.param_groups
    ]
    rates = [torch.tensor(g["lr"], dtype=torch.float64) for g in expected_optimizer.param_groups]
    buffers = [
        [expected_optimizer.state[p].get("momentum_buffer") for p in g["params"]]
        for g in expected_optimizer.param_groups
    ]
    with torch.no_grad():
        sgd_step(expected_local, expected, groups, rates, buffers, {}, {}, batch, None, **HOW)
    for key, param in params.items():
        torch.testing.assert_close(param, expected[key], rtol=0, atol=1e-12)


def options(group):
    names = ("weight_decay", "momentum", "dampening", "nesterov", "maximize")
    return {name: group[name] for name in names}
