"""Samples in memory, and what is no map-style data set."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from lightning_fl.datamodules import FederatedDataModule, InMemory
from lightning_fl.types import FederationError
from numbered import batches, federated, numbered, numbers


def test_samples_may_stay_on_a_device():
    data, device = InMemory(torch.arange(12.0).view(6, 2), torch.arange(6)), torch.device("meta")
    there = data.on(device)
    assert there is data.on(device)
    assert there.on(device) is there
    assert data.on(torch.device("cpu")) is data
    x, y = there.fetch(torch.tensor([4, 0, 5]))
    assert x.device == y.device == device
    assert x.shape == (3, 2)


def test_steps_reuse_the_memory_of_the_largest_batch():
    data = InMemory(torch.arange(12.0).view(6, 2), torch.arange(6))
    for index in ([1, 2], [5, 0, 4], [3]):
        x, y = data.fetch(torch.tensor(index), reuse=True)
        assert torch.equal(x, data.tensors[0][index])
        assert y.tolist() == index
    assert x.data_ptr() == data.fetch(torch.tensor([1, 1, 1]), reuse=True)[0].data_ptr()
    assert x.data_ptr() != data.fetch(torch.tensor([3]))[0].data_ptr()


class Own(TensorDataset):
    """A child of TensorDataset may do something else with its samples."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + 100, y


def test_a_child_of_tensor_dataset_is_asked_for_its_own_samples():
    assert min(min(b) for b in numbers(batches(federated(Own(*numbered().tensors))))) == 100


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Counted(Stream):
    """A stream may know how long it is: torch's own loader asks it."""

    def __len__(self):
        return 5


class NoLength(Dataset):
    def __getitem__(self, i):
        return i


@pytest.mark.parametrize("name", ["train", "val", "test"])
@pytest.mark.parametrize(
    "make",
    [
        Stream,
        Counted,
        NoLength,
        lambda: iter([1]),
        lambda: {1, 2},
        lambda: DataLoader(numbered()),
        lambda: {"x": torch.zeros(8, 2)},
        lambda: torch.zeros(8, 2),
        lambda: np.zeros((8, 2)),
        lambda: "samples",
        FederatedDataModule,
        lambda: (torch.zeros(8, 2), torch.zeros(8)),
    ],
)
def test_what_is_not_map_style_is_refused_by_name(name, make):
    made = make()
    data = FederatedDataModule(**{"train": numbered(), name: made})
    kind = type(made).__name__
    if (name, kind) == ("val", "tuple"):  # several sets
        kind = "Tensor"
    with pytest.raises(FederationError, match=rf"^{name} must be a map-.*, got {kind}: use "):
        data.setup()


@pytest.mark.parametrize("name", ["train", "val", "test"])
def test_an_empty_data_set_is_refused_by_name(name):
    data = FederatedDataModule(**{"train": numbered(), name: numbered(0)})
    with pytest.raises(FederationError, match=f"{name} has no samples"):
        data.setup()


def test_held_out_samples_stay_in_memory():
    assert isinstance(federated(val_size=6).val, InMemory)
    assert isinstance(federated(Own(*numbered().tensors), val_size=6).val, Subset)
