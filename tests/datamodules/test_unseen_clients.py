"""Clients that never train: who they are, and what they take no part in."""

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.partition import ByLabel, Dirichlet, FromManifest, Manifest, Natural, summary
from lightning_fl.types import FederationError
from numbered import batches, federated, fitted, held, joined, lists, numbered, numbers

WRITERS = ["ada", "bob", "cyd", "dan", "eve"] * 12


def written(**options):
    options = {"partition": Natural(), "num_clients": None, "keys": WRITERS} | options
    return federated(**options)


def test_they_count_in_num_clients_and_nowhere_else():
    data = federated(partition=Dirichlet(1.0, min_size=5), num_clients=5, unseen_clients=0.4)
    assert data.num_clients == 5
    assert len(data.parts) == len(data.num_samples) == len(data.batches_per_epoch) == 3
    assert len(data.class_counts) == 3
    assert data.class_counts.sum() == data.num_samples.sum()
    unseen = set(torch.cat(data.unseen_parts).tolist())
    assert len(data.unseen_parts) == 2
    assert unseen.isdisjoint(joined(numbers(batches(data))))
    assert unseen | set(torch.cat(data.parts).tolist()) == set(range(60))
    data.plan = None
    assert unseen.isdisjoint(joined(numbers(data.train_dataloader())))  # the pooled baseline


def test_the_split_is_that_of_all_clients():
    options = {"partition": Dirichlet(0.3), "num_clients": 5}
    everyone = lists(federated(**options).parts)
    data = federated(**options, unseen_clients=["1", "3"])
    assert lists(data.parts) == [everyone[client] for client in (0, 2, 4)]
    assert lists(data.unseen_parts) == [everyone[client] for client in (1, 3)]


@pytest.mark.parametrize(("share", "count"), [(0.01, 1), (0.2, 1), (0.5, 2), (0.79, 4)])
def test_a_share_is_rounded_and_at_least_one(share, count):
    assert len(written(unseen_clients=share).unseen_parts) == count


def test_a_share_is_drawn_by_the_seed():
    def drawn(seed):
        return written(unseen_clients=0.4, seed=seed).client_names[3:]

    assert drawn(3) == drawn(3)
    assert len({tuple(drawn(seed)) for seed in range(9)}) > 2


def test_names_follow_their_clients():
    data = written(unseen_clients=["dan", "bob"], local_test_size=0.25)
    assert data.client_names == ["ada", "cyd", "eve", "bob", "dan"]
    parts = [*data.parts, *data.unseen_parts]
    for name, part, test in zip(data.client_names, parts, data.local_tests, strict=True):
        assert {WRITERS[i] for i in [*part.tolist(), *test.tolist()]} == {name}
        assert (len(part), len(test)) == (9, 3)
    seen = summary(data.num_samples.tolist(), data.class_counts, data.client_names)
    assert "3 (ada, cyd, eve)" in seen


def test_the_server_does_not_validate_on_their_samples():
    data = written(unseen_clients=["bob"], val_size=20)
    every = held(written(val_size=20))
    assert held(data) == [i for i in every if WRITERS[i] != "bob"] != every
    assert sorted(data.unseen_parts[0].tolist()) == list(range(1, 60, 5))


def test_test_sets_of_clients_follow_their_clients():
    clients = {
        name: (TensorDataset(torch.full((4,), i)), TensorDataset(torch.full((2,), 10 + i)))
        for i, name in enumerate("abc")
    }
    data = fitted(FederatedDataModule.from_clients(clients, val_size=0, unseen_clients=["a"]))
    values = data.train.tensors[0]
    assert data.client_names == ["b", "c", "a"]
    assert [values[part].unique().tolist() for part in data.parts] == [[1], [2]]
    assert values[data.unseen_parts[0]].unique().tolist() == [0]
    assert [values[test].unique().tolist() for test in data.local_tests] == [[11], [12], [10]]


def test_only_clients_that_train_have_steps_of_a_stream():
    data = written(unseen_clients=["ada"], stream_steps=3)
    assert data.advance(1)
    assert data.num_samples.tolist() == [4, 4, 4, 4]
    assert len(data.present[4]) == 12


def test_a_manifest_records_them(tmp_path):
    data = written(unseen_clients=0.4, val_size=10, local_test_size=0.2, seed=1)
    data.manifest().write(tmp_path / "split.json")
    assert Manifest.read(tmp_path / "split.json") == data.manifest()
    rule = FromManifest(tmp_path / "split.json")
    again = federated(partition=rule, num_clients=None, seed=2, unseen_clients=0.8)
    assert lists(again.parts) == lists(data.parts)
    assert lists(again.unseen_parts) == lists(data.unseen_parts)
    assert lists(again.local_tests) == lists(data.local_tests)
    assert held(again) == held(data)
    assert again.checksum == data.checksum
    data = written(val_size=10, local_test_size=0.2)
    data.manifest().write(tmp_path / "split.json")
    again = federated(partition=rule, num_clients=None, unseen_clients=["0"])
    assert lists(again.local_tests) == lists([*data.local_tests[1:], data.local_tests[0]])


def test_what_cannot_be_is_refused():
    with pytest.raises(FederationError, match=r"in \[0, 1\), got 1.0: pass a share"):
        written(unseen_clients=1.0)
    with pytest.raises(FederationError, match=r"has 'fay', and the clients are .*'ada'"):
        written(unseen_clients=["ada", "fay"])
    with pytest.raises(FederationError, match="has 3, and the clients are"):
        federated(unseen_clients=[3])
    with pytest.raises(FederationError, match="leaves none of 5 clients to train"):
        written(unseen_clients=0.95)
    with pytest.raises(FederationError, match="leaves none of 3 clients to train"):
        federated(numbered(), partition=ByLabel(), num_clients=3, unseen_clients=["0", "1", "2"])
