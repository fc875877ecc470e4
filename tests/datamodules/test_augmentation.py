"""Augmentation of training batches, in federations and by hand."""

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from layouts import cifar_layout
from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import CIFAR10, Digits, FederatedDataModule, InMemory
from lightning_fl.datamodules.batches import Draws
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.models import MLPClassifier
from lightning_fl.policies import HyperparameterPolicy
from numbered import batches


class Uneven(HyperparameterPolicy):
    """Numbers of local steps that differ between clients."""

    def sample(self, round, clients):
        return {"num_steps": 1 + (clients + round) % 4}


class Augmented(FederatedDataModule):
    """A data module of a user: noise on the inputs, from the random numbers of the samples."""

    draws = 1

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if isinstance(batch[-1], Draws):
            *batch, draws = batch
            batch[0] = batch[0] + draws.uniform()
        return batch


def digits(**options):
    return Digits(num_clients=4, batch_size=9, seed=1, **{"augment": True, **options})


def parameters(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.fixture
def train(trainer):
    """Train a classifier; return its parameters and the loop."""

    def run(data, rounds=3, sizes=(64, 6, 10), group_size=None, ckpt=None, **options):
        torch.manual_seed(0)
        module = ClientModule(MLPClassifier(list(sizes)), optimizer=sgd).double()
        wrapped = VectorizedClients(module, group_size, **options) if group_size else module
        fitted = trainer(FederatedLoop(policy=Uneven(), seed=1), rounds=rounds)
        fitted.fit(wrapped, datamodule=data, ckpt_path=ckpt)
        return parameters(module), fitted

    return run


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def test_a_batch_is_cropped_and_flipped_by_the_numbers_of_its_client(tmp_path):
    cifar_layout(tmp_path)
    data, plain = (
        CIFAR10(str(tmp_path), num_clients=2, batch_size=3, val_size=0, augment=augment)
        for augment in (True, False)
    )
    for each in (data, plain):
        each.setup("fit")
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


@pytest.mark.parametrize("group_size", [2, 4])
def test_vectorized_clients_draw_the_same_numbers(train, group_size):
    options = {"group_size": group_size, "compile": False}
    alone, together = train(digits())[0], train(digits(), **options)[0]
    torch.testing.assert_close(together, alone, atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_module_of_a_user_augments_too(train, num_workers):
    x, y = torch.randn(60, 3, dtype=torch.float64), torch.arange(60) % 3
    kinds = (Augmented, Augmented, FederatedDataModule)
    groups = (None, 4, None)
    found = [
        train(
            kind(InMemory(x, y), num_clients=4, batch_size=5, num_workers=num_workers),
            sizes=(3, 4, 3),
            group_size=group,
            **({"compile": False} if group else {}),
        )[0]
        for kind, group in zip(kinds, groups, strict=True)
    ]
    torch.testing.assert_close(found[1], found[0], atol=1e-12, rtol=0)
    assert not torch.allclose(found[2], found[0])


def test_only_the_seed_of_the_run_changes_the_numbers(train):
    first, again, plain = (train(digits(augment=a))[0] for a in (True, True, False))
    assert torch.equal(first, again)
    assert not torch.allclose(first, plain)
    draws = [batches(digits_of(1), seed=seed)[0][-1].numbers for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def digits_of(seed):
    data = Digits(num_clients=4, batch_size=9, seed=seed, augment=True)
    data.setup("fit")
    return data


def test_a_resumed_run_draws_the_numbers_of_an_undisturbed_one(train, tmp_path):
    whole, _ = train(digits(), rounds=4)
    train(digits(), rounds=2)[1].save_checkpoint(tmp_path / "last.ckpt")
    resumed, _ = train(digits(), rounds=4, ckpt=tmp_path / "last.ckpt")
    assert torch.equal(whole, resumed)


def test_evaluation_is_not_augmented():
    augmented, plain = digits_of(1), Digits(num_clients=4, batch_size=9, seed=1)
    plain.setup("fit")
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
    data = digits_of(1)
    draws = [batch[-1].numbers for batch in data.train_dataloader()]
    assert {len(numbers) for numbers in draws} <= {9, 1294 % 9}
    assert len(torch.cat(draws).unique(dim=0)) == 1294
