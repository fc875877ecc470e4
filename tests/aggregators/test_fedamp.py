"""FedAMP: the algorithm of the paper written plainly, its limits, and the models of clients."""

import math

import pytest
import torch

from lightning_fl.aggregators import FedAMP
from lightning_fl.functional.attention import attention, squared_distances
from lightning_fl.objectives import Proximal
from lightning_fl.policies import Schedule
from rounds import aggregate, of, sent, with_buffers
from two_classes import samples
from written_plainly import Lost, Noted, close, module, trained, vector


def gaussian(w, k, sigma, strength):
    """Equation 3 and Algorithm 1 of the paper, with its step alpha."""
    alpha = strength * sigma / (len(w) - 1)
    own, mixture = 1.0, torch.zeros_like(w[0])
    for j, other in enumerate(w):
        if j != k:
            share = alpha * math.exp(-float(((w[k] - other) ** 2).sum()) / sigma) / sigma
            own, mixture = own - share, mixture + share * other
    return own * w[k] + mixture


def heuristic(w, k, sigma, strength):
    """HeurFedAMP: the own weight is fixed, the others are a softmax of cosines."""
    others = [j for j in range(len(w)) if j != k]
    cosines = [float(w[k] @ w[j] / (w[k].norm() * w[j].norm())) for j in others]
    powers = [math.exp(sigma * each) for each in cosines]
    mixture = sum(p / sum(powers) * w[j] for p, j in zip(powers, others, strict=True))
    return (1 - strength) * w[k] + strength * mixture


def plainly(loop, mixture, sigma, strength, mu, lost=()):
    """Rounds on the batches of a run; a client that is lost keeps its model."""
    w = [vector(module()) for _ in range(5)]
    for batches in loop.batches:
        starts = {k: mixture(w, k, sigma, strength) for k in batches}
        for k in batches.keys() - set(lost):
            w[k] = trained(starts[k], batches[k], mu=mu)
        yield torch.stack(w)


@pytest.mark.filterwarnings("ignore:.*dropped")
@pytest.mark.parametrize(
    ("similarity", "mixture", "sigma", "strength"),
    [("distance", gaussian, 0.3, 0.8), ("cosine", heuristic, 4.0, 0.4)],
)
@pytest.mark.parametrize("lost", [(), (2,)])
def test_rounds_are_the_algorithm_with_partial_participation(
    fit, similarity, mixture, sigma, strength, lost
):
    rule = FedAMP(sigma, strength, similarity)
    loop = Noted(rule, Schedule(num_steps=4), seed=1, clients_per_round=3)
    fit(module([Proximal(0.7)]), loop, samples(), rounds=4, callbacks=[Lost(*lost)])
    expected = list(plainly(loop, mixture, sigma, strength, 0.7, lost))
    close(rule.models, expected[-1])
    close(loop.models, [models.mean(0) for models in expected])
    for client in range(5):
        start = mixture(expected[-1], client, sigma, strength)
        found = rule.models_for(torch.tensor([client]))[0]
        close(found, start)
        assert (found - expected[-1][client]).norm() > 1e-3


def test_buffers_are_those_of_the_client_and_have_no_distance():
    rule = of(2, FedAMP(1.0, 1.0), layout=with_buffers(2))
    aggregate(rule, torch.zeros(3), sent([[0.0, 1.0, 50.0], [1.0, 1.0, -50.0]]))
    share = math.exp(-1)
    expected = torch.tensor([[share, 1.0, 50.0], [1 - share, 1.0, -50.0]])
    torch.testing.assert_close(rule.models_for(torch.arange(2)), expected)
    metrics = {"own_weight": 1 - share, "model_distance": 1.0}
    assert rule.metrics() == pytest.approx(metrics)


def test_distances_of_near_models_are_exact_where_models_are_large():
    """Inner products of the models themselves would lose all digits."""
    rows = torch.full((3, 5), 1e6, dtype=torch.float64)
    rows[1, 0] += 1e-3
    rows[2, :2] -= 1e-3
    expected = torch.tensor([[0, 1, 2], [1, 0, 5], [2, 5, 0]], dtype=torch.float64) * 1e-6
    torch.testing.assert_close(squared_distances(rows), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("similarity", ["distance", "cosine"])
def test_one_client_and_models_of_zero_have_finite_weights(similarity):
    assert attention(torch.ones(1, 2), 0.5, 1.0, similarity).tolist() == [[0.0]]
    found = attention(torch.zeros(3, 2), 0.5, 1.0, similarity)
    torch.testing.assert_close(found, 0.25 * (1 - torch.eye(3, dtype=torch.float64)))
