"""Augmentation of training batches, in federations and by hand."""

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from layouts import cifar_layout
from lightning_fl.datamodules import CIFAR10, Digits, FederatedDataModule, InMemory
from lightning_fl.datamodules.batches import Draws
from lightning_fl.functional.randomness import RandomStream, generator
from numbered import batches, fitted


class Augmented(FederatedDataModule):
    """A data module of a user: noise on the inputs, from the random numbers of the samples."""

    draws = 1

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if isinstance(batch[-1], Draws):
            *batch, draws = batch
            batch[0] = batch[0] + draws.uniform()
        return batch


def test_a_batch_is_cropped_and_flipped_by_the_numbers_of_its_client(tmp_path):
    cifar_layout(tmp_path)
    options = {"root": str(tmp_path), "num_clients": 2, "batch_size": 3, "val_size": 0}
    data, plain = (fitted(CIFAR10(augment=augment, **options)) for augment in (True, False))
    augmented, original = batches(data, seed=5, round=2), batches(plain, seed=5, round=2)
    client, moved = -1, 0
    steps = data.batches_per_epoch.tolist()
    for at, (batch, (images, labels)) in enumerate(zip(augmented, original, strict=True)):
        if at in (0, steps[0]):
            client += 1
            random = generator(5, RandomStream.AUGMENTATION, 2, client)
        x, y = data.on_after_batch_transfer(batch, 0)
        numbers = torch.randint(2**24, (len(labels), 3), generator=random, dtype=torch.int32)
        top, left, flip = np.floor(numbers.double().numpy() / 2**24 * [9, 9, 2]).astype(int).T
        expected = []
        for i, image in enumerate(images):
            cut = pad(image, (4, 4, 4, 4))[:, top[i] : top[i] + 32, left[i] : left[i] + 32]
            expected.append(cut.flip(2) if flip[i] == 0 else cut)
        expected, _ = plain.on_after_batch_transfer([torch.stack(expected), labels], 0)
        assert torch.equal(x, expected)
        assert torch.equal(y, labels)
        moved += int((top != 4).sum() + (left != 4).sum())
    assert moved > 10


def digits(augment=True):
    return fitted(Digits(num_clients=4, batch_size=9, seed=1, augment=augment))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_module_of_a_user_gets_numbers_that_depend_on_the_seed_alone(num_workers):
    def draws(seed):
        x, y = torch.zeros(60, 3), torch.arange(60) % 3
        data = fitted(Augmented(InMemory(x, y), num_clients=4, num_workers=num_workers))
        batch = batches(data, seed=seed)[0]
        return data.on_after_batch_transfer(batch, 0)[0]

    first, again, other = map(draws, (1, 1, 2))
    assert first.shape == (first.numel() // 3, 3)
    assert first.any()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_evaluation_is_not_augmented():
    augmented, plain = digits(), digits(augment=False)
    for data in (augmented, plain):
        data.setup("test")
    for loader in ("val_dataloader", "test_dataloader", "predict_dataloader"):
        for pair in zip(getattr(augmented, loader)(), getattr(plain, loader)(), strict=True):
            assert all(torch.equal(*tensors) for tensors in zip(*pair, strict=True))
    for method in ("samples_of", "steps_of"):
        given = (1,) if method == "samples_of" else (1, torch.Generator().manual_seed(0))
        one, other = next(getattr(augmented, method)(*given)), next(getattr(plain, method)(*given))
        assert len(one) == len(other) == 2


def test_the_centralized_baseline_is_augmented():
    data = digits()
    draws = [batch[-1].numbers for batch in data.train_dataloader()]
    assert {len(numbers) for numbers in draws} <= {9, 1294 % 9}
    assert len(torch.cat(draws).unique(dim=0)) == 1294
