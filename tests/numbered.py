"""Samples that are their own number: a batch tells which samples it holds."""

from itertools import chain

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.types import RoundPlan


def numbered(n=60, classes=3):
    """Samples whose x is their own number: a batch tells which samples it holds."""
    return TensorDataset(torch.arange(n, dtype=torch.float64), torch.arange(n) % classes)


def fitted(data):
    """Return a data module that is set up for a fit."""
    data.setup("fit")
    return data


def federated(train=None, *, val_size=0, num_clients=4, **options):
    train = numbered() if train is None else train
    options |= {"num_clients": num_clients, "val_size": val_size}
    return fitted(FederatedDataModule(train, **options))


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def plan(data, seed=0, round=0, steps=None):
    """Everyone takes part, for one pass over their samples."""
    steps = data.batches_per_epoch if steps is None else torch.full_like(data.num_samples, steps)
    return RoundPlan(seed, round, torch.arange(len(steps)), steps)


def batches(data, **options):
    """A round's batches as a loop would get them."""
    data.plan = lambda: plan(data, **options)
    return list(data.train_dataloader())


def numbers(batches):
    return [batch[0].long().tolist() for batch in batches]


def joined(batches):
    return list(chain.from_iterable(batches))


def held(data):
    """Numbers of the validation samples."""
    return sorted(joined(numbers(data.val_dataloader())))


def lists(parts):
    return [part.tolist() for part in parts]


def counts(parts, labels):
    """Samples of each class and client, [clients, classes]."""
    return torch.stack([labels[part].bincount(minlength=int(labels.max()) + 1) for part in parts])


class Lists(Dataset):
    """Samples are lists; labels are an attribute."""

    def __init__(self, n=60):
        self.x, self.y = numbered(n).tensors
        self.targets = self.y.tolist()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return [self.x[i], self.y[i]]


class Dicts(Lists):
    """Samples are dictionaries."""

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}


def having(**attributes):
    data = Lists(6)
    del data.targets
    vars(data).update(attributes)
    return data


class Watch(LightningModule):
    """Notes the samples of every batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.train_batches, self.val_batches, self.test_batches = [], [], []

    def training_step(self, batch, batch_idx):
        self.train_batches.append((self.current_epoch, batch[0].long().tolist()))
        return self.weight * batch[0].sum()

    def validation_step(self, batch, batch_idx):
        self.val_batches.append(batch[0].long().tolist())

    def test_step(self, batch, batch_idx):
        self.test_batches.append(batch[0].long().tolist())

    def predict_step(self, batch, batch_idx):
        return batch[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def epochs(self):
        """Numbers of the samples, epoch by epoch, batch by batch."""
        last = self.train_batches[-1][0]
        return [[b for e, b in self.train_batches if e == epoch] for epoch in range(last + 1)]
