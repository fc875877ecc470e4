"""The names of classes: a label stands for the same class in all data sets."""

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fl.datamodules import FederatedDataModule, FromClients, FromDataModule
from lightning_fl.partition import ByLabel, Natural
from lightning_fl.types import FederationError
from numbered import federated, fitted


class Folder(Dataset):
    """Pictures in one folder per class, as ``ImageFolder`` of torchvision."""

    target_transform = None

    def __init__(self, *names, each=4):
        self.classes = list(names)
        self.class_to_idx = {name: i for i, name in enumerate(names)}
        self.targets = [i for i in range(len(names)) for _ in range(each)]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        label = self.targets[index]
        return torch.tensor([picture(self.classes[label])]), label


def picture(name):
    return sum(map(ord, name))


ORDERS = r"client 'b' are the classes \{0: 'dog', 1: 'cat'\}.*client 'a' are \{0: 'cat', 1: 'dog'\}"


def test_clients_with_classes_in_another_order_are_refused():
    with pytest.raises(FederationError, match=ORDERS):
        FromClients({"a": Folder("cat", "dog"), "b": Folder("dog", "cat")}).setup("fit")


def test_test_sets_of_clients_are_compared_by_name():
    pair = Folder("cat", "dog"), Folder("dog", "cat")
    with pytest.raises(FederationError, match="the labels of the test set of client 'a' are the c"):
        FromClients({"a": pair}).setup("fit")
    data = fitted(FromClients({"a": pair}, classes=["cat", "dog"], val_size=0))
    ((x, y),) = data.samples_of(0, test=True)
    assert [picture(["cat", "dog"][label]) for label in y.tolist()] == x[:, 0].tolist()


TRAIN, OTHER = Folder("cat", "dog"), Subset(Folder("dog", "cat"), range(6))


@pytest.mark.parametrize(
    ("part", "data"),
    [
        ("val", FederatedDataModule(TRAIN, OTHER, num_clients=2)),
        ("val", FederatedDataModule(TRAIN, (TRAIN, OTHER), num_clients=2)),
        ("test", FederatedDataModule(TRAIN, test=OTHER, num_clients=2)),
        ("val", FromClients({"a": TRAIN}, val=OTHER)),
        ("test", FromClients({"a": TRAIN}, test=OTHER)),
        ("val", FromDataModule(LightningDataModule.from_datasets(TRAIN, OTHER), num_clients=2)),
    ],
)
def test_samples_for_validation_and_test_are_compared(part, data):
    with pytest.raises(FederationError, match=f"the labels of {part} are the classes"):
        data.setup("fit")


def test_samples_of_a_test_loader_are_compared_before_the_test():
    class Both(FederatedDataModule):
        def load(self, train):
            return Folder("cat", "dog") if train else Folder("dog", "cat")

    data = fitted(Both(num_clients=2))
    with pytest.raises(FederationError, match="the labels of test are the classes"):
        data.setup("test")


def test_classes_map_labels_by_name():
    clients = {"a": Folder("cat", "dog"), "b": Folder("dog", "emu", each=3)}
    classes = ["emu", "dog", "cat"]
    data = FromClients(
        clients, val=Folder("dog"), test=Folder("cat", "emu"), classes=classes, batch_size=2
    )
    data.setup()
    assert data.class_counts.tolist() == [[0, 4, 4], [3, 3, 0]]
    everything = [batch for client in (0, 1) for batch in data.samples_of(client)]
    for x, y in [*everything, *data.val_dataloader(), *data.test_dataloader()]:
        assert x[:, 0].tolist() == [picture(classes[label]) for label in y.tolist()]
    assert {int(y) for _, labels in data.test_dataloader() for y in labels} == {0, 2}


def test_mapped_data_sets_keep_their_keys_and_their_labels():
    train = Folder("dog", "cat", each=2)
    train.keys = ["u", "v", "v", "u"]
    data = federated(train, partition=Natural(), num_clients=None, classes=["cat", "dog"])
    assert data.client_names == ["u", "v"]
    assert data.class_labels.tolist() == [1, 1, 0, 0]
    options = {"partition": ByLabel(), "num_clients": 2, "classes": ["cat", "dog"]}
    data = federated(Folder("dog", "cat"), **options)
    assert [data.train[int(part[0])][1] for part in data.parts] == [0, 1]


def test_a_class_that_is_missing_is_refused_by_name():
    data = FromClients({"a": Folder("cat", "dog")}, classes=["dog", "emu"])
    with pytest.raises(FederationError, match=r"of all classes, \['cat'\] are missing"):
        data.setup("fit")


class Listed(Folder):
    def __init__(self, names):
        super().__init__("a", "b")
        self.classes, self.class_to_idx = names, None


def transformed():
    other = Folder("dog", "cat")
    other.target_transform = [1, 0].__getitem__
    return other


@pytest.mark.parametrize(
    "other",
    [
        Folder("cat"),  # has fewer classes
        Folder("cat", "dog", "emu"),
        Listed(2),  # a number of classes
        Listed(["dog", "cat", "cat", "dog"]),  # one name per sample
        Listed("dc"),
        transformed(),  # whose labels are others
        TensorDataset(torch.zeros(4, 1), torch.arange(4) % 2),
    ],
)
def test_orders_that_agree_or_are_unknown_are_accepted(other):
    data = fitted(FromClients({"a": Folder("cat", "dog"), "b": other}, val_size=0))
    assert len(data.train) == 8 + len(other)
