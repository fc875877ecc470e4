"""The image data sets: digits that come with scikit-learn, and torchvision's on disk."""

import pickle

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from layouts import N_TEST, N_TRAIN, cifar_layout, mnist_layout
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import CIFAR10, MNIST, Digits, FashionMNIST, ImageDataModule
from lightning_fl.datamodules.speech_commands import SpeechCommands
from lightning_fl.datamodules.spoken_digits import SpokenDigits
from lightning_fl.objectives import ClientModule
from lightning_fl.types import FederationError
from payload import Payload


def loaded(kind, *args, **options):
    data = kind(*args, **options)
    data.setup()
    return data


def normalized(data):
    """Mean and standard deviation of each channel of the training images, after normalization.

    Of what becomes of each value of a pixel, weighted by how often it occurs.
    """
    images = data.load(train=True).tensors[0]
    values = torch.arange(int(images.max()) + 1, dtype=torch.uint8).expand(images.shape[1], -1)
    (x,) = data.on_after_batch_transfer((values[None, :, None],), 0)
    channels = images.transpose(0, 1).flatten(1)
    count = torch.stack([channel.bincount(minlength=values.shape[1]) for channel in channels])
    share, x = count.double() / channels.shape[1], x[0, :, 0].double()
    mean = (share * x).sum(1)
    return mean, ((share * x.square()).sum(1) - mean.square()).sqrt()


def pixels(samples):
    return sorted(map(bytes, samples.tensors[0].flatten(1).numpy()))


# --- digits ---------------------------------------------------------------------------------------


def test_digits_are_1294_for_clients_144_for_validation_and_359_for_the_test():
    data = loaded(Digits)
    assert data.test.tensors[1].bincount().min() >= 34  # every digit has its share
    assert data.num_samples.tolist() == [130, 130, 130, 130] + [129] * 6
    assert (len(data.val), len(data.test)) == (144, 359)
    x, y = data.test[0]
    assert (x.shape, x.dtype, y.dtype) == ((1, 8, 8), torch.uint8, torch.int64)


def test_training_and_test_digits_are_all_digits_once():
    from sklearn.datasets import load_digits

    data = Digits()
    everything = load_digits().images.astype(np.uint8)
    both = pixels(data.load(train=True)) + pixels(data.load(train=False))
    assert sorted(both) == sorted(map(bytes, everything))


# --- normalization --------------------------------------------------------------------------------


def test_digits_have_mean_0_and_standard_deviation_1():
    mean, std = normalized(Digits())
    assert mean.item() == pytest.approx(0, abs=0.01)
    assert std.item() == pytest.approx(1, abs=0.01)


def test_normalisation_is_by_hand():
    class Two(ImageDataModule):
        white, mean, std = 10.0, (0.5, 0.1), (0.2, 0.4)

    x = torch.tensor([0, 5, 10], dtype=torch.uint8).view(1, 1, 1, 3).repeat(1, 2, 1, 1)
    found, y = Two().on_after_batch_transfer([x, torch.tensor([3])], 0)
    by_hand = torch.tensor([[-2.5, 0.0, 2.5], [-0.25, 1.0, 2.25]])
    torch.testing.assert_close(found[0, :, 0], by_hand)
    assert y.tolist() == [3]
    assert x.unique().tolist() == [0, 5, 10]


class Types(ClientModule):
    """Notes what it is given."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        self.given = []

    def federated_losses(self, batch, outputs=None):
        self.given.append((batch[0].dtype, batch[0].mean().item()))
        return super().federated_losses(batch, outputs)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({"precision": "64-true"}, torch.float64),
        ({"precision": "bf16-true"}, torch.bfloat16),
    ],
)
def test_batches_have_the_modules_dtype(trainer, options, dtype):
    module, data = Types(), Digits(batch_size=None, num_clients=2)
    runner = trainer(FederatedLoop(), 1, **options)
    runner.fit(module, datamodule=data)
    runner.test(module, datamodule=data, verbose=False)
    # One batch of each client, then 144 and 359 samples in batches of 250.
    assert [found for found, _ in module.given] == [dtype] * 5
    assert all(abs(mean) < 0.05 for _, mean in module.given)


# --- torchvision's layout, made here --------------------------------------------------------------

LAYOUTS = {
    MNIST: mnist_layout,
    FashionMNIST: lambda root: mnist_layout(root, "FashionMNIST"),
    CIFAR10: cifar_layout,
}
every_kind = pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.__name__)


@every_kind
def test_files_in_torchvisions_layout_are_read(tmp_path, kind):
    LAYOUTS[kind](tmp_path)
    data = loaded(kind, str(tmp_path), num_clients=2, val_size=10)
    shape = (3, 32, 32) if kind is CIFAR10 else (1, 28, 28)
    for samples, first, count in ((data.train, 0, N_TRAIN), (data.test, 100, N_TEST)):
        images, labels = samples.tensors
        assert (images.shape, images.dtype) == ((count, *shape), torch.uint8)
        assert images[:, 0, 0, 0].tolist() == list(range(first, first + count))
        assert (images[:, 0] == images[:, 0, :1, :1]).all()
        assert torch.equal(labels, images[:, 0, 0, 0].long() % 10)
    if kind is CIFAR10:
        assert images[:, 1:].unique_consecutive().tolist() == [100, 200] * N_TEST
    assert data.num_samples.tolist() == [5, 5]
    # One of each label.
    assert sorted(y for _, labels in data.val_dataloader() for y in labels.tolist()) == [*range(10)]


@every_kind
def test_missing_files_are_an_error_that_names_download(tmp_path, kind):
    words = rf"{kind.__name__} was not found in root='{tmp_path}': .*download=true"
    with pytest.raises(FederationError, match=words):
        loaded(kind, str(tmp_path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda path: Payload(path / "ran"), "only arrays are allowed, it contains posix.mkdir"),
        (lambda path: {"data": [Payload(path / "ran")], "labels": []}, "only arrays are allowed"),
        (lambda path: [3], "is not a CIFAR-10 file"),
        (
            lambda path: {"data": np.zeros((2, 3072)), "labels": [0, 1]},
            "it contains float64 images of shape",
        ),
        (
            lambda path: {"data": np.zeros((2, 9), np.uint8), "labels": [0, 1]},
            "shape .2, 9. and labels of shape .2,",
        ),
    ],
)
def test_pictures_from_strangers_cannot_run_code(tmp_path, content, words):
    """The format is a pickle, and its checksum is not asked for."""
    cifar_layout(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(pickle.dumps(content(tmp_path)))
    with pytest.raises(FederationError, match=words):
        loaded(CIFAR10, str(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_arrays_of_all_pickles_are_read(tmp_path, protocol):
    cifar_layout(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()), protocol))
    assert len(loaded(CIFAR10, str(tmp_path)).train) == N_TRAIN


@every_kind
def test_a_download_asks_for_both_parts_and_only_where_it_is_wanted(monkeypatch, kind):
    asked = []
    fake = lambda root, train, download: asked.append((root, train, download))  # noqa: E731
    monkeypatch.setattr(torchvision.datasets, kind.__name__, fake)
    kind("somewhere").prepare_data()
    assert asked == []
    kind("somewhere", download=True).prepare_data()
    assert asked == [("somewhere", True, True), ("somewhere", False, True)]


# --- the real data --------------------------------------------------------------------------------

EVEN = [6000] * 10, [1000] * 10
REAL = {
    MNIST: (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ),
    FashionMNIST: EVEN,
    CIFAR10: ([5000] * 10, [1000] * 10),
}


@pytest.mark.parametrize("kind", REAL, ids=lambda kind: kind.__name__)
def test_real_data_have_their_numbers_shapes_and_statistics(data_root, kind):
    data = loaded(kind, data_root, num_clients=100)
    shape = (3, 32, 32) if kind is CIFAR10 else (1, 28, 28)
    for samples, histogram in zip((data.train, data.test), REAL[kind], strict=True):
        images, labels = samples.tensors
        assert (images.shape, images.dtype) == ((sum(histogram), *shape), torch.uint8)
        assert labels.bincount().tolist() == histogram
    assert data.num_samples.sum() + len(data.val) == len(data.train)
    assert len(data.val) == len(data.train) // 10
    mean, std = normalized(data)
    assert mean.tolist() == pytest.approx([0] * len(mean), abs=0.002)
    # The pixels of a CIFAR-10 that went through JPEG spread 1 % less.
    assert std.tolist() == pytest.approx([1] * len(std), abs=0.01 if kind is CIFAR10 else 0.001)


# --- client_rotations -----------------------------------------------------------------------------


def test_rotations_turn_each_clients_images_and_evaluation_images_in_turn():
    options = {"num_clients": 5, "local_test_size": 0.2, "seed": 3}
    plain, turned = loaded(Digits, **options), Digits(**options, client_rotations=[0, 90, 180])
    for stage in ("fit", "test", "fit"):
        turned.setup(stage)
    a, b = plain.train.tensors[0], turned.train.tensors[0]
    for client in range(5):
        for own in (plain.parts[client], plain.local_tests[client]):
            assert torch.equal(b[own], a[own].rot90(client % 3, (2, 3)))
    for before, after in ((plain.val, turned.val), (plain.test, turned.test)):
        for i in range(len(before)):
            assert torch.equal(after[i][0], before[i][0].rot90(i % 3, (1, 2)))
            assert after[i][1] == before[i][1]
    assert torch.equal(plain.train.tensors[1], turned.train.tensors[1])
    turned.setup()
    assert torch.equal(turned.train.tensors[0], b)
    assert plain.checksum != turned.checksum


def test_rotations_are_multiples_of_90_degrees():
    with pytest.raises(FederationError, match="multiples of 90 degrees, got 45"):
        Digits(client_rotations=[0, 45])
    with pytest.raises(FederationError, match="got 'a'"):
        Digits(client_rotations=["a"])


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST, CIFAR10, SpeechCommands, SpokenDigits])
def test_the_folder_of_data_sets_is_the_given_one_then_the_environments(monkeypatch, kind):
    monkeypatch.delenv("LIGHTNING_FL_DATA", raising=False)
    assert kind().root == "data"
    monkeypatch.setenv("LIGHTNING_FL_DATA", "/datasets")
    assert kind().root == "/datasets"
    assert kind(root="mine").root == "mine"


def test_the_test_digits_are_the_same_for_all_seeds_and_the_clients_are_not():
    one, other = loaded(Digits, seed=1), loaded(Digits, seed=2)
    assert pixels(one.test) == pixels(other.test)
    assert one.checksum != other.checksum
    assert pixels(one.val) != pixels(other.val)
