"""AFL: the algorithm written plainly in both modes, limit cases, and every way of training."""

import pytest
import torch

from lightning_fl.aggregators import AFL, FedAvg
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.functional.fairness import ascend_mixture, draw_from_mixture
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.partition import QuantitySkew
from lightning_fl.policies import Schedule
from lightning_fl.samplers import AFLSampler
from lightning_fl.types import FederationError
from two_classes import samples
from written_plainly import Lost, Noted, close, module, of_all_samples, trained, vector


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
            y = trained(x, steps)
            if k in lost:
                used = used & (torch.arange(len(n)) != k)
                continue
            losses[k] = of_all_samples(x, data, k)[0]
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
    close(loop.models, models)
    close(rule.mixture, mixture, atol=1e-13)
    n = torch.tensor([len(part) for part in data.parts], dtype=torch.float64)
    for client in lost:
        assert rule.mixture[client] == pytest.approx(float(n[client] / n.sum()), abs=1e-14)
    assert (mixture == 0).any() or mixture.std() > 0.05
    assert loop.rows[-1]["mixture_max"] == float(rule.mixture.max())


@pytest.mark.filterwarnings("ignore:.*dropped")
@pytest.mark.parametrize("lost", [(), (1, 4)])
def test_sampled_rounds_are_the_algorithm(fit, lost):
    data, rule = samples(), AFL(0.3, mode="sampling")
    loop = Noted(rule, Schedule(num_steps=3), AFLSampler(), seed=1, clients_per_round=3)
    fit(module(), loop, data, rounds=6, callbacks=[Lost(*lost)])
    models, mixture = plainly(loop, data, 0.3, "uniform", size=3, lost=lost)
    close(loop.models, models)
    close(loop.aggregator.mixture, mixture, atol=1e-13)
    assert len({len(batches) for batches in loop.batches}) > 1


@pytest.mark.filterwarnings("ignore:.*dropped", "ignore:.*too few")
def test_a_round_that_keeps_the_model_keeps_the_mixture(fit):
    made, rule = module(), AFL(0.2)
    loop = FederatedLoop(rule, seed=1, min_clients=3)
    fit(made, loop, samples(), rounds=2, callbacks=[Lost(0, 1, 2)])
    assert torch.equal(vector(made), vector(module()))
    assert rule.mixture.tolist() == [0.2] * 5


@pytest.mark.parametrize(
    ("rule", "sampler", "count", "match"),
    [
        (AFL(), None, 3, "trains all 5 clients in every round"),
        (AFL(), AFLSampler(), None, r"and the aggregator is AFL\(gamma"),
        (FedAvg(), AFLSampler(), None, r"is FedAvg\(weighting='samples'"),
        (AFL(mode="sampling"), None, None, r"set sampler=AFLSampler\(\)"),
        (AFL(mode="sampling"), AFLSampler(), 1, "at least 2, got 1"),
    ],
)
def test_runs_that_do_not_fit_are_refused(fit, rule, sampler, count, match):
    loop = FederatedLoop(rule, sampler=sampler, clients_per_round=count, seed=1)
    with pytest.raises(FederationError, match=match):
        fit(module(), loop, samples())
