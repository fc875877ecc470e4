"""What the rooms say to each other."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fl.contracts.plan import IDLE, full
from lightning_fl.types import ClientUpdate, FederatedData, FederationError, RoundPlan, Step


@given(
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    world_size=st.integers(1, 5),
    group_size=st.integers(1, 4),
    steps_per_batch=st.integers(1, 3),
)
def test_processes_share_the_clients(steps, world_size, group_size, steps_per_batch):
    options = {"group_size": group_size, "steps_per_batch": steps_per_batch}
    whole = plan(range(10, 10 + len(steps)), steps, world_size=world_size, **options)
    plans = [replace(whole, rank=rank) for rank in range(world_size)]
    # Each client trains once, somewhere.
    assert sorted(row for one in plans for row in one.rows) == list(range(len(steps)))
    for one in plans:
        assert one.shares == plans[0].shares
        firsts = [row for step in one.schedule if step.first for row in step.rows]
        assert sorted(firsts) == one.rows
        # Who waits does so at the end, and idle steps begin and end nothing.
        idle = [step == IDLE for step in one.schedule]
        assert idle == sorted(idle)
        assert not IDLE.first
        assert not IDLE.last
    # As many batches everywhere, and no more than the busiest process needs.
    assert len({len(one.schedule) for one in plans}) == 1
    assert any(IDLE not in one.schedule for one in plans)
    # Longest first, to who has least: at most 4/3 of the best, which has at least these.
    load = max(sum(steps[row] for row in one.rows) for one in plans)
    assert load <= 4 / 3 * max(sum(steps) / world_size, max(steps), _two_of(steps, world_size))


def _two_of(steps, world_size):
    """With more clients than processes somebody trains two of the longest of them."""
    longest = sorted(steps, reverse=True)[: world_size + 1]
    return sum(longest[-2:]) if len(longest) > world_size else 0


def plan(clients=(4, 7), num_steps=(1, 2), **options):
    return RoundPlan(0, 0, torch.tensor(clients), torch.tensor(num_steps), **options)


def test_processes_are_balanced_by_samples_and_not_by_steps():
    work = torch.tensor([10, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    shares = plan(range(11), [1] * 11, work=work, world_size=2).shares
    assert [int(work[rows].sum()) for rows in shares] == [10, 10]


def test_a_schedule_goes_client_after_client():
    schedule = plan(num_steps=(1, 3)).schedule
    assert schedule == [
        Step((0,), start=0, steps=1, last=True),
        Step((1,), start=0, steps=1, last=False),
        Step((1,), start=1, steps=1, last=False),
        Step((1,), start=2, steps=1, last=True),
    ]
    assert [step.first for step in schedule] == [True, True, False, False]


def test_groups_hold_clients_of_like_work_and_batches_several_steps():
    found = plan((4, 7, 9, 11, 12), (1, 5, 2, 4, 5), group_size=3, steps_per_batch=2)
    assert found.schedule == [
        Step((1, 4, 3), start=0, steps=2, last=False),
        Step((1, 4, 3), start=2, steps=2, last=False),
        Step((1, 4, 3), start=4, steps=1, last=True),
        Step((2, 0), start=0, steps=2, last=True),
    ]


@settings(max_examples=200, deadline=None)
@given(
    num_steps=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    group_size=st.integers(1, 14),
    steps_per_batch=st.integers(1, 10),
)
def test_vectorized_every_local_step_of_every_client_comes_once(
    num_steps, group_size, steps_per_batch
):
    options = {"group_size": group_size, "steps_per_batch": steps_per_batch}
    schedule = plan(range(len(num_steps)), num_steps, **options).schedule
    groups = [step.rows for step in schedule if step.first]
    # Everyone is in one group; groups are full but for one, and none waits for another's work.
    assert sorted(row for rows in groups for row in rows) == list(range(len(num_steps)))
    sizes = [len(rows) for rows in groups]
    assert max(sizes) <= group_size
    assert max(sizes) - min(sizes) <= 1
    assert len(groups) == -(-len(num_steps) // group_size)
    if group_size > 1:
        work = [num_steps[row] for rows in groups for row in rows]
        assert work == sorted(work, reverse=True)
    # A group's batches are one run of the schedule, from its first local step to its last.
    expected = []
    for rows in groups:
        most = max(num_steps[row] for row in rows)
        for start in range(0, most, steps_per_batch):
            steps = min(steps_per_batch, most - start)
            expected.append(Step(rows, start, steps, last=start + steps == most))
    assert schedule == expected


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_with_fixed_groups_the_same_clients_train_at_once_on_any_number_of_processes(world_size):
    def groups(world_size, fixed_groups=True):
        options = {"group_size": 3, "world_size": world_size, "fixed_groups": fixed_groups}
        given = plan(range(11), [1 + row % 4 for row in range(11)], **options)
        shares = [replace(given, rank=rank).schedule for rank in range(world_size)]
        return {step.rows for schedule in shares for step in schedule if step.rows}

    assert len(groups(1)) == 4
    assert groups(world_size) == groups(1)
    assert groups(world_size, fixed_groups=False) != groups(1)


def test_a_changed_plan_has_a_schedule_of_its_own():
    first = plan()
    assert len(first.schedule) == 3
    assert len(replace(first, num_steps=torch.tensor([5, 5])).schedule) == 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clients": (), "num_steps": ()}, "round 1 has no clients"),
        ({"num_steps": (1,)}, r"num_steps has shape \(1,\) for 2 clients"),
        ({"lr": torch.ones(3)}, r"lr has shape \(3,\) for 2 clients"),
        ({"hyperparameters": {"mu": torch.ones(2, 1)}}, r"mu has shape \(2, 1\) for 2 clients"),
        ({"num_steps": (3, 0)}, "num_steps in round 1 must be an integer of at least 1, got 0"),
        ({"num_steps": (1.0, float("nan"))}, "num_steps in round 1 must be an integer"),
        ({"lr": torch.tensor([0.1, -0.1])}, "lr in round 1 must be a finite number"),
        ({"lr": torch.tensor([0.1, float("nan")])}, "lr in round 1 must be a finite number"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(options, words):
    with pytest.raises(FederationError, match=words):
        plan(**options)


@pytest.mark.parametrize(
    "changes",
    [
        {"delta": torch.zeros(3, 4)},
        {"delta": torch.zeros(2)},
        {"num_samples": torch.ones(3)},
        {"num_samples": torch.ones(2, 1)},
        {"clients": torch.tensor([0])},
        {"num_steps": torch.ones(3)},
        {"lr": torch.ones(1)},
        {"extras": {"control": torch.ones(4, 2)}},
    ],
)
def test_an_update_has_one_row_a_client(changes):
    fitting = {
        "clients": torch.tensor([0, 1]),
        "delta": torch.zeros(2, 4),
        "num_samples": torch.ones(2),
    }
    assert ClientUpdate(**fitting).num_steps is None
    with pytest.raises(FederationError, match="one row for each"):
        ClientUpdate(**fitting | changes)


def test_one_value_is_for_all_clients_and_several_are_one_for_each():
    clients = torch.tensor([3, 8])
    for value in (0.5, torch.tensor(0.5)):
        assert full(value, clients).tolist() == [0.5, 0.5]
    assert full(torch.tensor([1, 2]), clients).tolist() == [1, 2]
    assert full(torch.ones(3), clients).shape == (3,)  # which a plan refuses


def test_data_of_a_federation_are_known_by_what_they_have(data):
    federated = data()
    federated.setup("fit")
    assert isinstance(federated, FederatedData)
    assert not isinstance(object(), FederatedData)
