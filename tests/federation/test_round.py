"""Updates of clients reach the aggregator."""

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import TensorDataset

from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.aggregators import FedAvg
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.contracts.client_part import ClientPart
from lightning_fl.partition import IID, Natural
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError
from only import Only


class Buffered(ClientPart):
    """Sends its own memory, which it overwrites for each client."""

    def __init__(self):
        self.sent = torch.zeros(1, 2, dtype=torch.float64)

    def end(self, client, memory):
        self.sent[:] = client.clients.double()
        return {"mark": self.sent}


class Noted(FedAvg):
    """Notes what it gets."""

    def __init__(self, part=None):
        super().__init__()
        self.sizes, self.marks, self.part = [], [], part

    def client_parts(self):
        return [] if self.part is None else [self.part]

    def update(self, clients):
        self.sizes.append(len(clients.clients))
        for name, mark in clients.extras.items():
            self.marks.append((name, clients.clients.tolist(), mark[:, 0].tolist()))
        assert clients.num_steps.tolist() == [2] * len(clients.clients)
        super().update(clients)


def train(fit, data, rule, group_size=None):
    torch.manual_seed(0)
    module = ClientModule(torch.nn.Linear(6, 3), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    user = VectorizedClients(module, group_size, compile=False) if group_size else module
    loop = FederatedLoop(rule, policy=Schedule(num_steps=2), buffers="average", seed=1)
    fit(user.double(), loop, data(num_clients=20), rounds=2)
    return [p.tolist() for p in module.parameters()], rule


def test_the_work_of_a_client_is_its_samples_in_all_local_steps(fit, data, blobs):
    keys = [0] * 40 + [1] * 4
    clients = data(blobs(44), num_clients=None, batch_size=None, partition=Natural(), keys=keys)
    loop = FederatedLoop(policy=Schedule(num_steps=3))
    fit(ClientModule(torch.nn.Linear(6, 3)).double(), loop, clients)
    assert loop.plan().work.tolist() == [120, 12]


@pytest.mark.parametrize(("group_size", "sizes"), [(None, [1] * 40), (7, [7, 7, 6] * 2)])
def test_the_rule_gets_the_update_of_each_group(fit, data, group_size, sizes):
    _, rule = train(fit, data, Noted(), group_size)
    assert rule.sizes == sizes


def test_what_a_part_overwrites_has_been_sent(fit, data):
    _, rule = train(fit, data, Noted(Buffered()))
    assert len(rule.marks) == 40
    assert all(clients == marks for _, clients, marks in rule.marks)


def test_updates_of_an_abandoned_round_are_forgotten(fit, data):
    rule = Noted()

    def fails(clients):
        if int(clients[0]) == 5:
            raise RuntimeError("stopped")
        return {}

    rule.rejected = fails
    with pytest.raises(RuntimeError, match="stopped"):
        train(fit, data, rule)
    assert rule.sizes == [1] * 5
    del rule.rejected
    found, _ = train(fit, data, rule)
    assert found == train(fit, data, FedAvg())[0]


@pytest.fixture
def regression(data):
    """Two clients with linear targets."""

    def make():
        random = torch.Generator().manual_seed(0)
        x = torch.randn(24, 3, generator=random, dtype=torch.float64)
        samples = TensorDataset(x, x.sum(1))
        return data(samples, num_clients=2, batch_size=4, val=samples, partition=IID())

    return make


def changed(linear, **methods):
    """A module with other methods."""
    made = linear()
    made.__class__ = type("Changed", (type(made),), methods)
    return made


def with_a_loose_tensor(self):
    self.weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    return torch.optim.SGD([*self.parameters(), self.weight], lr=0.1)


def anew(self):
    if self.current_epoch == 1:
        self.trainer.strategy.setup_optimizers(self.trainer)


def accumulate(self):
    if self.current_epoch == 1:
        self.trainer.accumulate_grad_batches = 2


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"configure_optimizers": with_a_loose_tensor}, "trains 1 tensors that are not parameters"),
        ({"on_train_epoch_start": anew}, "the optimizer of Changed was replaced during the fit"),
        ({"on_train_epoch_start": accumulate}, r"Trainer\(accumulate_grad_batches=2\) is not"),
    ],
)
def test_what_clients_would_train_together_is_refused(fit, linear, regression, methods, message):
    with pytest.raises(FederationError, match=message):
        fit(changed(linear, **methods), FederatedLoop(), regression(), rounds=2)


def test_gradients_of_a_client_do_not_reach_the_next(fit, linear, regression):
    """A module that accumulates gradients over two of three steps."""

    def step(self, epoch, batch_idx, optimizer, closure):
        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()

    def keep(self, *args):
        pass

    def clear(self, outputs, batch, batch_idx):
        if batch_idx % 2:
            self.optimizers().zero_grad()

    methods = {"optimizer_step": step, "optimizer_zero_grad": keep, "on_train_batch_end": clear}
    found = []
    for clients in ([0], [1], [0, 1]):
        made = changed(linear, **methods)
        options = {"sampler": Only(clients), "clients_per_round": len(clients), "seed": 1}
        loop = FederatedLoop(FedAvg("uniform"), Schedule(num_steps=3), **options)
        fit(made, loop, regression(), rounds=1)
        found.append(made.net.weight.detach())
    torch.testing.assert_close(found[2], (found[0] + found[1]) / 2, atol=1e-14, rtol=0)


class Peek(Callback):
    """Look at batches of the round's loader and of another one."""

    def on_train_epoch_start(self, trainer, module):
        next(iter(trainer.train_dataloader))

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        for loader in (trainer.train_dataloader, trainer.datamodule.train_dataloader()):
            for _, _ in zip(range(2), loader, strict=False):
                pass


def test_a_callback_may_look_at_batches(fit, linear, data, regression):
    found = []
    for callbacks in ([], [Peek()]):
        made = linear()
        loop = FederatedLoop(policy=Schedule(local_epochs=2), seed=1)
        clients = VectorizedClients(made, group_size=1, compile=False)
        samples = regression()
        fit(clients, loop, samples, rounds=3, callbacks=callbacks)
        found.append(made.net.weight.tolist())
    assert loop.plan().stepwise
    assert found[0] == found[1]
    assert {round for round, _ in samples._reader.waiting} == {2}  # nothing of earlier rounds
