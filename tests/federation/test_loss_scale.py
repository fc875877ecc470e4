"""Each client has its own loss scale; that of the next round is the median."""

import itertools

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.aggregators import FedAvg, FedDyn, Scaffold
from lightning_fl.callbacks import ClientFaults, FederatedLoop, PersonalizedEvaluation
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.federation.loss_scale import ScaleState, median_state
from lightning_fl.objectives import PerFedAvg
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(dropped|the global model (is|was) kept)"),
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`"),
]
#: A high scale, with which the first steps overflow in float16.
SCALE = 2.0**20


class Net(L.LightningModule):
    """Least squares, whose gradients overflow in float16 with a high loss scale."""

    def __init__(self, **optimizer):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.optimizer = nn.Linear(3, 1), optimizer

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0])[:, 0] - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, **self.optimizer)


class Updates(L.Callback):
    """Keep the update of each client in each round."""

    def __init__(self):
        self.found = {}

    def on_client_updates(self, plan, clients, delta, dropped):
        for client, update in zip(clients.tolist(), delta.clone(), strict=True):
            self.found[plan.round, client] = update
        return delta


def samples(clients=4, bad=(), of_each=8, n=8):
    """Samples of clients; some clients have NaN in one sample or in all."""
    random, found = torch.Generator().manual_seed(0), []
    for client in range(clients):
        x = torch.randn(n, 3, generator=random)
        y = x.sum(1) + client
        if client in bad:
            x[:of_each] = torch.nan
        found.append(TensorDataset(x, y))
    return found


@pytest.fixture
def train(trainer):
    """Train clients with a gradient scaler on a CPU; returns the scaler, the updates, the loop."""

    def run(clients, module=None, rounds=2, callbacks=(), path=None, scale=SCALE, **options):
        scaler, updates = torch.amp.GradScaler("cpu", init_scale=scale), Updates()
        options = {"policy": Schedule(num_steps=12), "seed": 1, **options}
        loop = FederatedLoop(csv_name=None, **options)
        data = FederatedDataModule.from_clients(clients, batch_size=4, val_size=0)
        made = trainer(
            loop,
            rounds,
            [updates, *callbacks],
            plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        )
        made.fit(Net() if module is None else module, datamodule=data, ckpt_path=path)
        loop.made = made
        return scaler, updates.found, loop

    return run


@pytest.mark.parametrize("of_each", [1, 8])
def test_a_client_with_nan_does_not_change_the_scale_of_others(train, of_each):
    expected, alone, _ = train(samples(), rounds=1)
    scaler, found, loop = train(samples(bad=[0], of_each=of_each), rounds=1)
    assert expected.get_scale() < SCALE
    assert scaler.state_dict() == expected.state_dict()
    for client in (1, 2, 3):
        assert torch.equal(found[0, client], alone[0, client])
    # Some steps are made, or the update is dropped as in other precisions.
    assert loop.rows[0]["non_finite"] == (of_each == 8)


def test_a_client_without_a_step_ends_the_run_if_asked(train):
    with pytest.raises(FederationError, match=r"no usable update of client 2 \(non-finite"):
        train(samples(bad=[2]), on_client_error="raise")


def test_the_order_of_clients_changes_nothing():
    states = [ScaleState(4.0, 2), ScaleState(4.0, 0), ScaleState(1.0, 7), ScaleState(8.0, 1)]
    assert {median_state(each) for each in itertools.permutations(states)} == {ScaleState(4.0, 2)}
    assert median_state([]) is None


def test_one_client_has_the_scale_of_lightning(train, trainer):
    clients, options = samples(1), {"init_scale": 2.0**16, "growth_interval": 3}
    scalers = [torch.amp.GradScaler("cpu", **options) for _ in range(2)]
    plugins = [MixedPrecision("16-mixed", "cpu", scaler) for scaler in scalers]
    plain, federated = Net(), Net()
    trainer(False, 9, plugins=[plugins[0]]).fit(plain, DataLoader(clients[0], batch_size=8))
    loop = FederatedLoop(csv_name=None, policy=Schedule(num_steps=1))
    data = FederatedDataModule.from_clients(clients, batch_size=8, val_size=0)
    trainer(loop, 9, plugins=[plugins[1]]).fit(federated, datamodule=data)
    assert scalers[1].state_dict() == scalers[0].state_dict()
    assert 0 < sum(row["dropped"] for row in loop.rows) < 8
    torch.testing.assert_close(federated.net.weight, plain.net.weight)


def test_only_clients_that_return_set_the_next_scale(train):
    few = {"policy": Schedule(num_steps=2)}
    lost, _, loop = train(samples(), rounds=1, callbacks=[ClientFaults(dropout=1.0)], **few)
    assert loop.rows[0]["dropped_out"] == 4
    assert lost.get_scale() == SCALE
    # A scale that is too high for all clients goes down, though none of them makes a step.
    scaler, _, loop = train(samples(bad=range(4)), rounds=2, **few)
    assert [row["non_finite"] for row in loop.rows] == [4, 4]
    assert scaler.get_scale() == SCALE / 2**4


def test_a_resumed_run_has_the_same_scale(train, tmp_path):
    whole, expected, _ = train(samples(bad=[0], of_each=1), rounds=3)
    _, _, loop = train(samples(bad=[0], of_each=1), rounds=1)
    loop.made.save_checkpoint(path := tmp_path / "round.ckpt")
    again, found, _ = train(samples(bad=[0], of_each=1), rounds=3, path=path)
    assert again.state_dict() == whole.state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    assert len(found) == 8


class Stop(L.Callback):
    """Fail in the second round, after steps of a client."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 5:
            raise RuntimeError("stop")


def test_an_interrupted_round_leaves_the_scale_of_its_start(train):
    bad = samples(bad=[0], of_each=1)
    expected, _, _ = train(bad, rounds=1)
    plugin = []

    class Keep(Stop):
        def on_train_start(self, trainer, pl_module):
            plugin.append(trainer.precision_plugin)

    with pytest.raises(RuntimeError, match="stop"):
        train(bad, callbacks=[Keep()])
    assert plugin[0].scaler.state_dict() == expected.state_dict()


def test_gradients_outside_of_the_optimizers_steps_are_not_lost_in_float16():
    trainer = L.Trainer(
        accelerator="cpu",
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))],
        logger=False,
        enable_checkpointing=False,
    )
    module = PerFedAvg(nn.Linear(1, 2, bias=False), inner_lr=0.1)
    weight, batch = torch.tensor([[5.0], [-5.0]]), (torch.ones(4096, 1), torch.zeros(4096).long())

    def gradient():
        with trainer.precision_plugin.train_step_context():
            return module._gradient({"net.weight": weight}, batch)["net.weight"]

    assert (gradient() == 0).all()  # no Trainer, whose scaler would tell
    module.trainer = trainer
    # Softmax minus target; for one of the equal samples, this is below the range of float16.
    expected = torch.tensor([[-1.0], [1.0]]) / (1 + torch.tensor(10.0).exp())
    torch.testing.assert_close(gradient(), expected, rtol=5e-3, atol=0)


def test_clients_adapt_the_global_model_in_single_precision(trainer):
    class Small(Net):
        """Gradients of 1e-8, which are zero in float16."""

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 1e-8

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=5e6)

    def score(module, batch):
        return -(module(batch[0])[:, 0] - batch[1]).square()

    evaluation = PersonalizedEvaluation(steps=30, metric=score)
    data = FederatedDataModule.from_clients(
        samples(n=20), batch_size=4, val_size=0, local_test_size=0.4, seed=0
    )
    loop = FederatedLoop(csv_name=None, policy=Schedule(num_steps=1), seed=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    trainer(loop, 1, [evaluation], plugins=plugins).fit(Small(), datamodule=data)
    assert all(row["personal"] > row["server"] / 2 for row in evaluation.rows)


def test_clients_that_train_at_once_cannot_share_a_scale(train):
    with pytest.raises(FederationError, match=r"precision='16-mixed'.*VectorizedClients.*bf16"):
        train(samples(), VectorizedClients(Net(), 2))


def test_terms_of_gradients_are_scaled_for_a_fused_optimizer(train):
    found = []
    for fused in (False, True):
        module = Net(fused=fused)
        train(samples(), module, rounds=3, aggregator=FedDyn(0.5), scale=256.0)
        found.append(module.net.weight.detach())
    assert torch.equal(*found)
    train(samples(), module := Net(fused=True), rounds=3, aggregator=FedAvg(), scale=256.0)
    assert not torch.allclose(module.net.weight, found[0])


class Faint(ClientModule):
    """Gradients of its losses are zero in float16 without a loss scale."""

    def federated_losses(self, batch, outputs=None):
        return super().federated_losses(batch, outputs) * 1e-7


def test_gradients_at_the_global_model_do_not_vanish(train):
    clients = [TensorDataset(each.tensors[0], torch.arange(8) % 3) for each in samples()]
    torch.manual_seed(0)
    module = Faint(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    _, _, loop = train(clients, module, aggregator=Scaffold("I"), rounds=1, scale=2.0**16)
    assert loop.aggregator.control.count_nonzero() == loop.aggregator.control.numel()
