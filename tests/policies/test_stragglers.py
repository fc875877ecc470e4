"""Stragglers: how many, how much they do, the same for every method, left out or taken in."""

import pytest
import torch

from lightning_fl.callbacks import FederatedLoop
from lightning_fl.contracts.context import Federation
from lightning_fl.policies import HyperparameterPolicy, Schedule, StagedPolicy, Stragglers
from lightning_fl.types import Cohort

CLIENTS = torch.arange(10)


@pytest.mark.parametrize(("fraction", "slow"), [(0.0, 0), (0.5, 5), (0.9, 9), (1.0, 10)])
def test_so_many_do_less(fraction, slow):
    policy = Stragglers(fraction, Schedule(num_steps=50), seed=0)
    for round in range(20):
        steps = policy.sample(round, CLIENTS)["num_steps"]
        assert int((steps < 50).sum()) == slow
        assert int(steps.min()) >= 1


def test_epochs_are_uniform_from_one_to_one_less_than_all():
    policy, seen = Stragglers(1.0, Schedule(local_epochs=5), seed=0), torch.zeros(6)
    for round in range(400):
        epochs = policy.sample(round, CLIENTS)["local_epochs"]
        assert torch.equal(epochs, epochs.floor())
        seen += torch.bincount(epochs.long(), minlength=6)
    assert seen[[0, 5]].tolist() == [0, 0]
    assert (seen[1:5] / seen.sum() - 0.25).abs().max() < 0.03  # 4 standard deviations


def test_one_epoch_becomes_a_part_and_one_step_stays():
    epochs = Stragglers(1.0, Schedule(local_epochs=1), seed=0).sample(3, CLIENTS)["local_epochs"]
    assert (epochs.min() > 0) & (epochs.max() < 1)
    steps = Stragglers(1.0, Schedule(num_steps=1), seed=0).sample(3, CLIENTS)["num_steps"]
    assert steps.unique().tolist() == [1]


def test_who_they_are_does_not_depend_on_the_method():
    kept = Stragglers(0.5, Schedule(num_steps=50, lr=0.1), seed=2)
    dropped = Stragglers(0.5, Schedule(local_epochs=9), drop=True, seed=2)
    other = Stragglers(0.5, Schedule(num_steps=50), seed=3)
    for round in range(5):
        slow = kept.sample(round, CLIENTS)["num_steps"] < 50
        assert torch.equal(~slow, dropped.sample(round, CLIENTS)["participates"])
    differ = [not torch.equal(other.sample(t, CLIENTS)["num_steps"] < 50, slow) for t in range(9)]
    assert any(differ)


@pytest.mark.parametrize("drop", [False, True])
def test_whom_the_policy_excludes_does_not_train_either(drop):
    """Its values may be numbers, as in a policy by itself."""

    class Even(HyperparameterPolicy):
        def sample(self, round, clients):
            return {"num_steps": 9, "participates": clients % 2 == 0}

    values = Stragglers(0.5, Even(), drop=drop, seed=0).drawn(0, CLIENTS)
    slow = Stragglers(0.5, Schedule(num_steps=9), seed=0).sample(0, CLIENTS)["num_steps"] < 9
    even = CLIENTS % 2 == 0
    assert torch.equal(values["participates"], even & ~slow if drop else even)
    assert torch.equal(values["num_steps"] < 9, slow & (not drop))


def test_stages_draw_different_stragglers():
    policy = StagedPolicy([2], [Stragglers(0.5, Schedule(num_steps=100)) for _ in range(2)])
    policy.setup(Federation(100, Cohort(100, 100)))
    drawn = [policy.sample(round, torch.arange(100))["num_steps"] for round in range(4)]
    assert len({tuple(steps.tolist()) for steps in drawn}) == 4


def test_who_is_dropped_does_not_train(fit, foreign):
    loop = FederatedLoop(policy=Stragglers(0.5, drop=True), buffers="average", seed=0)
    fit(foreign(), loop, rounds=3)
    assert [row["clients"] for row in loop.rows] == [2, 2, 2]
    everyone = FederatedLoop(policy=Stragglers(1.0, drop=True), buffers="average", seed=0)
    fit(foreign(), everyone, rounds=2)
    assert [row["clients"] for row in everyone.rows] == [1, 1]
