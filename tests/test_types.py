"""What the rooms say to each other."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fl.types import (
    ClientUpdate,
    FederatedData,
    FederationError,
    Feedback,
    RoundPlan,
    Step,
    full,
)


def plan(clients=(4, 7), num_steps=(1, 2), **options):
    return RoundPlan(0, 0, torch.tensor(clients), torch.tensor(num_steps), **options)


def test_a_schedule_goes_client_after_client():
    assert plan(num_steps=(1, 3)).schedule == [
        Step((0,), first=True, last=True),
        Step((1,), first=True, last=False),
        Step((1,), first=False, last=False),
        Step((1,), first=False, last=True),
    ]


@settings(max_examples=30, deadline=None)
@given(num_steps=st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_every_client_begins_once_ends_once_and_makes_its_steps(num_steps):
    found = plan(range(len(num_steps)), num_steps)
    schedule = found.schedule
    for row, n in enumerate(num_steps):
        own = [step for step in schedule if step.rows == (row,)]
        assert len(own) == n
        assert [step.first for step in own] == [True] + [False] * (n - 1)
        assert [step.last for step in own] == [False] * (n - 1) + [True]
    assert [step.rows[0] for step in schedule] == sorted(step.rows[0] for step in schedule)
    assert found.schedule is schedule


def test_a_changed_plan_has_a_schedule_of_its_own():
    first = plan()
    assert len(first.schedule) == 3
    assert len(replace(first, num_steps=torch.tensor([5, 5])).schedule) == 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clients": (), "num_steps": ()}, "round 1 has no clients"),
        ({"num_steps": (1,)}, r"num_steps has shape \(1,\) for 2 clients"),
        ({"num_steps": 3}, r"num_steps has shape \(\) for 2 clients"),
        ({"lr": torch.ones(3)}, r"lr has shape \(3,\) for 2 clients"),
        ({"values": {"mu": torch.ones(2, 1)}}, r"mu has shape \(2, 1\) for 2 clients"),
        ({"num_steps": (3, 0)}, "client 7 would make 0 local steps in round 1"),
        ({"num_steps": (-2, 1)}, "client 4 would make -2 local steps"),
        ({"num_steps": (1.0, 2.0)}, r"num_steps must be whole numbers, got tensor\(\[1., 2.\]\)"),
        ({"num_steps": (1.0, float("nan"))}, "num_steps must be whole numbers"),
        ({"lr": torch.tensor([0.1, float("nan")])}, "lr must be finite and at least 0"),
        ({"lr": torch.tensor([float("inf"), 0.1])}, "lr must be finite and at least 0"),
        ({"lr": torch.tensor([0.1, -0.1])}, "lr must be finite and at least 0"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(options, words):
    with pytest.raises(FederationError, match=words):
        plan(**options)


def test_a_learning_rate_of_zero_and_any_further_value_are_fine():
    found = plan(lr=torch.tensor([0.0, 0.1]), values={"mu": torch.tensor([-1.0, float("nan")])})
    assert found.values["mu"][0] == -1


@pytest.mark.parametrize(
    "changes",
    [
        {"delta": torch.zeros(3, 4)},
        {"delta": torch.zeros(2)},
        {"delta": torch.zeros(2, 4, 1)},
        {"num_samples": torch.ones(3)},
        {"num_samples": torch.ones(2, 1)},
        {"clients": torch.tensor([0])},
    ],
)
def test_an_update_has_one_row_a_client(changes):
    fitting = {
        "clients": torch.tensor([0, 1]),
        "delta": torch.zeros(2, 4),
        "num_samples": torch.ones(2),
    }
    assert ClientUpdate(**fitting).loss_before is None
    with pytest.raises(FederationError, match="an update has one row a client"):
        ClientUpdate(**fitting | changes)


def test_one_value_is_for_all_clients_and_several_are_one_for_each():
    clients = torch.tensor([3, 8])
    for value in (0.5, torch.tensor(0.5)):
        assert full(value, clients).tolist() == [0.5, 0.5]
    assert full(torch.tensor([1, 2]), clients).tolist() == [1, 2]
    assert full(torch.ones(3), clients).shape == (3,)  # which a plan refuses


def test_a_federation_error_is_one_that_lightning_and_python_know():
    assert issubclass(FederationError, MisconfigurationException)
    assert issubclass(FederationError, ValueError)


def test_data_of_a_federation_are_known_by_what_they_have(data):
    federated = data()
    federated.setup("fit")
    assert isinstance(federated, FederatedData)
    assert not isinstance(object(), FederatedData)


def test_feedback_is_a_plan_and_two_losses():
    feedback = Feedback(plan(), None, 0.5)
    assert (feedback.val_loss_before, feedback.val_loss) == (None, 0.5)
