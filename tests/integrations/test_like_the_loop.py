"""What a module, a rule or a site may do trains remotely as in the loop, or is refused by name."""

from functools import partial

import pytest
import torch
from torch import nn

from adapted import Adapted
from apart import CPU, compare, federation, net, replies_of, run, train
from frozen import frozen_once
from grids import diagonal, others_slow
from lightning_fl import ClientModule, aggregators
from lightning_fl.aggregators import FedAvg, FedDyn, FedNova, FlexLoRA, Scaffold, Staged
from lightning_fl.integrations.client import RemoteClient
from lightning_fl.integrations.exchange import Kept
from lightning_fl.integrations.server import RemoteServer
from lightning_fl.objectives import MOON, FedProto, Proximal
from lightning_fl.partition import QuantitySkew
from lightning_fl.policies import HyperparameterPolicy, Schedule
from lightning_fl.runners import Phase
from lightning_fl.transforms import TopK
from lightning_fl.types import FederationError
from linear import Linear
from two_classes import samples

pytestmark = pytest.mark.filterwarnings("ignore:FedNova|.*does not have many workers")


class Net(Linear):
    """A foreign module."""

    def __init__(self):
        super().__init__(net())


def momentum():
    return Linear(net(), partial(torch.optim.SGD, lr=0.1, momentum=0.9))


def linear(*terms):
    return ClientModule(net(), terms, partial(torch.optim.SGD, lr=0.1))


def deep():
    """BatchNorm, dropout and momentum."""
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.ReLU(), nn.Linear(6, 2)
    return Linear(nn.Sequential(*layers).double(), partial(torch.optim.SGD, lr=0.1, momentum=0.5))


class PerClient(HyperparameterPolicy):
    """Hyperparameters that differ from client to client and round to round."""

    def sample(self, round, clients):
        return {"lr": 0.05 + 0.02 * clients.double(), "num_steps": 2 + (clients + round) % 3}


CASES = {
    "a few clients": (deep, FedAvg(), {"clients_per_round": 3}),
    "FedProx": (partial(linear, Proximal(0.3)), FedAvg(), {}),
    "hyperparameters of clients": (deep, FedAvg(), {"policy": PerClient()}),
    "kept momentum": (deep, FedAvg(), {"optimizer_state": "keep", "clients_per_round": 3}),
    "local layers": (deep, FedAvg(), {"local_parameters": ["net.4.*"]}),
    "local buffers": (deep, FedAvg(), {"buffers": "local"}),
    "error feedback": (deep, FedAvg(), {"update_transforms": [TopK(0.3)], "clients_per_round": 3}),
}
#: Rules are tested in test_every_rule.py, too.
QUICK = ("hyperparameters of clients", "kept momentum", "error feedback")


@pytest.mark.filterwarnings("ignore:validation and test use the global model")
@pytest.mark.parametrize("name", others_slow(QUICK, CASES))
def test_the_global_model_is_that_of_the_loop(tmp_path, name):
    make, rule, options = CASES[name]
    compare(tmp_path, make, rule, **options)


@pytest.mark.parametrize("term", [MOON, FedProto])
def test_a_server_needs_an_example_for_terms_that_record_activations(tmp_path, term):
    def make():
        module = linear(term())
        module.example_input_array = torch.zeros(1, 4)
        return module

    compare(tmp_path, make, FedAvg(normalization="round"))
    with pytest.raises(FederationError, match="does not have: set example_input_array of the"):
        federation(lambda: linear(term()))


# --- rules ----------------------------------------------------------------------------------------


def skewed():
    return samples(partition=QuantitySkew(1.0))


def test_a_rule_knows_the_optimizer_of_the_clients(tmp_path):
    for rule in (FedNova, Scaffold):
        compare(tmp_path / rule.__name__, momentum, rule(), skewed, policy=Schedule(local_epochs=2))
    with pytest.raises(FederationError, match=r"FedCM.* SGD\(momentum"):
        federation(momentum, aggregators.FedCM())


WITH_PARTS = {
    "Scaffold": Scaffold,
    "FedDyn": lambda: FedDyn(0.1),
    "QFedAvg": lambda: aggregators.QFedAvg(q=1.0),
}


@pytest.mark.parametrize(("name", "first"), diagonal(WITH_PARTS, [True, False]))
def test_a_stage_of_a_rule_with_client_side_work(tmp_path, name, first):
    rules = [WITH_PARTS[name](), FedAvg()]
    compare(tmp_path, linear, Staged([2], rules if first else rules[::-1]))


# --- sites with their own samples -----------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [FedDyn(0.3), FedDyn(0.3, "samples"), Scaffold(), FlexLoRA(ranks=[1, 2, 1, 2, 2])]
)
def test_a_site_trains_its_own_samples_as_in_the_simulation(tmp_path, rule):
    make = linear
    if isinstance(rule, FlexLoRA):
        make = lambda: Adapted(2, features=4, classes=2).double()  # noqa: E731
    compare(tmp_path, make, rule, skewed, own=True)


def test_a_data_module_with_one_client_is_that_of_a_site():
    data = samples(clients=1)
    assert RemoteClient(Net(), data, trainer=CPU).work(3) == (12, 3)
    again = RemoteClient(Net(), data, trainer=CPU)  # for the next message
    assert again.work(7) == (12, 3)
    assert data.num_clients == 8


def test_a_stream_is_refused():
    with pytest.raises(FederationError, match="stream_steps=2 changes the samples"):
        RemoteClient(Net(), samples(stream_steps=2))


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

    def on_train_start(self):
        with torch.no_grad():
            self.net[2].bias.add_(0.25)


class Configures(Net):
    """Creates its layers when the fit begins."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(1)
            self.net = nn.Linear(4, 2).double()


class Unfreezes(Net):
    """Trains its first layer from the third round on."""

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch >= 2)


class Warms(Net):
    """Trains with a rate far above that of its optimizer."""

    def __init__(self):
        Linear.__init__(self, net(), partial(torch.optim.SGD, lr=1e-6))

    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = 0.05


class Adapts(Net):
    """Keeps a frozen layer out of its ``state_dict``, which clients have themselves."""

    strict_loading = False

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def state_dict(self, *args, **kwargs):
        return {n: v for n, v in super().state_dict(*args, **kwargs).items() if "net.0" not in n}


@pytest.mark.parametrize("make", [Anneals, Unsaved, SetsUp, Configures, Unfreezes, Warms, Adapts])
def test_a_module_with_hooks_and_buffers(tmp_path, make):
    server = compare(tmp_path, make)
    if make is Unsaved:
        assert server.module.mean.abs().sum() > 0


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_epoch_end", "on_fit_end"])
def test_a_hook_that_changes_the_global_model_is_refused(hook):
    def make():
        module = Net()
        setattr(module, hook, lambda: module.net[0].bias.data.add_(1))
        return module

    with pytest.raises(FederationError, match="Net changes the model in hooks of an epoch"):
        run(*federation(make))


def test_a_server_resumes_with_its_unsaved_buffers(tmp_path):
    file = tmp_path / "server.pt"
    server, clients = federation(Unsaved, checkpoint=file)
    run(server, clients, rounds=1)
    again, _ = federation(Unsaved, checkpoint=file)
    assert server.module.mean.abs().sum() > 0
    assert torch.equal(again.module.mean, server.module.mean)


def test_freezing_in_a_hook_is_refused_if_the_rule_depends_on_it():
    server, clients = federation(Unfreezes, FedDyn(0.1))
    with pytest.raises(FederationError, match="trains 14 parameters and the server knows of 44"):
        train(server, clients[0])


def test_a_state_that_is_no_tensor_is_refused():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

    class Extended(Net):
        def __init__(self):
            super().__init__()
            self.net[0] = Extra(4, 6).double()

    with pytest.raises(FederationError, match=r"net\.0\._extra_state of the state_dict is a dict"):
        federation(Extended)


class Single(Net):
    def __init__(self):
        super().__init__()
        self.float()

    def training_step(self, batch, batch_idx):
        x = batch[0].to(self.net[0].weight.dtype)
        return nn.functional.cross_entropy(self.net(x).float(), batch[1])


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "bf16-mixed"])
def test_the_precision_of_the_clients(tmp_path, precision):
    compare(tmp_path, Single, trainer={"precision": precision})


class Frozen(Net):
    """A large base that is not trained."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(4, 4).double().requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return super().training_step([self.base(batch[0]), batch[1]], batch_idx)


@pytest.fixture
def frozen_base():
    with frozen_once():
        yield


@pytest.mark.usefixtures("frozen_base")
def test_a_frozen_base_that_clients_have_is_not_sent():
    server, clients = federation(Frozen, send_frozen=False)
    task = server.tasks()[0]
    assert not any(name.startswith("base") for name in task.model)
    whole, _ = federation(Frozen)
    reply, _ = clients[0].train(task, Kept())
    clients[0].module.base.weight.data.add_(1)  # is sent
    assert torch.equal(reply.delta, train(whole, clients[0]).delta)
    others = RemoteClient(Frozen(1), samples(), None, CPU)
    with pytest.raises(FederationError, match="frozen parameters of this client are not those of"):
        others.train(task, Kept())


@pytest.mark.usefixtures("frozen_base")
def test_a_server_resumes_with_the_frozen_base_that_it_began_with(tmp_path):
    _, clients = federation(Frozen)
    initial, file, kept = Frozen(1).state_dict(), tmp_path / "server.pt", {}
    for rounds in (1, 2):
        server = RemoteServer(Frozen(), seed=3, buffers="average", trainer=CPU)
        server.begin([12] * 5, [3] * 5, initial=initial, checkpoint=file)
        server.finish(replies_of(clients, server.tasks(), kept))
        server.close()
        assert server.round == rounds
        assert torch.equal(server.module.base.weight, initial["base.weight"])


@pytest.mark.filterwarnings("ignore:validation and test use the global model")
def test_local_layers_begin_with_the_values_of_the_server():
    server, clients = federation(Net, local_parameters=["net.2.*"])
    expected = train(server, clients[0])
    clients[1].module.net[2].weight.data.add_(1)  # as in a module that is made without a seed
    assert torch.equal(train(server, clients[1]).delta, expected.delta)


def test_a_server_needs_no_device_of_the_clients():
    options = {"accelerator": "gpu", "devices": 4, "strategy": "client_parallel"}
    server = RemoteServer(Net(), seed=3, trainer=options)
    server.begin([12] * 5, [3] * 5)
    assert {p.device.type for p in server.module.parameters()} == {"cpu"}


# --- options that both have -----------------------------------------------------------------------


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
    server, _ = federation(linear, of_server)
    client = RemoteClient(linear(), samples(), of_client, CPU)
    with pytest.raises(FederationError, match=match):
        train(server, client)


@pytest.mark.filterwarnings("ignore:validation and test use the global model")
@pytest.mark.parametrize(
    "options",
    [
        {"local_parameters": ["net.0.bias"]},
        {"buffers": "server"},
        {"phases": [Phase(["net.2.weight"])]},
    ],
)
def test_a_client_that_exchanges_something_else_is_refused(options):
    def half():
        made = Unsaved()
        made.net[0].weight.requires_grad_(False)
        return made

    given = {"local_parameters": ["net.2.bias"]}
    server, _ = federation(half, **given)
    client = RemoteClient(half(), samples(), None, CPU, **{**given, **options})
    with pytest.raises(FederationError, match="this client exchanges other parameters or buffers"):
        train(server, client)


def test_a_server_that_resumes_with_other_options_says_so(tmp_path):
    file = tmp_path / "server.pt"
    server, clients = federation(Net, FedDyn(0.1), checkpoint=file)
    run(server, clients, rounds=1)
    with pytest.warns(
        UserWarning, match=r"clients in a round is 2, was 5.*alpha=0.2.*, was FedDyn"
    ):
        federation(Net, FedDyn(0.2), checkpoint=file, clients_per_round=2)
    with pytest.warns(UserWarning, match=r"batches in a local epoch is 18, was 15"):
        federation(Net, FedDyn(0.1), skewed, checkpoint=file)
    with pytest.raises(FederationError, match="its buffers is average, here it is server"):
        federation(Net, FedDyn(0.1), checkpoint=file, buffers="server")
    with pytest.raises(FederationError, match="its aggregator_class is FedDyn, here it is FedAvg"):
        federation(Net, FedAvg(), checkpoint=file)
