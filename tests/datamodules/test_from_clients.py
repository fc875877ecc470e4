"""Clients that are given as data sets."""

import pytest
import torch
from jsonargparse import get_loader
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lightning_fl.datamodules import FederatedDataModule, FromClients, InMemory
from lightning_fl.partition import Manifest
from lightning_fl.types import FederationError
from numbered import fitted


def tensors(n, first=0):
    return TensorDataset(torch.arange(first, first + n).float()[:, None], torch.arange(n) % 2)


class Listed(Dataset):
    """Samples that are read one at a time, or many at once."""

    def __init__(self, numbers, many=False):
        self.numbers, self.asked = numbers, []
        self.targets = [n % 2 for n in numbers]
        if many:
            self.__getitems__ = lambda rows: self.asked.append(rows) or [self[row] for row in rows]

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return torch.tensor([float(self.numbers[index])]), self.numbers[index] % 2


def numbers_of(data, client):
    return sorted(int(x) for batch in data.samples_of(client) for x in batch[0])


@pytest.mark.parametrize("kind", [tensors, lambda n, first=0: Listed(range(first, first + n))])
def test_each_data_set_is_a_client_in_the_given_order(kind):
    clients = {"south": kind(3, 10), "north": kind(2, 20)}
    data = fitted(FederatedDataModule.from_clients(clients, val=kind(1), batch_size=2))
    assert data.client_names == ["south", "north"]
    assert [numbers_of(data, client) for client in (0, 1)] == [[10, 11, 12], [20, 21]]
    assert data.class_counts.tolist() == [[2, 1], [1, 1]]


def test_tensors_of_one_shape_become_one_data_set_in_memory():
    data = fitted(FromClients([tensors(3), tensors(2)], val_size=0))
    assert isinstance(data.train, InMemory)
    other = TensorDataset(torch.zeros(2, 5), torch.zeros(2))
    data = fitted(FromClients([tensors(3), other], val_size=0))
    assert not isinstance(data.train, InMemory)
    assert data.train[4][0].shape == (5,)


def test_samples_of_one_client_are_read_together():
    one, two = Listed(range(4), many=True), Listed(range(10, 13), many=True)
    data = fitted(FromClients([one, two], val_size=0))
    one.asked, two.asked = [], []
    assert [int(x) for x, _ in data.train.__getitems__([3, 0, 5, 4])] == [3, 0, 11, 10]
    assert (one.asked, two.asked) == ([[3, 0]], [[1, 0]])


def test_classes_are_unknown_if_one_data_set_has_none():
    class Plain(Listed):
        targets = None

    data = FromClients([Listed(range(4)), Plain(range(3))], val_size=0)
    vars(data.clients["1"]).pop("targets")
    data.setup("fit")
    assert data.class_counts is None


def test_wrong_clients_are_refused():
    with pytest.raises(FederationError, match=r"with one data set per client, got \[\]"):
        FromClients([])
    with pytest.raises(FederationError, match="the data set of client 'b' has no samples"):
        FromClients({"a": tensors(3), "b": tensors(0)})
    with pytest.raises(FederationError, match="client 'b' must be a map-style data set"):
        FromClients({"a": tensors(3), "b": iter([])})
    with pytest.raises(TypeError, match="num_clients"):
        FromClients([tensors(3)], num_clients=3)


@pytest.mark.parametrize("clients", [tensors(3), "abc", torch.zeros(3, 2), None, Listed([1, 2])])
def test_one_data_set_is_not_a_list_of_clients(clients):
    with pytest.raises(FederationError, match=r"one data set per client, got .*: to split one"):
        FromClients(clients)


@pytest.mark.parametrize("text", ["010", "no", "off", "1e3", "1_0", "~"])
def test_names_that_yaml_reads_as_something_else_are_refused(text):
    names = get_loader("yaml")(f"{{{text}: 1, north: 2}}")
    with pytest.raises(FederationError, match=r"name of a client must be a text, got .*: quote it"):
        FromClients(dict.fromkeys(names, tensors(3)))
    quoted = get_loader("yaml")(f"{{'{text}': 1, north: 2}}")
    data = fitted(FromClients(dict.fromkeys(quoted, tensors(3)), val_size=0))
    assert data.client_names == [text, "north"]


@pytest.mark.parametrize("kind", [tensors, lambda n, first=0: Listed(range(first, first + n))])
def test_clients_may_have_test_sets(kind, tmp_path):
    clients = {"b": (kind(6, 10), kind(2, 100)), "a": (kind(4, 20), kind(3, 200))}
    data = fitted(FromClients(clients, val_size=2, local_test_size=0.5, batch_size=2))
    assert isinstance(data.train, InMemory) == (kind is tensors)
    assert data.client_names == ["b", "a"]
    tests = [sorted(int(x) for b in data.samples_of(i, test=True) for x in b[0]) for i in (0, 1)]
    assert tests == [[100, 101], [200, 201, 202]]
    held = [int(x) for batch in data.val_dataloader() for x in batch[0]]
    trained = numbers_of(data, 0) + numbers_of(data, 1)
    assert sorted(held + trained) == [*range(10, 16), *range(20, 24)]
    assert len(held) == 2
    assert int(data.class_counts.sum()) == 8
    data.manifest().write(tmp_path / "split.json")
    found = Manifest.read(tmp_path / "split.json")
    assert found.local_tests == [[10, 11], [12, 13, 14]]
    sizes = [
        len(train) + len(test) for train, test in zip(data.parts, data.local_tests, strict=True)
    ]
    assert [len(client) for client in found.clients] == sizes


def test_a_test_set_for_some_clients_only_is_refused():
    with pytest.raises(FederationError, match=r"clients must all have .* for all or for none"):
        FromClients({"a": (tensors(3), tensors(2)), "b": tensors(4)})
    with pytest.raises(FederationError, match=r"client 'a' must be a map-style data set.*Tensor"):
        FromClients({"a": (torch.zeros(3, 2), torch.zeros(3))})


def overlapping():
    whole = Listed(range(40))
    return [Subset(whole, range(25)), Subset(Subset(whole, range(20, 40)), range(15))]


def nested():
    whole = Listed(range(40))
    return [ConcatDataset([Subset(whole, range(20)), Listed([50])]), Subset(whole, range(-25, 0))]


@pytest.mark.parametrize(
    "clients",
    [
        overlapping,
        nested,
        lambda: [Listed(range(40))] * 2,
        lambda: [tensors(40)] * 2,
        lambda: [TensorDataset(*tensors.tensors) for tensors in [tensors(40)] * 2],
        lambda: [Subset(tensors, range(30)) for tensors in [tensors(40)] * 2],
    ],
)
def test_samples_of_several_clients_are_not_held_out(clients):
    with pytest.raises(FederationError, match="is held out, but another row with the same sample"):
        FromClients(clients(), val_size=0.3).setup("fit")
    with pytest.raises(FederationError, match="is held out, but another row with the same sample"):
        FromClients(clients(), val_size=0, local_test_size=0.3).setup("fit")
    data = fitted(FromClients(clients(), val=tensors(3)))
    assert [len(part) for part in data.parts] == [len(client) for client in clients()]


def test_a_client_is_not_tested_on_training_samples_of_another():
    whole = Listed(range(40))
    parts = [Subset(whole, range(start, start + 10)) for start in (0, 10, 20, 15)]
    with pytest.raises(FederationError, match="is held out, but another row with the same sample"):
        FromClients([(parts[0], parts[1]), (parts[2], parts[3])], val_size=0).setup("fit")
    FromClients([(parts[0], parts[1]), (parts[2], parts[1])], val_size=0).setup("fit")
