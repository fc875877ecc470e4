"""Batches of every kind: each client trains on what it would get by itself."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.partition import Dirichlet
from lightning_fl.runners.samples import Collated
from lightning_fl.types import FederationError
from linear import Linear


class Reader(Linear):
    """A linear layer on the features that a test finds in a batch."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def training_step(self, batch, batch_idx):
        x, y = self.read(batch)
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_epoch=True, batch_size=len(y))
        return loss


def together(samples):
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def time_major(samples):
    x, y = together(samples)
    return x.T[:, :, None].contiguous(), y


def of_time_major(batch):
    x, y = batch
    assert x.shape[1:] == (len(y), 1)
    return x.squeeze(-1).T, y


def padded(samples):
    """Pad to the longest of a batch, as a tokenizer does."""
    x, y = time_major(samples)
    return x[: 3 + int(y.max())].contiguous(), y


def of_padded(batch):
    """Read features of which the loss shows the padding."""
    x, y = batch
    return F.pad(x.squeeze(-1).T, (0, 6 - len(x)), value=1 / len(x)), y


class Graphs:
    """As a batch of graphs: samples of all in one tensor, and where each begins."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def to(self, *args, **kwargs):
        return self


def packed(samples):
    parts = [x[: 3 + int(y), None] for x, y in samples]
    return pack_sequence(parts, enforce_sorted=False), together(samples)[1]


def of_packed(batch):
    x, _ = nn.utils.rnn.pad_packed_sequence(batch[0], batch_first=True, total_length=6)
    return x.squeeze(-1), batch[1]


MAPPED = {
    "time in front": (time_major, of_time_major),
    "padded to the longest": (padded, of_padded),
    "tensors of several lengths": (
        lambda s: ([x[: 2 + int(y)] for x, y in s], together(s)[1]),
        lambda b: (torch.stack([F.pad(x, (0, 6 - len(x))) for x in b[0]]), b[1]),
    ),
}
ALONE = {
    "graphs": (lambda s: Graphs(*together(s)), lambda b: (b.x, b.y)),
    "packed": (packed, of_packed),
    "none": (lambda s: (*together(s), None), lambda b: b[:2]),
}


@pytest.mark.parametrize("kind", MAPPED)
@pytest.mark.parametrize("most_steps", [1, 3])
def test_batches_are_collated_client_by_client_and_mapped(agree, tiny, ragged, kind, most_steps):
    collate, read = MAPPED[kind]
    data = functools.partial(ragged, collate_fn=collate)
    agree(lambda: tiny(Reader, read), (3,), most_steps, data, rounds=3)


@pytest.mark.parametrize("kind", ALONE)
def test_batches_that_cannot_be_mapped_train_one_client_after_another(agree, tiny, ragged, kind):
    collate, read = ALONE[kind]
    data = functools.partial(ragged, collate_fn=collate)
    with pytest.warns(UserWarning, match="one client after another, not at once: ") as said:
        agree(lambda: tiny(Reader, read), (4,), 2, data)
    assert sum("one client after another" in str(each.message) for each in said) == 1


class Whitened(FederatedDataModule):
    """Changes a batch on its way to the device, by all samples in it."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, *rest = batch
        return x - x.mean(0), *rest


def test_hooks_of_the_data_see_one_client(agree, tiny, blobs):
    def whitened():
        options = {"partition": Dirichlet(0.4, min_size=4), "batch_size": 10, "seed": 1}
        return Whitened(blobs(180), num_clients=7, val_size=20, **options)

    agree(lambda: tiny(Reader, lambda batch: batch), (3,), 2, whitened)


def test_batches_of_one_shape_are_stacked_and_clients_that_are_done_left_out():
    batches = [
        {"x": torch.full(shape, float(i))} if shape else None
        for i, shape in enumerate([(3, 2), (2, 3), None, (3, 2)])
    ]
    groups = Collated(batches).groups()
    assert [rows.tolist() for rows, _ in groups] == [[0, 3], [1]]
    assert groups[0][1]["x"][:, 0, 0].tolist() == [0, 3]
    assert groups[1][1]["x"].shape == (1, 2, 3)


class Forgets(FederatedDataModule):
    """A hook that returns no batch."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        """Change the batch, as a user may think."""


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
@pytest.mark.parametrize("options", [{}, {"profiler": "simple"}], ids=["lean", "hooks"])
def test_a_hook_must_return_the_batch(fit, foreign, blobs, wrap, options):
    federation = Forgets(blobs(12), num_clients=3, batch_size=2, val_size=0)
    with pytest.raises(FederationError, match=r"on_after_batch_transfer .* must return the batch"):
        fit(wrap(foreign()), datamodule=federation, rounds=1, **options)
