"""Robust rules in rounds and in a federation with attackers."""

import pytest
import torch
from torch import nn

from lightning_fl import ClientModule
from lightning_fl.aggregators import (
    CoordinateMedian,
    FedAvg,
    GeometricMedian,
    Krum,
    NormClipping,
    Staged,
    TrimmedMean,
)
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.functional.robust import (
    coordinate_median,
    geometric_median,
    krum_scores,
    trimmed_mean,
)
from lightning_fl.types import FederationError
from rounds import aggregate, of, sent, with_buffers


def problem(k=7, p=5, seed=0):
    random = torch.Generator().manual_seed(seed)
    server = torch.randn(p, generator=random, dtype=torch.float64)
    delta = torch.randn(k, p, generator=random, dtype=torch.float64)
    return server, sent(delta, torch.randint(1, 30, (k,), generator=random))


def multi_krum(delta, f, m):
    return delta[krum_scores(delta, f).argsort()[:m]].mean(0)


def clipped(delta, max_norm):
    return delta * (max_norm / delta.norm(dim=1, keepdim=True)).clamp(max=1)


@pytest.mark.parametrize(
    ("rule", "center"),
    [
        (CoordinateMedian(), lambda d, n: coordinate_median(d)),
        (TrimmedMean(0.3), lambda d, n: trimmed_mean(d, 2)),
        (TrimmedMean(0.0), lambda d, n: d.mean(0)),
        (Krum(2), lambda d, n: d[krum_scores(d, 2).argmin()]),
        (Krum(1, keep=3), lambda d, n: multi_krum(d, 1, 3)),
        (GeometricMedian(), lambda d, n: geometric_median(d, torch.ones(7))),
        (GeometricMedian("samples"), lambda d, n: geometric_median(d, n)),
        (NormClipping(1.5), lambda d, n: n.double() @ clipped(d, 1.5) / n.sum()),
        (NormClipping(1.5, "uniform"), lambda d, n: clipped(d, 1.5).mean(0)),
    ],
)
def test_the_server_moves_by_the_centre(rule, center):
    server, update = problem()
    expected = server + center(update.delta, update.num_samples)
    torch.testing.assert_close(aggregate(rule, server, update), expected, rtol=1e-12, atol=1e-12)


def test_a_part_of_clients_is_counted_exactly():
    """29 of 100 are 29, whatever 0.29 is in binary."""
    rule = TrimmedMean(0.29)
    server, update = problem(100, 2)
    expected = server + trimmed_mean(update.delta, 29)
    torch.testing.assert_close(aggregate(rule, server, update), expected)


def test_clipping_says_how_many_and_leaves_buffers():
    rule, update = NormClipping(1.0), sent([[4.0, 50.0], [0.5, 10.0]])
    of(9, rule, layout=with_buffers(1))
    assert aggregate(rule, torch.zeros(2), update).tolist() == [0.75, 30.0]
    assert rule.metrics() == {"clipped": 0.5}


def test_krum_does_not_look_at_buffers():
    rule, update = Krum(0), sent([[0.0, 9.0], [0.1, -9.0], [5.0, 0.0]])
    of(9, rule, layout=with_buffers(1))
    assert aggregate(rule, torch.zeros(2), update).tolist() == [0.0, 9.0]


def test_too_few_clients(fit, data):
    made = ClientModule(nn.Linear(6, 3)).double()
    with pytest.raises(
        FederationError, match=r"Krum\(attackers=1, keep=1\) requires 5 clients per"
    ):
        fit(made, FederatedLoop(aggregator=Krum(1)), data(num_clients=4))
    rules = Staged([1], [FedAvg(), Krum(1)])
    with pytest.raises(FederationError, match="requires 5 clients"):
        fit(made, FederatedLoop(aggregator=rules), data(num_clients=4))
    rule, (server, few) = Krum(1), problem(4)
    rule.start(server)
    rule.update(few)
    assert rule.conclude(4, 1) is None
