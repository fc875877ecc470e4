"""Hyperparameters fixed in advance."""

import pytest
import torch

from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError

CLIENTS = torch.tensor([3, 8])


def values(round=0, **options):
    return {
        name: value.tolist() for name, value in Schedule(**options).sample(round, CLIENTS).items()
    }


def test_by_default_a_client_makes_one_pass_at_the_modules_own_rate():
    assert values() == {"local_epochs": [1, 1]}


def test_work_is_steps_or_passes():
    assert values(num_steps=5) == {"num_steps": [5, 5]}
    assert values(local_epochs=0.5) == {"local_epochs": [0.5, 0.5]}
    assert Schedule(num_steps=5).sample(0, CLIENTS)["num_steps"].dtype == torch.int64


def test_the_rate_decays_from_round_to_round():
    found = [values(t, lr=0.8, decay=0.5, num_steps=1)["lr"] for t in range(4)]
    assert found == [[0.8, 0.8], [0.4, 0.4], [0.2, 0.2], [0.1, 0.1]]


def test_without_a_rate_the_decay_is_a_factor():
    assert values(3, decay=0.5)["lr_factor"] == [0.125, 0.125]
    assert "lr" not in values(3, decay=0.5)


def test_two_kinds_of_work_are_refused():
    with pytest.raises(FederationError, match="num_steps=3 excludes local_epochs=1: set"):
        Schedule(num_steps=3, local_epochs=1)


def test_rates_are_in_float64():
    assert values(lr=0.1)["lr"] == [0.1, 0.1]


def test_steps_decay_to_one():
    policy = Schedule(num_steps=10, steps_decay=0.5)
    steps = [int(policy.sample(t, torch.tensor([0]))["num_steps"][0]) for t in range(6)]
    assert steps == [10, 5, 3, 1, 1, 1]
    with pytest.raises(FederationError, match="num_steps"):
        Schedule(steps_decay=0.5)
