"""What every hyperparameter policy keeps to; a new one earns these tests with one row."""

import copy

import pytest
import torch

from feedback import feedback
from lightning_fl.contracts.plan import full
from lightning_fl.policies import (
    AdaptiveMu,
    DiscreteGaussianReinforce,
    Schedule,
    StagedPolicy,
    Stragglers,
)
from lightning_fl.runners import Phase
from lightning_fl.types import FederationError, RoundPlan

POLICIES = {
    "Schedule()": Schedule,
    "Schedule(lr, steps)": lambda: Schedule(lr=0.1, num_steps=3, decay=0.9),
    "Schedule(decay)": lambda: Schedule(local_epochs=2.5, decay=0.9),
    "DiscreteGaussianReinforce": DiscreteGaussianReinforce,
    "DiscreteGaussianReinforce(precision)": lambda: DiscreteGaussianReinforce(learn_precision=True),
    "StagedPolicy": lambda: StagedPolicy([1], [Schedule(lr=0.1), DiscreteGaussianReinforce()]),
    "AdaptiveMu": lambda: AdaptiveMu(0.5, patience=1),
    "Stragglers": lambda: Stragglers(0.5),
    "Stragglers(learns)": lambda: Stragglers(0.9, DiscreteGaussianReinforce(), seed=4),
}
every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
COHORTS = [torch.tensor([0]), torch.tensor([5, 2, 11])]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def learned(policy, rounds=3):
    """The policy after some rounds."""
    for t in range(rounds):
        policy.sample(t, COHORTS[1])
        before, after = None if t == 0 else 1 / t, None if t == 1 else 1 / (t + 1)
        if "val_loss" in policy.learns_from:
            before, after = 1 / (t + 1), 1 / (t + 2)
        policy.update(feedback(t, before, after, clients=COHORTS[1].tolist()))
    return policy


@every_policy
@pytest.mark.parametrize("clients", COHORTS, ids=len)
@pytest.mark.parametrize("round", [0, 1, 1000])
def test_its_values_make_a_plan(make, clients, round):
    values = make().sample(round, clients)
    assert len({"num_steps", "local_epochs"} & values.keys()) == 1
    rows = {name: full(value, clients) for name, value in values.items()}
    for name, row in rows.items():
        assert row.shape == clients.shape
        assert (row.isfinite() & (row > 0)).all(), name
    steps = rows.pop("num_steps", torch.ones_like(clients))
    lr = rows.pop("lr", None)
    RoundPlan(0, round, clients, steps, lr, rows)


@every_policy
def test_sample_is_repeatable_and_changes_nothing(make):
    policy, clients = learned(make()), COHORTS[1].clone()
    before, random = copy.deepcopy(policy.state_dict()), torch.get_rng_state()
    first = policy.sample(3, clients)
    torch.manual_seed(1)
    assert same(first, policy.sample(3, clients))
    assert same(before, policy.state_dict())
    assert torch.equal(clients, COHORTS[1])
    torch.set_rng_state(random)
    policy.sample(3, clients)
    assert torch.equal(torch.get_rng_state(), random)


@every_policy
def test_its_state_is_saved_and_loaded(make, tmp_path):
    policy, again = learned(make()), make()
    torch.save(policy.state_dict(), tmp_path / "policy.pt")
    again.load_state_dict(torch.load(tmp_path / "policy.pt", weights_only=True))
    assert policy.metrics() == again.metrics()
    assert same(policy.sample(3, COHORTS[1]), again.sample(3, COHORTS[1]))
    learned(policy), learned(again)
    assert same(policy.sample(6, COHORTS[1]), again.sample(6, COHORTS[1]))


WRAPPERS = {
    "StagedPolicy": lambda policy: StagedPolicy([1], [policy, copy.copy(policy)]),
    "AdaptiveMu": lambda policy: AdaptiveMu(policy=policy, loss="clients"),
    "Stragglers": lambda policy: Stragglers(0.5, policy),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrapper_has_phases_and_monitor_of_its_policy(wrap):
    phases = [Phase("shared", num_steps=1), Phase("local")]
    policy = wrap(DiscreteGaussianReinforce(monitor="loss", phases=phases))
    assert (policy.phases, policy.monitor) == (phases, "loss")


def test_policies_with_different_monitors_raise():
    one, other = (DiscreteGaussianReinforce(monitor=name) for name in ("a", "b"))
    with pytest.raises(FederationError, match="one validation loss, got a and b"):
        StagedPolicy([1], [one, other])
    with pytest.raises(FederationError, match="one validation loss, got a and c"):
        AdaptiveMu(policy=one, monitor="c")


def test_stages_with_different_phases_raise():
    with pytest.raises(FederationError, match="policies must have the same phases"):
        StagedPolicy([1], [Schedule(), Schedule(phases=[Phase("shared")])])
