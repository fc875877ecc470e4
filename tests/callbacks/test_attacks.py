"""Attackers: what they send and train on, by hand, and what it does to rules."""

from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from lightning_fl import ClientModule
from lightning_fl.aggregators import CoordinateMedian, FedAvg, NormClipping
from lightning_fl.callbacks import (
    Backdoor,
    ClientAttack,
    ClientFaults,
    FederatedLoop,
    LabelFlip,
    RoundCheckpoint,
)
from lightning_fl.callbacks.attacks import changed
from lightning_fl.datamodules import FederatedDataModule, InMemory
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError


class Samples(Dataset):
    """Tensors behind a plain map-style data set: nothing to index at once."""

    def __init__(self, x, y):
        self.x, self.targets = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], int(self.targets[i])


@pytest.mark.parametrize("kind", ["sign_flip", "noise", "scale"])
def test_attacks_by_hand(simulate, kind):
    class Look(FedAvg):
        def update(self, clients):
            seen.update(zip(clients.clients.tolist(), clients.delta.clone(), strict=True))
            super().update(clients)

    seen = {}
    simulate(rounds=1, aggregator=Look())
    honest, seen = dict(seen), {}
    attack = ClientAttack([1, 3], kind, boost=2.5)
    simulate(attack, rounds=1, aggregator=Look())
    for client in range(4):
        if client in (0, 2):
            assert torch.equal(seen[client], honest[client])
        elif kind == "noise":
            assert float(seen[client].norm()) == pytest.approx(2.5 * float(honest[client].norm()))
            cosine = torch.cosine_similarity(seen[client], honest[client], dim=0)
            assert abs(float(cosine)) < 0.7
        else:
            factor = 2.5 if kind == "scale" else -2.5
            torch.testing.assert_close(seen[client], factor * honest[client])


@pytest.mark.parametrize("faulty", [ClientAttack([1], "noise"), ClientFaults(blowup=1.0)])
@pytest.mark.parametrize("group_size", [None, 3])
def test_what_clients_do_not_send_stays(fit, data, group_size, faulty):
    """Frozen layers, and buffers of the server."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    net[0].requires_grad_(False)
    module = ClientModule(net, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).double()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    sent = []

    class Look(FedAvg):
        def update(self, clients):
            sent.append(clients.delta[clients.clients == 1].clone())
            super().update(clients)

    loop = FederatedLoop(Look(), Schedule(num_steps=2), seed=3, buffers="server")
    options = {"group_size": group_size, "callbacks": [faulty]}
    fit(module, loop, data(drop_last=True), rounds=1, **options)
    for name in ("0.weight", "0.bias", "1.running_mean", "1.running_var"):
        assert torch.equal(net.state_dict()[name], before[name]), name
    assert torch.cat(sent).ne(0).sum() == 5 + 5 + 15 + 3


def test_a_fraction_attacks_for_good(simulate):
    attack = ClientAttack(0.29, "sign_flip")
    who = attack.attackers(seed=5, count=100)
    assert len(who) == 29
    assert who == attack.attackers(seed=5, count=100) != attack.attackers(seed=6, count=100)
    _, loop = simulate(ClientAttack(0.4, "sign_flip", boost=20.0), rounds=6, clients=10)
    assert loop.rows[-1]["val_acc"] < 0.9
    attack = ClientAttack(0.4, "sign_flip", boost=20.0)
    _, loop = simulate(attack, rounds=6, clients=10, aggregator=CoordinateMedian())
    assert loop.rows[-1]["val_acc"] > 0.9


@pytest.mark.parametrize("in_memory", [True, False])
def test_flipped_labels_are_those_of_attackers_and_of_this_fit(simulate, data, blobs, in_memory):
    seen = {}

    class Look(LabelFlip):
        def on_train_start(self, trainer, pl_module):
            train = trainer.datamodule.train
            seen["y"] = torch.tensor([int(train[i][1]) for i in range(len(train))])
            seen["x"] = torch.stack([train[i][0] for i in range(len(train))])

    x, y = blobs().tensors
    samples = data(train=None if in_memory else Samples(x, y))
    simulate(Look([1, 3]), datamodule=samples, rounds=1)
    flipped = torch.cat([samples.parts[1], samples.parts[3]])
    expected = y.clone()
    expected[flipped] = 2 - expected[flipped]
    assert torch.equal(seen["y"], expected)
    assert torch.equal(seen["x"], x)
    now = torch.tensor([int(samples.train[i][1]) for i in range(len(x))])
    assert torch.equal(now, y)  # as they were


def test_samples_are_changed_as_their_data_set_returns_them():
    class Shifted(TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + 10, y

    x, y, chosen = torch.arange(3.0), torch.tensor([0, 1, 2]), torch.tensor([1])
    other = lambda x, y: (2 * x, y + 5)  # noqa: E731
    for kind, expected in ((TensorDataset, [0.0, 2.0, 2.0]), (Shifted, [10.0, 22.0, 12.0])):
        found = changed(kind(x, y), chosen, other)
        assert [float(found[i][0]) for i in range(len(found))] == expected
        assert [int(found[i][1]) for i in range(len(found))] == [0, 6, 2]
    assert x.tolist() == [0, 1, 2]
    assert y.tolist() == [0, 1, 2]


def test_a_backdoor_by_hand(simulate, data):
    """The mark, who gets it, and the figure, against plain loops."""
    seen = {}

    class Look(Backdoor):
        def on_train_start(self, trainer, pl_module):
            seen["train"] = [tensor.clone() for tensor in trainer.datamodule.train.tensors]

    samples = data()
    samples.setup("fit")
    x, y = (tensor.clone() for tensor in samples.train.tensors)
    samples.val.tensors = samples.val.tensors[0], samples.val.tensors[1].byte()
    attack = Look([1], target=2, poison_fraction=0.3, size=1)
    made, loop = simulate(attack, datamodule=samples, rounds=2)
    part = samples.parts[1]
    marked = (seen["train"][0] != x).any(1).nonzero()[:, 0]
    assert set(marked.tolist()) <= set(part.tolist())
    assert len(marked) == 9  # of 30
    assert (seen["train"][0][marked][:, -1:] == x.max()).all()
    assert torch.equal(seen["train"][0][marked][:, :-1], x[marked][:, :-1])
    assert (seen["train"][1][marked] == 2).all()
    others = torch.ones(len(x), dtype=torch.bool)
    others[marked] = False
    assert torch.equal(seen["train"][1][others], y[others])
    hits = []
    for inputs, label in samples.val:
        if label != 2:
            stamped = inputs.clone()
            stamped[-1:] = x.max()
            hits.append(int(made(stamped[None]).argmax()) == 2)
    assert loop.rows[-1]["backdoor_acc"] == pytest.approx(sum(hits) / len(hits))
    assert len(hits) == 40
    assert 0 < sum(hits) < 40  # else samples of the target's class could be among them


def test_a_scaled_backdoor_takes_over_the_average_and_clipping_stops_it(simulate):
    attack = {"target": 0, "size": 2, "trigger_value": 8.0, "boost": 8.0}
    _, plain = simulate(Backdoor([0], **attack), rounds=4, clients=8)
    rule = NormClipping(0.1)
    _, clipped = simulate(Backdoor([0], **attack), rounds=4, clients=8, aggregator=rule)
    _, none = simulate(Backdoor([], **attack), rounds=4, clients=8)
    assert plain.rows[-1]["backdoor_acc"] > clipped.rows[-1]["backdoor_acc"] + 0.2
    assert plain.rows[-1]["backdoor_acc"] > none.rows[-1]["backdoor_acc"] + 0.2


class Fails(Callback):
    def on_train_batch_end(self, *args):
        raise KeyError("stop")


@pytest.mark.parametrize("ends", [[], [Fails()]], ids=["ended", "failed"])
def test_samples_are_given_back_once_training_has_ended_or_failed(simulate, data, ends):
    samples, seen = data(), []

    class Look(Callback):
        """Here clients are measured on their own samples."""

        def on_fit_end(self, trainer, pl_module):
            seen.append(trainer.datamodule.train.tensors)

    attacks = LabelFlip(0.5), Backdoor([1])
    with pytest.raises(KeyError) if ends else nullcontext():
        simulate(Look(), *attacks, *ends, datamodule=samples)
    assert bool(seen) != bool(ends)
    for x, y in (*seen, samples.train.tensors):
        assert torch.equal(y, torch.arange(120) % 3)
        assert torch.equal(x, data().train.tensors[0])


@pytest.fixture
def kept(simulate, tmp_path):
    """Train with an attack, or resume that run, and leave a checkpoint."""

    def run(attack, is_resumed=False, **options):
        path = str(tmp_path / "last.ckpt") if is_resumed else None
        options |= {"enable_checkpointing": True, "ckpt_path": path}
        return simulate(attack, RoundCheckpoint(str(tmp_path)), **options)

    return run


def test_other_attackers_in_a_resumed_run_are_named(kept):
    kept(ClientAttack([0]))
    named = r'attacks is \["ClientAttack\(clients=\[1\].*clients=\[0\]'
    with pytest.warns(UserWarning, match=named):
        kept(ClientAttack([1]), True, rounds=4, quiet=False)


def test_another_seed_than_the_checkpoints_is_refused(kept):
    kept(LabelFlip(0.5))
    words = r"seed of the checkpoint is 3, but attackers .* seed 0"
    with pytest.raises(FederationError, match=words):
        kept(LabelFlip(0.5), True, seed=None)


def test_attack_that_does_not_fit_raises(simulate, trainer, data, blobs, linear, foreign):
    with pytest.raises(FederationError, match=r"clients\[0\] must be .* at least 0, got -1"):
        LabelFlip([-1])
    with pytest.raises(FederationError, match=r"an id in clients must be .*\[0, 3\], got 9"):
        simulate(ClientAttack([0, 9]))
    with pytest.raises(FederationError, match=r"an id in clients must be .*\[0, 3\], got 9"):
        simulate(LabelFlip([0, 9]))
    with pytest.raises(FederationError, match=r"target must be an integer in \[0, 2\], got 3"):
        simulate(Backdoor(target=3))
    x, y = blobs().tensors
    with pytest.raises(FederationError, match="not in memory: set trigger_value"):
        simulate(Backdoor(), datamodule=data(train=Samples(x, y)))
    with pytest.raises(FederationError, match="FederatedDataModule with one integer"):
        simulate(LabelFlip(), datamodule=data(train=list(blobs())))
    unmeasured = FederatedDataModule(blobs(), num_clients=4, val_size=0)
    with pytest.raises(FederationError, match="requires validation samples: set val_size"):
        simulate(Backdoor(), datamodule=unmeasured)
    with pytest.raises(FederationError, match=r"size must be .*\[1, 6\], got 7: samples have the"):
        simulate(Backdoor(size=7))
    pictures = FederatedDataModule(
        InMemory(torch.zeros(30, 1, 4, 4, dtype=torch.uint8), torch.arange(30) % 3),
        InMemory(torch.zeros(3, 1, 4, 4, dtype=torch.uint8), torch.arange(3)),
        num_clients=2,
    )
    with pytest.raises(FederationError, match=r"trigger_value .* \(torch.uint8\), got -1"):
        trainer(callbacks=[Backdoor(trigger_value=-1)]).fit(foreign(), pictures)
    for y in (x[:, 0], -torch.ones(len(x)).long()):
        numbers = FederatedDataModule(InMemory(x, y), InMemory(x, y), num_clients=2)
        with pytest.raises(FederationError, match="one integer class label per sample"):
            trainer(callbacks=[LabelFlip()]).fit(linear(features=6), numbers)


def test_a_backdoor_is_measured_on_batches_of_the_validation_loader(fit, blobs):
    """Those of the training loader may be mixed or augmented."""

    def mixed(samples):
        assert all(label >= 0 for _, label in samples)  # -1 if the trigger is asked for
        return default_collate(samples)

    class Mine(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(blobs(), batch_size=8, collate_fn=mixed)

        def val_dataloader(self):
            return DataLoader(blobs(30, seed=1), batch_size=8)

    data = FederatedDataModule.from_datamodule(Mine(), num_clients=4)
    module = ClientModule(torch.nn.Linear(6, 3)).double()
    loop = fit(module, datamodule=data, rounds=1, callbacks=[Backdoor([0], size=1)])
    assert 0 <= loop.rows[0]["backdoor_acc"] <= 1
