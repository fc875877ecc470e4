"""Federations of which some run vectorized and one in the module itself."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_fl.callbacks import FederatedLoop
from lightning_fl.partition import Dirichlet
from lightning_fl.policies import HyperparameterPolicy, Schedule
from lightning_fl.runners import VectorizedClients, groups
from linear import SGD, Linear


class PerClient(HyperparameterPolicy):
    """Another amount of work for each client and round, and another learning rate.

    Its figures are what the clients report, which the table of rounds holds.
    """

    learns_from = frozenset({"client_losses"})

    def __init__(self, lr=True):
        super().__init__()
        self.lr = lr

    def sample(self, round, clients):
        steps = {"num_steps": 1 + clients % 3 + round % 2}
        return steps | ({"lr": 0.01 * (1 + clients.double())} if self.lr else {})

    def update(self, feedback):
        self.losses = dict(
            zip(feedback.plan.clients.tolist(), feedback.losses.tolist(), strict=True)
        )

    def metrics(self):
        return {f"loss_{client}": self.losses.get(client, -1.0) for client in range(7)}


def two_layers():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


class Tiny(Linear):
    """A small net whose loss is logged in every way.

    Args:
        optimizer: Function of the parameters.
        net: Function that makes the net.
        step: Function of module, loss, batch and its index that returns the loss of a step.
    """

    def __init__(self, optimizer=SGD, net=two_layers, step=None):
        super().__init__(net(), optimizer)
        self.step = step

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss if self.step is None else self.step(self, loss, batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))


@pytest.fixture
def tiny():
    """A Tiny or a child of it in float64, always with the same parameters."""

    def make(kind=Tiny, *args, **options):
        torch.manual_seed(0)
        return kind(*args, **options).double()

    make.kind, make.net = Tiny, two_layers
    return make


@pytest.fixture
def uncompiled(monkeypatch):
    """Graphs that are not compiled, for speed: what they compute is the same."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.fixture
def traced(monkeypatch):
    """Graphs that are traced but not compiled, for speed."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile(f, backend="eager", dynamic=False))


@pytest.fixture(params=["plain", "vectorized"])
def wrap(request):
    """Both ways to train a module."""
    if request.param == "plain":
        return lambda module: module
    return lambda module: VectorizedClients(module, group_size=3, compile=False)


@pytest.fixture
def ragged(data, blobs):
    """Seven clients with 4 to 60 samples: batches differ in size between them."""

    def make(train=None, **options):
        options = {"partition": Dirichlet(0.4, min_size=4), "batch_size": 10, "seed": 1} | options
        train = blobs(180) if train is None else train
        return data(train, num_clients=7, **options)

    return make


@pytest.fixture
def train(fit, ragged, monkeypatch):
    """Fit a module, sequentially (``group_size=None``) or vectorized; returns the loop.

    ``steps`` is the number of local steps if all clients make as many, at the optimizer's rate.
    """

    def run(
        module,
        group_size=None,
        most_steps=1,
        datamodule=None,
        federation=None,
        rounds=2,
        compile=False,
        steps=None,
        **options,
    ):
        policy = PerClient() if steps is None else Schedule(num_steps=steps)
        given = {"policy": policy, "buffers": "average", "seed": 3} | (federation or {})
        user = module
        if group_size is not None:
            user = VectorizedClients(module, group_size, compile=compile)
        monkeypatch.setattr(groups, "MOST_STEPS", most_steps)  # in a Lightning batch
        datamodule = ragged() if datamodule is None else datamodule
        return fit(user, FederatedLoop(**given), datamodule, rounds=rounds, **options)

    run.policy = PerClient
    return run


@pytest.fixture
def agree(train, flat, ragged):
    """Train a module sequentially and vectorized: equal parameters, buffers and rows.

    Several group sizes, and numbers of steps in a batch, are compared with one fit of the module.
    ``modules`` has the modules that were trained last.
    """

    def check(make, group_size=(3,), most_steps=1, datamodule=ragged, **options):
        plain = make()
        before, check.modules = flat(plain), [plain]
        expected = train(plain, datamodule=datamodule(), **options)
        assert (flat(plain) - before).abs().max() > 1e-3, "nothing was trained"
        bundles = most_steps if isinstance(most_steps, tuple) else (most_steps,)
        for k, steps in product(group_size, bundles):
            check.modules.append(module := make())
            found = train(module, k, steps, datamodule(), **options)
            torch.testing.assert_close(
                flat(module), flat(plain), atol=1e-12, rtol=0, equal_nan=True
            )
            assert len(found.rows) == len(expected.rows)
            for row, wanted in zip(found.rows, expected.rows, strict=True):
                # The last step of a round is one of several clients.
                figures = {n: v for n, v in wanted.items() if not n.endswith("_step")}
                names = figures.pop("dropped_clients")
                assert {n: row[n] for n in figures} == pytest.approx(figures, rel=1e-6, nan_ok=True)
                assert row["dropped_clients"] == names
        return expected

    return check
