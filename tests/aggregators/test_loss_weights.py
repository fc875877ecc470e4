"""FedControl and FedCostWAvg: several rounds worked out plainly, with clients that come and go."""

from functools import partial

import pytest
import torch

from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.aggregators import FedControl, FedCostWAvg, FedPIDAvg
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.partition import Natural, QuantitySkew
from rounds import aggregate, sent
from written_plainly import close

COHORTS = [[0, 1, 2], [1, 3], [0, 2, 200], [0, 1, 2, 3]]
SAMPLES = {0: 5, 1: 10, 2: 1, 3: 7, 200: 3}


def problem(seed=0):
    """Updates of a few rounds, each with its losses."""
    random = torch.Generator().manual_seed(seed)
    for cohort in COHORTS:
        delta = torch.randn(len(cohort), 3, generator=random, dtype=torch.float64)
        losses = 0.5 + torch.rand(2, len(cohort), generator=random, dtype=torch.float64)
        yield sent(delta, [SAMPLES[c] for c in cohort], cohort, extras=extras(*losses))


def extras(before, after):
    return {"loss_before": before, "loss_after": after}


def plainly(alpha, beta, decay):
    """The equations, client by client."""
    server, last, history = torch.zeros(3, dtype=torch.float64), {}, {}
    for t, update in enumerate(problem(), 1):
        ids = update.clients.tolist()
        s, d, i = [], [], []
        for row, client in enumerate(ids):
            loss = float(update.extras["loss_after"][row])
            s.append(SAMPLES[client])
            d.append(last.get(client, float(update.extras["loss_before"][row])) / loss)
            history.setdefault(client, []).append((t, loss))
            i.append(sum(decay ** (t - q) * each for q, each in history[client]))
            last[client] = loss
        for row in range(len(ids)):
            weight = alpha * s[row] / sum(s) + beta * d[row] / sum(d)
            weight += (1 - alpha - beta) * i[row] / sum(i)
            server = server + weight * update.delta[row]
        yield server


def trained(rule, split=False):
    server = torch.zeros(3, dtype=torch.float64)
    for update in problem():
        each = [update.select(torch.tensor([row])) for row in range(len(update.clients))]
        server = aggregate(rule, server, *each if split else [update])
        yield server


def agree(found, expected):
    close(list(found), list(expected), atol=1e-13)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("alpha", "beta", "decay"), [(1 / 3, 1 / 3, 1.0), (0.2, 0.5, 0.8), (0.0, 0.0, 0.0)]
)
def test_rounds_are_the_equations(alpha, beta, decay, split):
    agree(trained(FedControl(alpha, beta, decay), split), plainly(alpha, beta, decay))


def test_without_the_integral_it_is_fedcostwavg():
    agree(trained(FedCostWAvg(0.3)), plainly(0.3, 0.7, 1.0))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("window", [6, 2])
def test_rounds_are_the_equations_of_fedpidavg(monkeypatch, window, split):
    """Each client's losses, the initial model's first, are a list; losses rise and fall."""

    def plainly():
        server, history = torch.zeros(3, dtype=torch.float64), {}
        for update in problem():
            ids, s, d, m = update.clients.tolist(), [], [], []
            for row, client in enumerate(ids):
                losses = history.setdefault(client, [float(update.extras["loss_before"][row])])
                losses.append(float(update.extras["loss_after"][row]))
                s.append(SAMPLES[client])
                d.append(losses[-2] - losses[-1])
                m.append(sum(losses[-window:]))
            assert min(d) < 0
            for row in range(len(ids)):
                weight = 0.45 * s[row] / sum(s) + 0.45 * d[row] / sum(d) + 0.1 * m[row] / sum(m)
                server = server + weight * update.delta[row]
            yield server

    monkeypatch.setattr(FedPIDAvg, "columns", window + 1)  # the paper has a window of 6
    agree(trained(FedPIDAvg(), split), plainly())


def one_round(rule, before, after):
    losses = extras(torch.tensor(before), torch.tensor(after))
    update = sent([[3.0], [0.0]], [1, 2], extras=losses)
    return aggregate(rule, torch.zeros(1), update).item()


def test_a_client_whose_loss_rises_counts_negatively():
    """d = -1, 3: shares of -1/2 and 3/2 instead of 0 and 1."""
    rule = FedPIDAvg(0.0, 1.0)
    assert one_round(rule, [1.0, 5.0], [2.0, 2.0]) == pytest.approx(-1.5)
    assert rule.metrics()["weight_l1"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    "after",
    [
        [1.0, 1.0],  # no loss moved
        [0.5, 1.5],  # d = 0.5, -0.5
        [0.5, 1.5 - 1e-6],  # the quotients would be about -500,000 and 500,000
    ],
)
def test_where_falls_cancel_size_decides(after):
    rule = FedPIDAvg(0.0, 1.0)
    assert one_round(rule, [1.0, 1.0], after) == pytest.approx(1.0)
    assert rule.metrics()["weight_l1"] == pytest.approx(1.0)


def test_the_limit_of_cancellation_is_an_option():
    """d = 1, -0.9: the sum is 0.1, that of absolute values 1.9."""
    found = [
        one_round(FedPIDAvg(0.0, 1.0, cancellation=c), [1, 1.0], [0, 1.9]) for c in (0.05, 0.06)
    ]
    assert found == [pytest.approx(30.0, rel=1e-5), pytest.approx(1.0)]


def test_negative_losses_are_not_clamped():
    """Losses of -1 to -3 and -1 to -2: d = 2, 1 and m = -4, -3."""
    assert one_round(FedPIDAvg(0.0, 1.0), [-1.0, -1.0], [-3.0, -2.0]) == pytest.approx(2.0)
    assert one_round(FedPIDAvg(0.0, 0.0), [-1.0, -1.0], [-3.0, -2.0]) == pytest.approx(12 / 7)


# --- in a federation ------------------------------------------------------------------------------


class Noting(FedControl):
    """Keeps what clients report."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def update(self, clients):
        losses = zip(clients.extras["loss_before"], clients.extras["loss_after"], strict=True)
        for client, pair, delta in zip(
            clients.clients.tolist(), losses, clients.delta, strict=True
        ):
            self.seen[client] = (*map(float, pair), delta.clone())
        super().update(clients)


GROUPS = partial(VectorizedClients, group_size=3, compile=False)


@pytest.mark.parametrize("options", [{}, {"wrap": GROUPS}], ids=["one by one", "vectorized"])
def test_losses_are_those_of_all_samples_by_the_clients_own_models(simulate, data, blobs, options):
    uneven, rule = {"partition": QuantitySkew(2.0), "seed": 1}, Noting()
    federation = data(blobs(70), batch_size=7, eval_batch_size=5, **uneven)
    simulate(aggregator=rule, datamodule=federation, rounds=1, quiet=False, **options)
    assert len(rule.seen) == 4
    for client, (before, after, delta) in rule.seen.items():
        x, y = federation.train.fetch(federation.parts[client])
        for found, vector in ((before, rule.server), (after, rule.server + delta)):
            logits = x @ vector[:18].view(3, 6).T + vector[18:]
            expected = torch.nn.functional.cross_entropy(logits, y).item()
            assert found == pytest.approx(expected, abs=1e-12)


def test_a_client_whose_loss_is_not_finite_is_dropped(fit, data):
    """Its update would be fine, and its loss would stay with the rule for ever."""

    class Loud(ClientModule):
        def federated_losses(self, batch, *rest):
            found = super().federated_losses(batch, *rest)
            bad = self.trainer.current_epoch == 0 and len(batch[0]) == 28
            return torch.full_like(found, torch.inf) if bad else found

    module = Loud(torch.nn.Linear(6, 3)).double()
    loop = FederatedLoop(aggregator=FedControl())
    keys = [0] * 28 + [1] * 30 + [2] * 31 + [3] * 31
    sizes = data(partition=Natural(), keys=keys)
    with pytest.warns(UserWarning, match="dropped 1 of 4 client updates"):
        fit(module, loop, sizes, rounds=3)
    assert [row["dropped_clients"] for row in loop.rows] == ["0", "", ""]
    assert all(p.isfinite().all() for p in module.parameters())
