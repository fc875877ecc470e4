"""Several validation loaders: given data sets, a held-out split, and lists of loaders."""

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule, FromDataModule
from lightning_fl.policies import PersonalizedPolicyGradient, Schedule
from numbered import federated, joined, numbered, numbers


class Net(ClientModule):
    """A module with two validation losses, as Lightning names them."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 3))
        self.double()
        self.seen = {}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen.setdefault(dataloader_idx, []).append(len(batch[1]))
        self.log("val_loss", self.federated_losses(batch).mean(), batch_size=len(batch[1]))


def doubled(samples):
    return [each.repeat_interleave(2, 0) for each in default_collate(samples)]


def loss(net, data):
    x, y = data.tensors
    return nn.functional.cross_entropy(net(x), y).item()


@pytest.mark.parametrize("group_size", [None, 3])
def test_a_list_of_loaders_is_validated_one_after_another(fit, blobs, group_size):
    first, second = blobs(20), blobs(30)
    mine = LightningDataModule.from_datasets(blobs(60), batch_size=8)
    loader = DataLoader(second, batch_size=99, collate_fn=doubled)
    mine.val_dataloader = lambda: [DataLoader(first, batch_size=7), loader]
    module, loop = Net(), FederatedLoop(policy=Schedule(lr=0.1), seed=0)
    user = module if group_size is None else VectorizedClients(module, group_size, compile=False)
    fit(user, loop, FromDataModule(mine, num_clients=3), rounds=2)
    last = loop.rows[-1]
    assert last["val_loss/dataloader_idx_0"] == pytest.approx(loss(module.net, first))
    assert last["val_loss/dataloader_idx_1"] == pytest.approx(loss(module.net, second))
    assert module.seen[0][-3:] == [7, 7, 6]
    assert module.seen[1][-5:] == [14, 14, 14, 14, 4]  # by its own collate_fn


def test_a_given_and_a_held_out_set():
    given = TensorDataset(torch.arange(100.0, 103.0), torch.zeros(3))
    data = federated(numbered(), val=(given, None), val_size=10)
    first, held = (joined(numbers(loader)) for loader in data.val_dataloader())
    assert first == [100, 101, 102]
    assert sorted([*held, *torch.cat(data.parts).tolist()]) == list(range(60))
    assert len(held) == 10
    data = federated(numbered(), val=(None, given), val_size=10)
    assert [len(joined(numbers(loader))) for loader in data.val_dataloader()] == [10, 3]


@pytest.mark.parametrize("val", [(None,), (None, None)])
def test_without_a_hold_out_there_is_no_empty_set(val):
    data = federated(numbered(), val=val, val_size=0)
    assert data.val_dataloader() == []
    given = TensorDataset(torch.arange(3.0), torch.zeros(3))
    data = federated(numbered(), val=(given, None), val_size=0)
    assert isinstance(data.val_dataloader(), DataLoader)


def test_contributions_are_measured_on_the_first_set(fit, blobs):
    def go(val):
        policy = PersonalizedPolicyGradient([{"lr": 0.01}, {"lr": 0.5}])
        module, loop = Net(), FederatedLoop(policy=policy, seed=0)
        data = FederatedDataModule(blobs(60), val, num_clients=3, seed=0)
        fit(module, loop, data, rounds=3)
        return policy.logits

    first, second = blobs(20), blobs(31)
    assert torch.equal(go((first, second)), go(first))
    assert not torch.equal(go((second, first)), go(first))
