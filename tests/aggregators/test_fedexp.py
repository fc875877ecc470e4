"""FedExP: by hand and in its limits."""

import pytest
import torch

from lightning_fl.aggregators import FedAvg, FedExP
from rounds import aggregate, sent

SAMPLES = torch.tensor([3, 1, 4])


def aggregated(rule, delta):
    return aggregate(rule, 0 * delta[0], sent(delta, SAMPLES[: len(delta)]))


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_step_by_hand(weighting):
    delta = torch.eye(3, 5, dtype=torch.float64) + 0.03 * torch.arange(5)
    p = torch.full((3,), 1 / 3) if weighting == "uniform" else SAMPLES / 8
    mean = sum(p[k].double() * delta[k] for k in range(3))
    step = sum(float(p[k]) * float(delta[k] @ delta[k]) for k in range(3))
    step = max(1.0, step / (2 * (float(mean @ mean) + 0.01)))
    rule = FedExP(0.01, weighting)
    torch.testing.assert_close(aggregated(rule, delta), step * mean, rtol=1e-6, atol=0)
    assert rule.metrics()["server_step"] == pytest.approx(step, rel=1e-6)
    assert step > 1


def test_limits():
    eye = torch.eye(3, dtype=torch.float64)
    rule = FedExP(eps=0.0)
    aggregated(rule, eye)
    assert rule.metrics()["server_step"] == pytest.approx(1.5)  # orthogonal: M / 2
    aggregated(rule, torch.ones(3, 4, dtype=torch.float64))
    assert rule.metrics()["server_step"] == 1
    delta = torch.randn(3, 6, dtype=torch.float64)
    for limit, clients in ((FedExP(eps=1e9), 3), (FedExP(eps=0.0), 1)):
        found = aggregated(limit, delta[:clients])
        assert torch.equal(found, aggregated(FedAvg("uniform"), delta[:clients]))
