"""AFL: the algorithm written plainly in both modes, limit cases, and every way of training."""

import pytest
import torch

from lightning_fl import VectorizedClients
from lightning_fl.aggregators import AFL, FedAvg
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.functional.fairness import ascend_mixture, draw_from_mixture
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.partition import QuantitySkew
from lightning_fl.policies import Schedule
from lightning_fl.samplers import AFLSampler
from lightning_fl.types import FederationError
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
    samples_of,
    vector,
)


def sampled(gamma=0.05, kind=Noted, **options):
    """A loop in which clients are drawn."""
    options = {"policy": Schedule(num_steps=3), "seed": 1, "clients_per_round": 3} | options
    return kind(AFL(gamma, mode="sampling"), sampler=AFLSampler(), **options)


def plainly(loop, data, gamma, initial, size=None, lost=()):
    """The algorithm on the batches of a run, with ``size`` draws or with weights."""
    n = torch.tensor([len(part) for part in data.parts], dtype=torch.float64)
    mixture = torch.ones(len(n), dtype=torch.float64) if initial == "uniform" else n
    mixture = mixture / mixture.sum()
    x, models = vector(module()), []
    for t, batches in enumerate(loop.batches):
        if size is None:
            factors, used = mixture, torch.ones(len(n), dtype=torch.bool)
        else:
            random = generator(1, RandomStream.COHORT, t)
            factors, used = draw_from_mixture(mixture, size, random)
            assert {k for k in range(len(n)) if factors[k] or used[k]} == set(batches)
        total, weight, losses = 0, 0, torch.zeros(len(n), dtype=torch.float64)
        for k, steps in batches.items():
            y = x.clone()
            for batch in steps:
                y = y - LR * loss_and_gradient(y, *batch)[1]
            if k in lost:
                used = used & (torch.arange(len(n)) != k)
                continue
            losses[k] = loss_and_gradient(x, *samples_of(data, k))[0]
            total, weight = total + factors[k] * (y - x), weight + factors[k]
        x = x + total / weight if weight > 0 else x
        mixture = ascend_mixture(mixture, losses, used, gamma)
        models.append(x)
    return models, mixture


@pytest.mark.filterwarnings("ignore:.*dropped")
@pytest.mark.parametrize(("initial", "lost"), [("uniform", ()), ("samples", (2,))])
def test_rounds_are_the_algorithm(fit, initial, lost):
    data, rule = samples(partition=QuantitySkew(2.0, min_size=4)), AFL(0.7, initial)
    loop = Noted(rule, Schedule(num_steps=3), seed=1)
    fit(module(), loop, data, rounds=5, callbacks=[Lost(*lost)])
    models, mixture = plainly(loop, data, 0.7, initial, lost=lost)
    torch.testing.assert_close(loop.models, models, rtol=0, atol=1e-12)
    torch.testing.assert_close(rule.mixture, mixture, rtol=0, atol=1e-13)
    n = torch.tensor([len(part) for part in data.parts], dtype=torch.float64)
    for client in lost:
        assert rule.mixture[client] == pytest.approx(float(n[client] / n.sum()), abs=1e-14)
    assert (mixture == 0).any() or mixture.std() > 0.05
    assert loop.rows[-1]["mixture_max"] == float(rule.mixture.max())


@pytest.mark.filterwarnings("ignore:.*dropped")
@pytest.mark.parametrize("lost", [(), (1, 4)])
def test_sampled_rounds_are_the_algorithm(fit, lost):
    data, loop = samples(), sampled(0.3)
    fit(module(), loop, data, rounds=6, callbacks=[Lost(*lost)])
    models, mixture = plainly(loop, data, 0.3, "uniform", size=3, lost=lost)
    torch.testing.assert_close(loop.models, models, rtol=0, atol=1e-12)
    torch.testing.assert_close(loop.aggregator.mixture, mixture, rtol=0, atol=1e-13)
    assert len({len(batches) for batches in loop.batches}) > 1


@pytest.mark.parametrize(("initial", "weighting"), [("uniform", "uniform"), ("samples", "samples")])
def test_without_ascent_it_is_fedavg_bit_for_bit(fit, initial, weighting):
    found = []
    for rule in (AFL(0.0, initial), FedAvg(weighting)):
        made, data = module(), samples(partition=QuantitySkew(2.0, min_size=4))
        fit(made, FederatedLoop(rule, Uneven(), seed=1), data)
        found.append(vector(made))
    assert torch.equal(*found)


@pytest.mark.parametrize("mode", ["weights", "sampling"])
def test_the_worst_client_gets_a_smaller_loss_than_with_fedavg(fit, mode):
    """Three clients want 0 and one wants 2: FedAvg stops at 0.5, the worst-case optimum is 1."""
    optimum = [0.0, 0.0, 0.0, 2.0]

    def final(rule, **options):
        made = Quadratic(lr=0.2)
        loop = FederatedLoop(rule, Schedule(num_steps=1), seed=0, **options)
        user = VectorizedClients(made, 4, compile=False)
        fit(user, loop, quadratics([1.0] * 4, optimum), rounds=30)
        w = float(made.w.detach())
        return w, max((w - o) ** 2 / 2 for o in optimum)

    options = {"sampler": AFLSampler(), "clients_per_round": 3} if mode == "sampling" else {}
    w, worst = final(AFL(0.1, mode=mode), **options)
    assert w == pytest.approx(1.0, abs=0.1 if mode == "weights" else 0.35)
    assert worst < 0.8 * final(FedAvg("uniform"))[1]


@pytest.mark.filterwarnings("ignore:.*dropped", "ignore:.*too few")
@pytest.mark.parametrize("group_size", [None, 3])
def test_the_average_of_the_models_is_evaluated_and_the_last_one_trained(fit, group_size):
    class LostOnce(Lost):
        def on_client_updates(self, plan, clients, delta, dropped):
            is_now = plan.round == 2
            return super().on_client_updates(plan, clients, delta, dropped) if is_now else delta

    def run(output, kind=FederatedLoop):
        made, rule = module(), AFL(0.5, output=output)
        loop = kind(rule, Schedule(num_steps=2), seed=1, min_clients=2)
        user = made if group_size is None else VectorizedClients(made, group_size, compile=False)
        fit(user, loop, samples(), rounds=4, callbacks=[LostOnce(0, 1, 2, 4)])
        return vector(made), rule, loop

    class Models(FederatedLoop):
        def on_train_epoch_end(self, trainer, pl_module):
            super().on_train_epoch_end(trainer, pl_module)
            vars(self).setdefault("models", []).append(vector(pl_module))

    last, rule, loop = run("last", Models)
    average, other, averaged = run("average", Models)
    assert torch.equal(other.last, last)
    assert torch.equal(other.mixture, rule.mixture)
    models = [loop.models[t] for t in (0, 1, 3)]  # round 3 keeps the model
    torch.testing.assert_close(average, torch.stack(models).mean(0), rtol=0, atol=1e-14)
    torch.testing.assert_close(averaged.models[2], torch.stack(models[:2]).mean(0))
    assert averaged.rows[-1]["val_loss"] != loop.rows[-1]["val_loss"]


@pytest.mark.filterwarnings("ignore:.*dropped", "ignore:.*too few")
def test_a_round_that_keeps_the_model_keeps_the_mixture(fit):
    made, rule = module(), AFL(0.2)
    loop = FederatedLoop(rule, seed=1, min_clients=3)
    fit(made, loop, samples(), rounds=2, callbacks=[Lost(0, 1, 2)])
    assert torch.equal(vector(made), vector(module()))
    assert rule.mixture.tolist() == [0.2] * 5


@pytest.mark.filterwarnings("ignore:.*dropped")
def test_without_a_client_of_weight_the_model_stays(fit):
    made, rule = module(), AFL(0.2)

    class Given(FederatedLoop):
        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            rule.weights = torch.tensor([5.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)

    fit(made, Given(rule, seed=1), samples(), rounds=1, callbacks=[Lost(0)])
    assert torch.equal(vector(made), vector(module()))
    assert rule.mixture.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"aggregator": AFL(), "clients_per_round": 3}, "trains all 5 clients in every round"),
        ({"aggregator": AFL(), "sampler": AFLSampler()}, r"and the aggregator is AFL\(gamma"),
        ({"aggregator": FedAvg(), "sampler": AFLSampler()}, r"is FedAvg\(weighting='samples'"),
        ({"aggregator": AFL(mode="sampling")}, r"set sampler=AFLSampler\(\)"),
        (
            {
                "aggregator": AFL(mode="sampling"),
                "sampler": AFLSampler(),
                "clients_per_round": 1,
            },
            "at least 2, got 1",
        ),
    ],
)
def test_runs_that_do_not_fit_are_refused(fit, options, match):
    with pytest.raises(FederationError, match=match):
        fit(module(), FederatedLoop(seed=1, **options), samples())
