"""Clients that are given as data sets."""

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lightning_fl.datamodules import FederatedDataModule, FromClients, InMemory
from lightning_fl.types import FederationError


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
    data = FederatedDataModule.from_clients(
        {"south": kind(3, 10), "north": kind(2, 20)}, val=kind(1), batch_size=2
    )
    data.setup("fit")
    assert data.client_names == ["south", "north"]
    assert [numbers_of(data, client) for client in (0, 1)] == [[10, 11, 12], [20, 21]]
    assert data.class_counts.tolist() == [[2, 1], [1, 1]]


def test_tensors_of_one_shape_become_one_data_set_in_memory():
    data = FromClients([tensors(3), tensors(2)], val_size=0)
    data.setup("fit")
    assert isinstance(data.train, InMemory)
    other = TensorDataset(torch.zeros(2, 5), torch.zeros(2))
    data = FromClients([tensors(3), other], val_size=0)
    data.setup("fit")
    assert not isinstance(data.train, InMemory)
    assert data.train[4][0].shape == (5,)


def test_samples_of_one_client_are_read_together():
    one, two = Listed(range(4), many=True), Listed(range(10, 13), many=True)
    data = FromClients([one, two], val_size=0)
    data.setup("fit")
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


def test_names_that_are_equal_as_texts_are_refused():
    with pytest.raises(FederationError, match=r"distinct names as texts, got \[1, '1'\]"):
        FromClients({1: tensors(3), "1": tensors(4)})


def test_each_client_keeps_a_sample():
    clients = {"large": tensors(50), "tiny": tensors(1)}
    data = FromClients(clients, val_size=25, seed=2)
    data.setup("fit")
    assert data.num_samples.tolist() == [25, 1]
    with pytest.raises(FederationError, match=r"2 clients need .* to at most 49 samples, or p"):
        FromClients(clients, val_size=50).setup("fit")
