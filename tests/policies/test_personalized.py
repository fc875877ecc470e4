"""Personalized policies: draws, updates by hand, contributions by brute force."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from feedback import feedback as told
from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.callbacks import FederatedLoop, RunReport
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.federation.round import Round
from lightning_fl.policies import PersonalizedPolicyGradient, Schedule
from lightning_fl.types import FederationError
from written_plainly import Lost

TWO = [{"lr": 0.1, "num_steps": 2}, {"lr": 0.3, "num_steps": 5}]
RAW = {"floor": 0.0, "baseline": False, "normalize": False}


def feedback(round, clients, contributions=None, weights=None, dropped=None, **metrics):
    given = None if contributions is None else torch.tensor(contributions, dtype=torch.float64)
    options = {"clients": clients, "metrics": metrics, "dropped": dropped or {}}
    weights = torch.full((len(clients),), 1 / len(clients)) if weights is None else weights
    return told(round, weights=weights, contributions=lambda: given, **options)


def test_draws_belong_to_round_and_client_and_follow_the_probabilities():
    policy = PersonalizedPolicyGradient(TWO, seed=1, floor=0.1)
    policy.logits[3] = torch.tensor([0.0, 2.0])
    alone, together = policy.sample(5, torch.tensor([3])), policy.sample(5, torch.tensor([0, 3]))
    assert alone["lr"][0] == together["lr"][1]
    assert together["num_steps"].dtype == torch.int64
    p = policy.probabilities(torch.tensor([3]))[0, 1].item()
    assert p == pytest.approx(0.9 * math.exp(2) / (1 + math.exp(2)) + 0.05)
    drawn = [policy.sample(t, torch.tensor([3]))["lr"][0] == 0.3 for t in range(2000)]
    assert sum(drawn) / 2000 == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 2000))


def test_credit_by_hand():
    """alpha -= eta g (onehot - p)."""
    policy = PersonalizedPolicyGradient(TWO, step=0.5, seed=1, **RAW)
    policy.logits[:2] = torch.tensor([[0.2, -0.4], [1.0, 0.3]])
    before, clients = policy.logits.clone(), [0, 1, 5]
    chosen = (policy.sample(0, torch.tensor(clients))["lr"] == 0.3).long()
    policy.update(feedback(0, clients, [0.7, -0.2, 0.1]))
    for client, c, g in zip(clients, chosen, [0.7, -0.2, 0.1], strict=True):
        p = before[client].softmax(0)
        expected = before[client] - 0.5 * g * (F.one_hot(c, 2) - p)
        torch.testing.assert_close(policy.logits[client], expected, atol=1e-14, rtol=0)


def test_the_floor_is_in_the_gradient():
    """Against autograd of log((1 - e) softmax + e / H)."""
    policy = PersonalizedPolicyGradient(TWO, step=1.0, seed=1, **(RAW | {"floor": 0.4}))
    policy.logits[0] = torch.tensor([0.5, -1.0])
    logits = policy.logits[0].clone().requires_grad_()
    chosen = int(policy.sample(0, torch.tensor([0]))["lr"] == 0.3)
    (0.6 * logits.softmax(0) + 0.2).log()[chosen].backward()
    policy.update(feedback(0, [0], [0.3]))
    torch.testing.assert_close(policy.logits[0], logits.detach() - 0.3 * logits.grad)


def test_reward_by_hand_with_a_running_baseline():
    options = RAW | {"baseline": True}
    policy = PersonalizedPolicyGradient(TWO, "reward", step=1.0, seed=1, **options)
    policy.update(feedback(0, [0, 1], val_acc=0.5))
    assert not policy.logits.any()  # nothing to compare with yet
    chosen = (policy.sample(1, torch.tensor([0, 1]))["lr"] == 0.3).long()
    policy.update(feedback(1, [0, 1], val_acc=0.8))
    for client in (0, 1):
        expected = 0.3 * (F.one_hot(chosen[client], 2) - 0.5).double()
        torch.testing.assert_close(policy.logits[client], expected, atol=1e-12, rtol=0)
    assert policy.means[0, 0] == pytest.approx(-(0.9 * 0.5 + 0.1 * 0.8))


@pytest.mark.parametrize("cause", ["non_finite", "late", "dropped_out"])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_setting_that_spoils_an_update_counts_as_the_worst(normalize, cause):
    """A client that is lost by chance learns nothing."""
    policy = PersonalizedPolicyGradient(TWO, step=0.5, seed=1, **RAW | {"normalize": normalize})
    clients = torch.arange(3)
    chosen = (policy.sample(0, clients)["lr"] == 0.3).long()
    weights = torch.tensor([0.6, 0.0, 0.4])
    policy.update(feedback(0, [0, 1, 2], [0.1, math.nan, -0.3], weights, {1: cause}))
    worst = 0.0 if cause == "dropped_out" else 3.0 if normalize else 0.3
    expected = -0.5 * worst * (F.one_hot(chosen[1], 2) - 0.5).double()
    torch.testing.assert_close(policy.logits[1], expected, atol=1e-7, rtol=0)
    assert not policy.means.any()


def test_a_policy_hears_which_clients_were_dropped(simulate):
    heard = []

    class Listens(Schedule):
        def update(self, feedback):
            heard.append(feedback.dropped)

    simulate(Lost(2), policy=Listens(num_steps=1), rounds=1)
    assert heard == [{2: "crashed"}]


# --- in a federation ------------------------------------------------------------------------------


@pytest.fixture
def federation(simulate, data, blobs):
    """Train with a policy; return the loop, the data and the module."""

    def train(*callbacks, rounds=1, **options):
        samples = data(blobs(90), val=blobs(50, seed=2), eval_batch_size=20, seed=1)
        policy = PersonalizedPolicyGradient(TWO, step=0.5, floor=0.0)
        options |= {"policy": policy, "seed": 4, "client_fraction": 0.75, "datamodule": samples}
        module, loop = simulate(*callbacks, rounds=rounds, quiet=False, **options)
        return loop, samples, module

    return train


PAIRS = partial(VectorizedClients, group_size=2, compile=False)


@pytest.mark.parametrize("options", [{}, {"wrap": PAIRS}], ids=["one by one", "vectorized"])
def test_credits_are_derivatives_by_dummies(federation, monkeypatch, options):
    """dL/d1_i of L(w + sum_i 1_i p_i (w_i - w)) at ones, by autograd through all of it."""
    seen = {}

    def update(self, found):
        seen["contributions"], seen["weights"] = found.contributions(), found.weights
        seen["plan"] = found.plan

    monkeypatch.setattr(PersonalizedPolicyGradient, "update", update)
    moves = {}
    collect = Round.collect

    def noted(self, step):
        collect(self, step)
        moves.update({c: m.clone() for c, m in self.updates.items()})
        seen["server"] = self.server.vector

    monkeypatch.setattr(Round, "collect", noted)
    _, data, module = federation(**options)
    clients = seen["plan"].clients.tolist()
    n = data.num_samples[clients].double()
    p = n / n.sum()
    torch.testing.assert_close(seen["weights"], p)
    ones = torch.ones(3, dtype=torch.float64, requires_grad=True)
    w = seen["server"] + sum(ones[i] * p[i] * moves[c] for i, c in enumerate(clients))
    x, y = data.val.tensors
    loss = F.cross_entropy(x @ w[:18].view(3, 6).T + w[18:], y)
    loss.backward()
    torch.testing.assert_close(seen["contributions"], ones.grad, atol=1e-12, rtol=0)
    assert module.training


def test_probabilities_are_in_the_table_and_drawn(federation):
    loop, _, _ = federation(RunReport(), rounds=2)
    assert 0 < loop.rows[-1]["p_0"] < 1


def test_without_validation_or_losses_it_is_refused(fit, foreign, blobs):
    loop = FederatedLoop(policy=PersonalizedPolicyGradient(TWO), buffers="average")
    with pytest.raises(FederationError, match=r"requires a method federated_losses\(batch\)"):
        fit(foreign(), loop)
    nothing = FederatedDataModule(TensorDataset(*blobs(40).tensors), num_clients=2, val_size=0)
    module = ClientModule(nn.Linear(6, 3)).double()
    with pytest.raises(FederationError, match="no validation samples"):
        fit(module, FederatedLoop(policy=PersonalizedPolicyGradient(TWO)), nothing)
    policy = PersonalizedPolicyGradient(TWO, "reward")
    with pytest.raises(FederationError, match="requires the metric 'val_acc' after every round"):
        policy.update(feedback(0, [0], None, val_loss=1.0))


@pytest.mark.parametrize(
    ("candidates", "words"),
    [
        ([{"lr": 0.1}], "at least two settings"),
        ([{"lr": 0.1}, {"num_steps": 3}], "with the same names"),
        ([{"lr": 0.0}, {"lr": 0.1}], "lr in candidates must be a finite number greater than 0"),
        ([{"num_steps": 1}, {"num_steps": 1.5}], "num_steps in candidates must be an integer"),
        ([{"num_steps": 1, "local_epochs": 2}] * 2, "num_steps=.* excludes local_epochs="),
    ],
)
def test_candidates_that_do_not_fit_are_refused(candidates, words):
    with pytest.raises(FederationError, match=words):
        PersonalizedPolicyGradient(candidates)


def test_a_client_that_is_lost_learns_nothing_from_a_shared_reward():
    policy = PersonalizedPolicyGradient(TWO, "reward", seed=1, normalize=False)
    for t, accuracy in enumerate((0.5, 0.6)):
        policy.update(feedback(t, [0, 1], dropped={1: "crashed"}, val_acc=accuracy))
    assert policy.logits[0].any()
    assert not policy.logits[1].any()
