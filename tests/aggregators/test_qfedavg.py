"""q-FedAvg: the algorithm written plainly, limit cases, every way of training, and refusals."""

import pytest
import torch

from lightning_fl.aggregators import QFedAvg
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.partition import QuantitySkew
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError
from rounds import aggregate, sent
from two_classes import samples
from written_plainly import Lost, Noted, Uneven, close, module, of_all_samples, trained, vector


def plainly(loop, data, q, rate):
    """Algorithm 2 of the paper, on the batches of a run; the initial losses of each round."""
    x, models, found = vector(module()), [], []
    for t, batches in enumerate(loop.batches):
        total, curvature, losses = 0, 0, []
        for k, steps in batches.items():
            eta = rate(k, t)
            loss = of_all_samples(x, data, k)[0]
            dw = (x - trained(x, steps, lr=eta)) / eta
            total = total + loss**q * dw
            curvature += q * loss ** (q - 1) * dw.square().sum() + loss**q / eta
            losses.append(float(loss))
        x = x - total / curvature
        models.append(x)
        found.append(losses)
    return models, found


@pytest.mark.parametrize(
    ("q", "policy", "rate"),
    [
        (2.0, Schedule(num_steps=4), lambda k, t: 0.2),
        (0.3, Schedule(lr=0.3, num_steps=4, decay=0.5), lambda k, t: 0.3 * 0.5**t),
        (5.0, Uneven(), lambda k, t: 0.1 + 0.02 * k),
    ],
)
def test_rounds_are_the_algorithm_with_partial_participation(fit, q, policy, rate):
    data, rule = samples(partition=QuantitySkew(2.0, min_size=4)), QFedAvg(q)
    loop = Noted(rule, policy, seed=1, clients_per_round=3)
    fit(module(), loop, data, rounds=4)
    models, losses = plainly(loop, data, q, rate)
    close(loop.models, models)
    for row, each in zip(loop.rows, losses, strict=True):
        mean = sum(each) / len(each)
        variance = sum((f - mean) ** 2 for f in each) / len(each)
        found = [row["loss_mean"], row["loss_variance"], row["loss_max"]]
        assert found == pytest.approx([mean, variance, max(each)], abs=1e-12)


def aggregated(rule, losses, lr=(0.5, 0.25)):
    delta = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)
    extras = {"loss_before": torch.tensor(losses, dtype=torch.float64)}
    return aggregate(rule, 0 * delta[0], sent(delta, lr=torch.tensor(lr), extras=extras))


def test_large_powers_are_finite_or_refused():
    rule = QFedAvg(300.0)
    with pytest.raises(FederationError, match=r"QFedAvg\(q=300.0\) exceeds .* to 1000: decrease q"):
        aggregated(rule, [10.0, 1000.0])
    with pytest.raises(FederationError, match=r"losses up to 0.02: decrease q"):
        aggregated(rule, [0.01, 0.02])
    rule.scale.fill_(1000.0)  # after a round with such losses
    far = aggregated(rule, [10.0, 1000.0])  # only the larger loss has a weight
    dw = torch.tensor([-12.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(far, -dw / (0.3 * dw.square().sum() + 4))


def test_losses_near_0_and_below():
    for q in (0.1, 0.5, 1.0, 4.0):
        found = aggregated(QFedAvg(q), [0.0, 2.0])
        assert found.isfinite().all()
    assert aggregated(QFedAvg(0.5), [0.0, 0.0]).abs().max() < 1e-4  # the slope is very large
    with pytest.raises(FederationError, match=r"a client has the loss -0.25: use a loss"):
        aggregated(QFedAvg(1.0), [-0.25, 2.0])


def test_a_rate_of_zero_is_refused():
    with pytest.raises(FederationError, match=r"must be positive, got .* for clients"):
        aggregated(QFedAvg(), [1.0, 1.0], lr=(0.0, 0.1))


@pytest.mark.filterwarnings("ignore:.*dropped", "ignore:.*too few")
def test_dropped_clients_have_no_part(fit):
    found = []
    for lost, min_clients in (((0, 1, 3, 4), 1), ((0, 1, 3, 4), 2)):
        made = module()
        loop = FederatedLoop(QFedAvg(2.0), seed=1, min_clients=min_clients)
        fit(made, loop, samples(), rounds=1, callbacks=[Lost(*lost)])
        found.append((vector(made), loop.rows[0].get("loss_max")))
    start, data = vector(module()), samples()
    data.setup("fit")
    loss = float(of_all_samples(start, data, 2)[0])
    assert found[0][1] == pytest.approx(loss, abs=1e-12)
    assert not torch.equal(found[0][0], start)
    assert torch.equal(found[1][0], start)
