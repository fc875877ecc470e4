"""What a module, a rule or a site may do trains remotely as in the loop, or is refused by name."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import Subset

from adapted import Adapted
from apart import replies_of
from grids import diagonal
from lightning_fl import ClientModule, aggregators
from lightning_fl.aggregators import FedAvg, FedDyn, FedNova, FlexLoRA, Scaffold, Staged
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.integrations.client import RemoteClient
from lightning_fl.integrations.server import RemoteServer
from lightning_fl.partition import QuantitySkew
from lightning_fl.policies import Schedule
from lightning_fl.runners import constants
from lightning_fl.types import FederationError
from tutorial import trainer
from two_classes import samples

ROUNDS = 4

pytestmark = pytest.mark.filterwarnings("ignore:FedNova|.*does not have many workers")


class Net(LightningModule):
    """A foreign module."""

    optimizer = staticmethod(partial(torch.optim.SGD, lr=0.1))

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def linear():
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    return ClientModule(net, (), partial(torch.optim.SGD, lr=0.1))


def made(make):
    torch.manual_seed(0)
    return make()


def begun(make, rule=None, data=samples, options=None, of_clients=None, own=False):
    """Return a server that has begun, and its clients."""
    given = {"seed": 3, "policy": Schedule(local_epochs=1), "buffers": "average", **(options or {})}
    usual = {"accelerator": "cpu"}
    server = RemoteServer(
        made(make), copy.deepcopy(rule), **copy.deepcopy({"trainer": usual, **given})
    )
    whole = data()
    whole.setup("fit")
    parts = [Subset(whole.train, part.tolist()) for part in whole.parts]
    clients = [
        RemoteClient(
            made(make),
            part if own else data(),
            copy.deepcopy(rule),
            given.get("trainer", usual),
            whole.batch_size,
            **copy.deepcopy({"buffers": given["buffers"], **(of_clients or {})}),
        )
        for part in parts
    ]
    work = (client.work(i) for i, client in enumerate(clients))
    server.begin(*zip(*work, strict=True), num_rounds=ROUNDS)
    return server, clients


def compare(folder, make, rule=None, data=samples, options=None, of_clients=None, own=False):
    """Compare a server and its clients with the loop, bit for bit."""
    server, clients = begun(make, rule, data, options, of_clients, own)
    kept = {}
    for _ in range(ROUNDS):
        server.finish(replies_of(clients, server.tasks(), kept))
    options = copy.deepcopy(options or {})
    more = {"accelerator": "cpu", **options.pop("trainer", {})}
    policy = options.pop("policy", Schedule(local_epochs=1))
    options = {"buffers": "average", **options, **(of_clients or {})}
    loop = FederatedLoop(copy.deepcopy(rule), policy, seed=3, **options)
    simulated = made(make)
    fit = trainer(folder, loop, rounds=ROUNDS, **more)
    fit.fit(simulated, datamodule=data())
    expected, found = simulated.state_dict(), server.module.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    start = made(make).state_dict()  # empty if layers are created later
    assert not start or any(not torch.equal(start[name], expected[name]) for name in start)
    return server


# --- rules ----------------------------------------------------------------------------------------


def skewed():
    return samples(partition=QuantitySkew(1.0))


def test_a_rule_knows_the_optimizer_of_the_clients(tmp_path):
    class Momentum(Net):
        optimizer = staticmethod(partial(torch.optim.SGD, lr=0.1, momentum=0.9))

    compare(tmp_path, Momentum, FedNova(), skewed, {"policy": Schedule(local_epochs=2)})
    with pytest.raises(FederationError, match=r"Scaffold.* SGD\(momentum"):
        begun(Momentum, Scaffold())


WITH_PARTS = {
    "Scaffold": Scaffold,
    "FedDyn": lambda: FedDyn(0.1),
    "QFedAvg": lambda: aggregators.QFedAvg(q=1.0),
}


@pytest.mark.parametrize(("name", "first"), diagonal(WITH_PARTS, [True, False]))
def test_a_stage_of_a_rule_with_client_side_work(tmp_path, name, first):
    rules = [WITH_PARTS[name](), FedAvg()]
    compare(tmp_path, linear, Staged([2], rules if first else rules[::-1]))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_clients_of_different_sizes_with_feddyn(tmp_path, weighting, own):
    compare(tmp_path, Net, FedDyn(0.3, weighting), skewed, own=own)


# --- sites with their own samples -----------------------------------------------------------------


@pytest.mark.parametrize("rule", [FedAvg(), Scaffold(), FlexLoRA(ranks=[1, 2, 1, 2, 2])])
def test_a_site_trains_its_own_samples_as_in_the_simulation(tmp_path, rule):
    make = linear
    if isinstance(rule, FlexLoRA):
        make = lambda: Adapted(2, features=4, classes=2).double()  # noqa: E731
    compare(tmp_path, make, rule, skewed, own=True)


def test_a_data_module_with_one_client_is_that_of_a_site():
    data = samples(clients=1)
    assert RemoteClient(Net(), data, trainer={"accelerator": "cpu"}).work(3) == (12, 3)
    again = RemoteClient(Net(), data, trainer={"accelerator": "cpu"})  # for the next message
    assert again.work(7) == (12, 3)
    assert data.num_clients == 8


def test_a_stream_is_refused():
    with pytest.raises(FederationError, match="stream_steps=2 changes the samples"):
        RemoteClient(Net(), samples(stream_steps=2))


def test_a_client_whose_number_of_samples_has_changed_is_dropped():
    server, clients = begun(Net)
    replies = replies_of(clients, server.tasks(), {})
    replies[2] = replace(replies[2], num_samples=13)
    with pytest.warns(UserWarning, match="client 2 is dropped: it has trained 13 .* 12|dropped 1 "):
        assert server.finish(replies)["dropped"] == 1


# --- modules --------------------------------------------------------------------------------------


class Anneals(Net):
    """Reads the number of rounds."""

    def training_step(self, batch, batch_idx):
        left = 1 - self.trainer.current_epoch / self.trainer.max_epochs
        return super().training_step(batch, batch_idx) * left


class Unsaved(Net):
    """Counts in a buffer that its ``state_dict`` does not have."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64), persistent=False)

    def training_step(self, batch, batch_idx):
        self.mean += 0.1 * (batch[0].mean(0) - self.mean)
        return super().training_step([batch[0] - self.mean, batch[1]], batch_idx)


class SetsUp(Net):
    """Changes its weights before the fit."""

    def setup(self, stage):
        with torch.no_grad():
            self.net[0].weight.mul_(0.5)

    def on_fit_start(self):
        with torch.no_grad():
            self.net[0].bias.add_(0.25)


class Configures(LightningModule):
    """Creates its layers when the fit begins."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(1)
            self.net = nn.Linear(4, 2).double()

    training_step, validation_step = Net.training_step, Net.validation_step
    optimizer, configure_optimizers = Net.optimizer, Net.configure_optimizers


class Unfreezes(Net):
    """Trains its first layer from the third round on."""

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch >= 2)


@pytest.mark.parametrize("make", [Anneals, Unsaved, SetsUp, Configures, Unfreezes])
def test_a_module_with_hooks_and_buffers(tmp_path, make):
    server = compare(tmp_path, make)
    if make is Unsaved:
        assert server.module.mean.abs().sum() > 0


def test_a_server_resumes_with_its_unsaved_buffers(tmp_path):
    server, clients = begun(Unsaved)
    server.finish(replies_of(clients, server.tasks(), {}))
    torch.save(server.state_dict(), tmp_path / "server.pt")
    again, _ = begun(Unsaved)
    again.load_state_dict(torch.load(tmp_path / "server.pt", weights_only=True))
    assert torch.equal(again.module.mean, server.module.mean)
    assert again.run == server.run


def test_freezing_in_a_hook_is_refused_if_the_rule_depends_on_it():
    server, clients = begun(Unfreezes, FedDyn(0.1))
    with pytest.raises(FederationError, match="trains 14 parameters and the server knows of 44"):
        clients[0].train(server.tasks()[0], {})


def test_weights_that_change_when_training_starts_are_refused():
    class Changes(Net):
        def on_train_start(self):
            with torch.no_grad():
                self.net[2].bias.zero_()

    server, clients = begun(Changes)
    with pytest.raises(FederationError, match=r"Changes\.on_train_start changes net\.2\.bias"):
        clients[0].train(server.tasks()[0], {})


def test_a_state_that_is_no_tensor_is_refused():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

    class Extended(Net):
        def __init__(self):
            super().__init__()
            self.net[0] = Extra(4, 6).double()

    with pytest.raises(FederationError, match=r"net\.0\._extra_state of the state_dict is a dict"):
        begun(Extended)


class Single(Net):
    def __init__(self):
        super().__init__()
        self.float()

    def training_step(self, batch, batch_idx):
        x = batch[0].to(self.net[0].weight.dtype)
        return nn.functional.cross_entropy(self.net(x).float(), batch[1])


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "bf16-mixed"])
def test_the_precision_of_the_clients(tmp_path, precision):
    compare(tmp_path, Single, options={"trainer": {"precision": precision, "accelerator": "cpu"}})


class Frozen(Net):
    """A large base that is not trained."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(4, 4).double().requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return super().training_step([self.base(batch[0]), batch[1]], batch_idx)


def test_a_frozen_base_that_clients_have_is_not_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "are_large", lambda *sizes: True)
    server, clients = begun(Frozen, None, options={"send_frozen": False})
    task = server.tasks()[0]
    assert not any(name.startswith("base") for name in task.model)
    whole, _ = begun(Frozen, None)
    reply, _ = clients[0].train(task, {})
    clients[0].module.base.weight.data.add_(1)  # is sent
    other, _ = clients[0].train(whole.tasks()[0], {})
    assert torch.equal(reply.delta, other.delta)
    others = RemoteClient(Frozen(1), samples(), None, {"accelerator": "cpu"})
    with pytest.raises(FederationError, match="frozen parameters of this client are not those of"):
        others.train(task, {})


@pytest.mark.filterwarnings("ignore:validation and test use the global model")
def test_local_layers_begin_with_the_values_of_the_server():
    local = {"local_parameters": ["net.2.*"]}
    server, clients = begun(Net, options=local, of_clients=local)
    task = server.tasks()[0]
    expected, _ = clients[0].train(task, {})
    clients[1].module.net[2].weight.data.add_(1)  # as in a module that is made without a seed
    found, _ = clients[1].train(task, {})
    assert torch.equal(found.delta, expected.delta)


def test_a_server_needs_no_device_of_the_clients():
    options = {"accelerator": "gpu", "devices": 4, "strategy": "ddp"}
    server = RemoteServer(Net(), seed=3, trainer=options)
    server.begin([12] * 5, [3] * 5)
    assert {p.device.type for p in server.module.parameters()} == {"cpu"}


# --- options that both have -----------------------------------------------------------------------


def train_one(server, client):
    return client.train(server.tasks()[0], {})


@pytest.mark.parametrize(
    ("of_server", "of_client", "match"),
    [
        (FedDyn(0.3), None, r"server uses FedDyn\(alpha=0.3.* this client FedAvg\(.*: pass"),
        (FedDyn(0.3), FedDyn(0.1), r"alpha=0.3.* this client FedDyn\(alpha=0.1"),
        (FedAvg(), FedDyn(0.3), "uses a rule without work for clients, and this client FedDyn"),
        (FedAvg(), Scaffold(), "uses a rule without work for clients, and this client Scaffold"),
        (
            Staged([2], [FedDyn(0.1), FedAvg()]),
            Staged([1], [FedDyn(0.1), FedAvg()]),
            r"Staged\(rounds=\[2\]\) of .* this client Staged\(rounds=\[1\]\)",
        ),
    ],
)
def test_a_client_with_another_rule_is_refused(of_server, of_client, match):
    server, _ = begun(linear, of_server)
    client = RemoteClient(linear(), samples(), of_client, {"accelerator": "cpu"})
    with pytest.raises(FederationError, match=match):
        train_one(server, client)


@pytest.mark.filterwarnings("ignore:validation and test use the global model")
@pytest.mark.parametrize(
    "options",
    [
        {"local_parameters": ["net.0.bias"]},
        {"buffers": "server"},
    ],
)
def test_a_client_that_exchanges_something_else_is_refused(options):
    def half():
        made = Unsaved()
        made.net[0].weight.requires_grad_(False)
        return made

    given = {"local_parameters": ["net.2.bias"]}
    server, _ = begun(half, options=given, of_clients=given)
    client = RemoteClient(half(), samples(), None, {"accelerator": "cpu"}, **{**given, **options})
    with pytest.raises(FederationError, match="this client exchanges other parameters or buffers"):
        train_one(server, client)


def test_a_server_that_resumes_with_other_options_says_so():
    first, _ = begun(Net, FedDyn(0.1))
    again, _ = begun(Net, FedDyn(0.2), options={"clients_per_round": 2})
    with pytest.warns(
        UserWarning, match=r"clients in a round is 2, was 5.*alpha=0.2.*, was FedDyn"
    ):
        again.load_state_dict(first.state_dict())
    more, _ = begun(Net, FedDyn(0.1))
    more.num_samples[2] += 4
    with pytest.warns(UserWarning, match="training samples is 64, was 60"):
        more.load_state_dict(first.state_dict())
    other, _ = begun(Net, FedDyn(0.1), options={"buffers": "server"})
    with pytest.raises(FederationError, match="buffers 'average', and this federation has 'server"):
        other.load_state_dict(first.state_dict())
