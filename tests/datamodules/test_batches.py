"""Which samples make up the batches of a round and of an evaluation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fl.datamodules.batches import (
    Batching,
    EvaluationBatches,
    RoundBatches,
    client_batches,
)
from lightning_fl.partition import Natural
from lightning_fl.types import FederationError, RoundPlan
from numbered import batches, federated, joined, numbered, numbers, plan, rng


def take(count, part, *batching, **options):
    stream = client_batches(part, Batching(*batching, **options), rng())
    return [next(stream) for _ in range(count)]


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 30), size=st.integers(1, 40) | st.none(), drop_last=st.booleans())
def test_each_pass_covers_all_samples_once(n, size, drop_last):
    part = torch.arange(n) * 10
    data = federated(numbered(n), num_clients=1, batch_size=size, drop_last=drop_last)
    count = int(data.batches_per_epoch)
    found = take(3 * count, part, size, drop_last=drop_last)
    for i in range(3):
        one_pass = torch.cat(found[i * count : (i + 1) * count]).tolist()
        assert len(set(one_pass)) == len(one_pass)
        assert set(one_pass) <= set(part.tolist())
        if drop_last:
            assert {len(b) for b in found} == {min(size or n, n)}
            assert n - len(one_pass) < min(size or n, n)
        else:
            assert len(one_pass) == n


@settings(max_examples=60, deadline=None)
@given(
    n=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    batch_size=st.none() | st.integers(1, 12),
    drop_last=st.booleans(),
    replacement=st.booleans(),
    start=st.integers(0, 9),
    count=st.integers(1, 9),
)
def test_the_sizes_of_batches_are_those_that_come(
    n, batch_size, drop_last, replacement, start, count
):
    keys = [client for client, size in enumerate(n) for _ in range(size)]
    options = {"batch_size": batch_size, "drop_last": drop_last, "replacement": replacement}
    natural = {"partition": Natural(), "keys": keys, "num_clients": None}
    data = federated(numbered(sum(n)), **natural, **options)
    assert data.num_samples.tolist() == n
    clients = list(reversed(range(len(n))))
    found = data.batch_sizes(torch.tensor(clients), start, count)
    assert found.shape == (count, len(n))
    for k, client in enumerate(clients):
        batches = take(start + count, data.parts[client], batch_size, replacement, drop_last)
        sizes = [len(batch) for batch in batches[start:]]
        assert found[:, k].tolist() == sizes


def test_with_replacement_every_batch_is_drawn_from_all_samples():
    found = take(500, torch.arange(10), 4, replacement=True)
    assert {len(batch) for batch in found} == {4}
    assert any(len(batch.unique()) < 4 for batch in found)
    shares = torch.cat(found).bincount() / 2000
    assert shares.tolist() == pytest.approx([0.1] * 10, abs=0.03)
    # Passes would have every sample as often as any other.
    assert shares.unique().numel() > 1


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"batch_size": 4}, [4, 4, 2]),
        ({"batch_size": 4, "drop_last": True}, [4, 4]),
        ({"batch_size": 4, "replacement": True}, [4, 4, 4]),
        ({"batch_size": 10}, [10]),
        ({"batch_size": 99}, [10]),
        ({"batch_size": 99, "drop_last": True}, [10]),
        ({"batch_size": None}, [10]),
        ({"batch_size": None, "drop_last": True}, [10]),
        ({"batch_size": 1}, [1] * 10),
    ],
)
def test_an_epoch_of_a_client_has_these_batches(options, sizes):
    data = federated(numbered(20), num_clients=2, **options)
    assert data.batches_per_epoch.tolist() == [len(sizes)] * 2
    found = numbers(batches(data))
    assert [len(b) for b in found] == sizes * 2
    for client, part in enumerate(data.parts):
        own = found[client * len(sizes) : (client + 1) * len(sizes)]
        assert set(joined(own)) <= set(part.tolist())


def test_as_many_clients_as_samples_and_no_more():
    assert sorted(joined(numbers(batches(federated(numbered(7), num_clients=7))))) == [*range(7)]
    with pytest.raises(FederationError, match=r"num_clients must be .*\[1, 6\], got 7"):
        federated(numbered(7), num_clients=7, val_size=1)


def test_a_round_asked_for_twice_has_the_same_batches_and_another_round_has_not():
    data = federated(batch_size=4)
    first = numbers(batches(data))
    data.plan = lambda: plan(data)
    loader = data.train_dataloader()
    assert numbers(loader) == numbers(loader) == first
    assert len(loader) == len(first)
    assert numbers(batches(data, round=1)) != first
    assert numbers(batches(data, seed=1)) != first


def test_adding_a_client_changes_no_batch_of_the_others():
    parts = list(torch.arange(30).split(10))

    def of(clients):
        steps = torch.full((len(clients),), 5)
        found = RoundBatches(
            RoundPlan(1, 2, torch.tensor(clients), steps), parts[: max(clients) + 1], Batching(3)
        )
        found = [(batch.index.tolist(), batch.keys) for batch in found]
        return {client: found[5 * i : 5 * i + 5] for i, client in enumerate(clients)}

    two, three = of([0, 1]), of([2, 1, 0])
    assert two == {client: three[client] for client in (0, 1)}
    assert two[0] != two[1]


@given(n=st.integers(1, 40), size=st.integers(1, 12), world_size=st.integers(1, 4))
def test_processes_share_evaluation(n, size, world_size):
    if n < world_size:
        with pytest.raises(FederationError, match=f"{n} samples cannot be evaluated by"):
            EvaluationBatches(n, size, 0, 0, world_size)
        return
    shares = [EvaluationBatches(n, size, 0, rank, world_size) for rank in range(world_size)]
    batches = [[batch.index.tolist() for batch in share] for share in shares]
    # Each sample once; as many batches everywhere, since a module may wait in each; none empty.
    assert sorted(i for share in batches for batch in share for i in batch) == list(range(n))
    assert {len(share) for share in batches} == {len(shares[0])}
    assert all(1 <= len(batch) <= max(size, 2) for share in batches for batch in share)


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_share_the_samples_of_a_batch(world_size):
    plan = RoundPlan(0, 0, torch.tensor([0, 1]), torch.tensor([2, 1]))
    parts = [torch.arange(7), torch.tensor([9])]
    whole = [batch.index for batch in RoundBatches(plan, parts, Batching(4))]
    shares = [
        [batch.index for batch in RoundBatches(plan, parts, Batching(4), rank, world_size)]
        for rank in range(world_size)
    ]
    for i, batch in enumerate(whole):
        given = [share[i].tolist() for share in shares]
        if len(batch) >= world_size:
            assert sorted(i for share in given for i in share) == sorted(batch.tolist())
        else:  # they take one that has no weight
            assert given == [[9]] * world_size


def test_processes_that_share_a_batch_have_keys_of_their_own():
    plan, parts = RoundPlan(0, 0, torch.tensor([1]), torch.tensor([3])), [None, torch.arange(7)]
    shares = [RoundBatches(plan, parts, Batching(4), rank, 2) for rank in range(2)]
    keys = [key for share in shares for batch in share for key in batch.keys]
    assert len(set(keys)) == 6
    alone = [key for batch in RoundBatches(plan, parts, Batching(4)) for key in batch.keys]
    assert [key[:5] for key in keys] == alone * 2
