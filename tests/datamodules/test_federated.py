"""A data module around the training."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset
from torchvision.transforms.functional import pil_to_tensor

from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule, InMemory
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError
from numbered import Dicts, Lists, Watch, federated, lists, numbered, numbers


def test_setup_splits_once_and_a_test_needs_no_training_samples():
    data = federated()
    parts = data.parts
    data.setup("fit")
    data.setup("validate")
    assert data.parts is parts
    only_test = FederatedDataModule(test=numbered(5))
    for stage in ("test", "predict"):
        only_test.setup(stage)
        assert only_test.parts == []
    assert numbers(only_test.test_dataloader()) == numbers(only_test.predict_dataloader())


def test_training_samples_are_needed():
    with pytest.raises(FederationError, match="needs training samples: pass train="):
        FederatedDataModule().setup("fit")


def test_a_test_needs_test_samples():
    data = federated()
    data.setup("test")
    for loader in (data.test_dataloader, data.predict_dataloader):
        with pytest.raises(FederationError, match="has no test samples: pass"):
            loader()


def test_too_few_validation_samples_for_the_processes_are_refused():
    data = federated(val_size=2)
    data._processes = lambda: (0, 3)
    with pytest.raises(FederationError, match="2 samples cannot be evaluated by 3 processes"):
        data.val_dataloader()


@pytest.mark.parametrize(
    ("train", "size"),
    [
        (TensorDataset(torch.zeros(9, 2, 3), torch.zeros(9)), 4 * 7),
        (TensorDataset(torch.zeros(9, 5, dtype=torch.uint8), torch.zeros(9)), 4 * 6),
        (Dicts(), 4 * 2),
        ([(np.zeros((2, 3)), 0), (np.ones((2, 3)), 1)], 4 * 7),
        ([("a text", 0)] * 2, 4 * 1),
    ],
)
def test_a_sample_takes_the_memory_of_its_numbers(train, size):
    assert federated(train, num_clients=2).sample_bytes == size


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
def test_a_federation_works_without_validation_samples(fit, foreign, blobs):
    data = FederatedDataModule(blobs(), num_clients=4, val_size=0)
    loop = fit(foreign(), datamodule=data, rounds=2)
    assert len(loop.rows) == 2
    assert "val_loss" not in loop.rows[0]


def test_test_and_prediction_go_through_all_test_samples_in_order(trainer):
    data = FederatedDataModule(numbered(), test=numbered(7), eval_batch_size=3)
    module = Watch()
    trainer(False).test(module, datamodule=data, verbose=False)
    assert module.test_batches == [[0, 1, 2], [3, 4, 5], [6]]
    found = trainer(False).predict(module, datamodule=data)
    assert torch.cat(found).tolist() == list(range(7))


def test_a_round_trains_on_what_has_arrived(fit, blobs, linear):
    class Seen(FederatedDataModule):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            if self.trainer.training:
                seen.setdefault(self.trainer.current_epoch, []).append(batch[0])
            return super().on_before_batch_transfer(batch, dataloader_idx)

    seen = {}
    x = torch.arange(36.0, dtype=torch.float64)[:, None].expand(-1, 3) / 36
    data = Seen(TensorDataset(x, x[:, 0]), num_clients=3, val_size=0, stream_steps=3, batch_size=4)
    fit(linear(), FederatedLoop(seed=1, client_fraction=0.5), data, rounds=4, limit_val_batches=0)
    each = [torch.cat(seen[round])[:, 0].mul(36).round().long() for round in range(4)]
    for round in range(4):
        data.advance(round)
        assert set(each[round].tolist()) <= set(torch.cat(data.present).tolist())
        assert len(each[round]) == 8  # two of three clients, four samples each
    assert not set(each[0].tolist()) & set(each[1].tolist())


def test_a_data_module_begins_anew_after_a_stream(fit, linear):
    x = torch.rand(36, 3).double()
    data = FederatedDataModule(TensorDataset(x, x[:, 0]), num_clients=3, val_size=0, stream_steps=3)
    fit(linear(), FederatedLoop(), data, rounds=1, limit_val_batches=0)
    assert data.num_samples.tolist() == [4] * 3
    data.setup("fit")
    assert data.num_samples.tolist() == [12] * 3


@pytest.mark.parametrize("original", [numbered(), Lists()])
def test_other_samples_take_the_place_of_the_original_until_they_are_restored(original):
    data = federated(original, num_clients=2, batch_size=None)
    before, train, parts = numbers(data.train_dataloader()), data.train, lists(data.parts)
    for shift in (100, 1000):  # the second replaces the first
        x, y = numbered().tensors
        data.replace_samples(TensorDataset(x + shift, y))
        assert isinstance(data.train, InMemory)
        assert numbers(data.train_dataloader()) == [[i + shift for i in before[0]]]
        assert lists(data.parts) == parts
    for _ in range(2):
        data.restore_samples()
        assert data.train is train
        assert numbers(data.train_dataloader()) == before


class Graph:
    """Its ``size`` is a method, as in torch-geometric."""

    def __init__(self, x):
        self.x = x

    def size(self):
        return self.x.shape


def picture(x):
    """An image of PIL, whose ``size`` is a tuple."""
    return Image.fromarray((x * 40 + 120).clamp(0, 255).byte().numpy()[None])


@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize(
    ("kind", "features"), [(Graph, lambda each: each.x), (picture, pil_to_tensor)]
)
def test_samples_of_unknown_size_train(fit, blobs, kind, features, group_size):
    samples = [(kind(x), y) for x, y in blobs()]

    def collate(batch):
        x, y = zip(*batch, strict=True)
        return torch.stack([features(each).flatten().double() for each in x]), torch.stack(y)

    data = federated(samples, val_size=12, labels=[0] * len(samples), collate_fn=collate)
    module = ClientModule(torch.nn.Linear(6, 3)).double()
    user = module if group_size is None else VectorizedClients(module, group_size, compile=False)
    loop = fit(user, FederatedLoop(policy=Schedule(num_steps=2)), data, rounds=1)
    assert loop.rows[0]["num_steps"] == 8
