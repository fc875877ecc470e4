"""AdaptiveMu: the heuristic on given losses, in a fit, and resumed."""

import math
from itertools import pairwise

import pytest
import torch

from feedback import feedback
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.objectives import Proximal
from lightning_fl.policies import AdaptiveMu, DiscreteGaussianReinforce, Schedule
from lightning_fl.types import FederationError
from two_classes import samples
from written_plainly import module


@pytest.mark.parametrize(
    ("mu", "losses", "expected"),
    [
        (0.0, [1.0, 2.0, 3.0, 3.0, 4.0], [0.0, 0.1, 0.2, 0.2, 0.3]),
        (1.0, [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, -1], [1.0] * 5 + [0.9] * 5 + [0.8]),
        # An increase, or a loss that stays, ends the rounds in a row.
        (0.5, [9, 8, 7, 6, 5, 6, 5, 4, 3, 2], [0.5] * 5 + [0.6] * 5),
        (0.5, [9, 8, 7, 6, 5, 5, 4, 3, 2, 1], [0.5] * 10),
        (0.05, [9, 8, 7, 6, 5, 4, 5], [0.05] * 5 + [0.0, 0.1]),
        (0.3, [*range(20, 0, -1)], [0.3] * 5 + [0.2] * 5 + [0.1] * 5 + [0.0] * 5),
        # The last finite loss is what the next one is compared with.
        (0.0, [1.0, math.nan, math.inf, 0.9, 1.0], [0.0, 0.1, 0.2, 0.2, 0.3]),
    ],
)
def test_the_value_follows_the_losses(mu, losses, expected):
    policy, found = AdaptiveMu(mu), []
    for loss in losses:
        policy.learn(loss)
        found.append(float(policy.mu))
    assert found == expected


def test_the_first_round_is_compared_with_the_initial_model():
    policy = AdaptiveMu(patience=1, mu=1.0)
    policy.update(feedback(before=2.0, after=1.5))
    assert float(policy.mu) == 0.9
    policy.update(feedback(1, before=99.0, after=1.6))  # the loss after a round is known already
    assert float(policy.mu) == 1.0
    with pytest.raises(FederationError, match="round 3 was not validated"):
        policy.update(feedback(2, before=1.6))


def test_client_losses_are_weighted_and_dropped_clients_left_out():
    policy = AdaptiveMu(loss="clients")
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    policy.update(feedback(losses=[1.0, 3.0], weights=half))
    assert float(policy.last_loss) == 2.0
    one = torch.tensor([1.0, 0.0], dtype=torch.float64)
    policy.update(feedback(losses=[2.5, math.nan], weights=one))
    assert (float(policy.last_loss), float(policy.mu)) == (2.5, 0.1)
    policy.update(feedback(losses=[math.nan] * 2, weights=0 * one))
    assert (float(policy.last_loss), float(policy.mu)) == (2.5, 0.1)


def test_the_value_follows_the_validation_loss_of_a_run(fit):
    policy = AdaptiveMu(0.5, patience=1, policy=Schedule(lr=3.0, num_steps=4))
    loop = FederatedLoop(policy=policy, seed=1, clients_per_round=3)
    fit(module([Proximal(0.0)]), loop, samples(), rounds=6, num_sanity_val_steps=None)
    losses, mu = [row["val_loss"] for row in loop.rows], [row["mu"] for row in loop.rows]
    changes = [0.1 if b > a else -0.1 for a, b in pairwise(losses[:-1])]
    assert [b - a for a, b in pairwise(mu[1:])] == pytest.approx(changes)
    assert len(set(changes)) == 2


def test_the_other_policy_learns_too():
    inner = DiscreteGaussianReinforce({"lr": [0.1, 0.2], "num_steps": [2, 3]}, seed=1)
    policy = AdaptiveMu(0.1, policy=inner)
    assert policy.sample(0, torch.arange(2)).keys() == {"lr", "num_steps", "mu"}
    assert policy.max_local_steps(0, torch.ones(2)) == 3
    policy.update(feedback(before=2.0, after=1.0))
    assert inner.rewards.tolist() == [0.5]
    assert policy.metrics() == inner.metrics()


def test_policy_without_a_use_for_mu_raises(fit):
    with pytest.raises(FederationError, match="AdaptiveMu sets mu, and ClientModule declares"):
        fit(module(), FederatedLoop(policy=AdaptiveMu(), seed=1), samples())
    twice = AdaptiveMu(policy=Schedule(values={"mu": 1.0}))
    with pytest.raises(FederationError, match="both AdaptiveMu and Schedule set mu"):
        fit(module([Proximal(0.0)]), FederatedLoop(policy=twice, seed=1), samples())
