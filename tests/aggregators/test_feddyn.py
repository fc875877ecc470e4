"""FedDyn: the algorithm written plainly, limit cases, every way of training, and resuming."""

import pytest
import torch

from lightning_fl import VectorizedClients
from lightning_fl.aggregators import FedAvg, FedDyn, Staged
from lightning_fl.aggregators.feddyn import DynamicRegularizer
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.layout import VectorLayout
from lightning_fl.functional.drift import dynamic_term, next_gradient
from lightning_fl.objectives import Proximal
from lightning_fl.partition import QuantitySkew
from lightning_fl.policies import Schedule
from lightning_fl.types import ClientUpdate, Cohort, FederationError
from two_classes import samples
from written_plainly import (
    LR,
    Lost,
    Noted,
    Quadratic,
    Uneven,
    loss_and_gradient,
    module,
    quadratics,
    vector,
)


def plainly(loop, data, alpha, weighting, decay=0.0, momentum=0.0):
    """Algorithm 1 of the paper, on the batches of a run."""
    n = [len(part) for part in data.parts]
    mean = sum(n) / len(n)
    alphas = [alpha if weighting == "uniform" else alpha * mean / size for size in n]
    x = vector(module())
    h, g = torch.zeros_like(x), {k: torch.zeros_like(x) for k in range(len(n))}
    models = []
    for batches in loop.batches:
        moves = {}
        for k, steps in batches.items():
            y, velocity = x.clone(), torch.zeros_like(x)
            for batch in steps:
                gradient = loss_and_gradient(y, *batch)[1] + alphas[k] * (y - x) - g[k]
                velocity = momentum * velocity + gradient + decay * y
                y = y - LR * velocity
            g[k] = g[k] - alphas[k] * (y - x)
            moves[k] = y - x
        h = h - alpha / len(n) * sum(moves.values())
        x = x + sum(moves.values()) / len(moves) - h / alpha
        models.append(x)
    return models, h, g


@pytest.mark.parametrize(
    ("alpha", "weighting", "options"),
    [(0.1, "uniform", {}), (0.5, "samples", {"weight_decay": 0.1, "momentum": 0.5})],
)
def test_rounds_are_the_algorithm_with_partial_participation(fit, alpha, weighting, options):
    data, rule = samples(partition=QuantitySkew(2.0, min_size=4)), FedDyn(alpha, weighting)
    loop = Noted(rule, Schedule(num_steps=4), seed=1, clients_per_round=3)
    fit(module(**options), loop, data, rounds=5)
    options["decay"] = options.pop("weight_decay", 0.0)
    models, h, g = plainly(loop, data, alpha, weighting, **options)
    assert len({tuple(batches) for batches in loop.batches}) > 1
    for found, expected in zip(loop.models, models, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(rule.h, h, rtol=0, atol=1e-12)
    for client, rows in loop.store.rows.items():
        torch.testing.assert_close(rows["part.0.gradient"], g[client], rtol=0, atol=1e-12)


def test_the_first_round_doubles_the_mean_update_if_everybody_returns(fit):
    (one, mine), (other, fedprox) = (
        (made := module(terms), fit(made, FederatedLoop(rule, seed=1), samples(), rounds=1))
        for rule, terms in ((FedDyn(0.3), ()), (FedAvg("uniform"), (Proximal(0.3),)))
    )
    start = vector(module())
    move = vector(other) - start
    torch.testing.assert_close(vector(one) - start, 2 * move, rtol=0, atol=1e-14)
    for name in ("bytes_up", "bytes_down"):
        assert mine.rows[0][name] == fedprox.rows[0][name]


class Frozen(FedDyn):
    """All vectors stay at 0."""

    def client_parts(self):
        class Still(DynamicRegularizer):
            def end(self, client, memory):
                return {}

        return [Still(self.alpha, self.weighting)]

    def compute(self):
        self.h = torch.zeros_like(self.h)
        moved = super().compute()
        moved[: len(self.h)] += self.h / self.alpha
        self.h = torch.zeros_like(self.h)
        return moved


def test_without_its_vectors_it_is_fedprox(fit):
    found = []
    for rule, terms in ((Frozen(0.7), ()), (FedAvg("uniform"), (Proximal(0.7),))):
        made = module(terms)
        fit(made, FederatedLoop(rule, Uneven(), seed=1, clients_per_round=3), samples())
        found.append(vector(made))
    torch.testing.assert_close(*found, rtol=0, atol=1e-13)


CURVATURE, OPTIMUM = [1.0, 4.0, 0.5, 2.0], [-1.0, 2.0, 3.0, 0.5]
BEST = sum(c * o for c, o in zip(CURVATURE, OPTIMUM, strict=True)) / sum(CURVATURE)


def test_exact_clients_reach_the_optimum_under_partial_participation():
    """With a = 1: y = (c o + x + g) / (c + 1)."""
    rule, x = FedDyn(1.0), torch.zeros(1, dtype=torch.float64)
    rule.setup(Federation(4, Cohort(2, 4)))
    a, c, o = torch.ones(2), *(torch.tensor(t, dtype=torch.float64) for t in (CURVATURE, OPTIMUM))
    g, random = torch.zeros(4, 1, dtype=torch.float64), torch.Generator().manual_seed(0)
    for _ in range(300):
        clients = torch.randperm(4, generator=random)[:2]
        y = ((c * o)[clients, None] + x + g[clients]) / (c[clients, None] + 1)
        slope = c[clients, None] * (y - o[clients, None])
        assert (slope + dynamic_term(y, x.expand(2, 1), g[clients], a)).abs().max() < 1e-12
        g[clients] = next_gradient(g[clients], y - x, a)
        torch.testing.assert_close(g[clients], slope)
        rule.start(x)
        rule.update(ClientUpdate(clients, y - x, torch.ones(2)))
        x = rule.compute()
    assert abs(float(x) - BEST) < 1e-10
    torch.testing.assert_close(rule.h, g.mean(0))


def test_clients_that_take_steps_reach_the_optimum_which_fedavg_misses(fit):
    def distance(rule):
        made = Quadratic(lr=0.2)
        loop = FederatedLoop(rule, Schedule(num_steps=6), seed=0)
        user = VectorizedClients(made, 4, compile=False)
        fit(user, loop, quadratics(CURVATURE, OPTIMUM), rounds=25)
        return abs(float(made.w.detach()) - BEST)

    assert distance(FedDyn(1.0)) < 1e-3
    assert distance(FedAvg("uniform")) > 0.1


@pytest.mark.filterwarnings("ignore:.*dropped")
def test_a_dropped_client_keeps_its_vector_and_counts_in_the_divisor_of_h_only(fit):
    rule = FedDyn(0.1)
    loop = FederatedLoop(rule, Schedule(num_steps=2), seed=1)
    made = module()
    fit(made, loop, samples(), rounds=1, callbacks=[Lost(2)])
    assert sorted(loop.store.rows) == [0, 1, 3, 4]
    own = sum(rows["part.0.gradient"] for rows in loop.store.rows.values())
    torch.testing.assert_close(rule.h, own / 5, rtol=0, atol=1e-13)
    expected = vector(module()) - own / 0.1 / 4 - own / 0.1 / 5
    torch.testing.assert_close(vector(made), expected, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*dropped", "ignore:.*too few")
def test_its_vectors_change_in_a_round_that_keeps_the_model(fit):
    rule, made = FedDyn(0.1), module()
    loop = FederatedLoop(rule, Schedule(num_steps=2), seed=1, min_clients=3)
    fit(made, loop, samples(), rounds=2, callbacks=[Lost(2, 3, 4)])
    assert torch.equal(vector(made), vector(module()))
    own = sum(rows["part.0.gradient"] for rows in loop.store.rows.values())
    assert own.abs().sum() > 0
    torch.testing.assert_close(rule.h, own / 5, rtol=0, atol=1e-13)


@pytest.mark.parametrize("group_size", [None, 2])
def test_frozen_parameters_do_not_move(fit, group_size):
    """Nor those that a callback freezes later, of which the server has a vector."""
    made, rule = module(), FedDyn(0.1)
    made.net.bias.requires_grad_(False)
    options = {"seed": 1, "clients_per_round": 3}
    user = made if group_size is None else VectorizedClients(made, group_size, compile=False)
    loop = fit(user, FederatedLoop(rule, Schedule(num_steps=2), **options), samples())
    assert torch.equal(made.net.bias, module().net.bias)
    assert rule.h[:8].abs().sum() > 0
    assert not rule.h[8:].any()
    assert not any(rows["part.0.gradient"][8:].any() for rows in loop.store.rows.values())
    rule.h = torch.ones_like(rule.h)
    rule.start(vector(made), torch.arange(10) < 8)
    rule.count += 1
    moved = rule.compute() - vector(made)
    assert (moved[:8] == -10).all()
    assert not moved[8:].any()


def test_it_may_be_one_stage_of_several(fit):
    rule = Staged([1, 1], [FedDyn(0.1), FedAvg("uniform"), FedDyn(0.2)])
    loop = fit(module(), FederatedLoop(rule, Schedule(num_steps=2), seed=1), samples())
    for stage, part in ((0, 0), (2, 1)):
        own = torch.stack([rows[f"part.{part}.gradient"] for rows in loop.store.rows.values()])
        torch.testing.assert_close(rule.rules[stage].h, own.mean(0), rtol=0, atol=1e-13)


def test_buffers_are_averaged():
    layout = VectorLayout({"w": torch.Size([2]), "mean": torch.Size([1])}, num_parameters=2)
    rule = FedDyn(0.5)
    rule.setup(Federation(4, Cohort(2, 4), layout))
    rule.start(torch.zeros(3))
    rule.update(
        ClientUpdate(torch.tensor([1, 3]), torch.tensor([[1.0] * 3, [2.0] * 3]), torch.ones(2))
    )
    assert rule.compute().tolist() == [2.25, 2.25, 1.5]


def test_what_does_not_fit_is_refused():
    for options in ({"alpha": 0.0}, {"alpha": float("nan")}, {"weighting": "size"}):
        with pytest.raises(FederationError, match=next(iter(options))):
            FedDyn(**options)
    stream = samples()
    stream.stream_steps = 2
    with pytest.raises(FederationError, match="clients of a constant size"):
        FedDyn(weighting="samples").setup(Federation(5, Cohort(5, 5), data=stream))
    rule = FedDyn()
    rule.start(torch.zeros(2))
    with pytest.raises(FederationError, match="requires the number of clients"):
        rule.compute()
