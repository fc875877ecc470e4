"""A server and clients that only exchange tasks and replies train as the loop does, bit for bit."""

import copy
import os
import re
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn

from apart import replies_of
from grids import others_slow
from lightning_fl.aggregators import (
    PFNM,
    ClusteredFL,
    CoordinateMedian,
    FedAdam,
    FedAvg,
    FedBuff,
    QFedAvg,
    Scaffold,
)
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.integrations.client import RemoteClient
from lightning_fl.integrations.exchange import Kept
from lightning_fl.integrations.server import RemoteServer
from lightning_fl.objectives import ClientModule, Proximal
from lightning_fl.policies import HyperparameterPolicy, Schedule
from lightning_fl.runners import VectorizedClients
from lightning_fl.transforms import TopK
from lightning_fl.types import FederationError
from tutorial import trainer
from two_classes import samples

ROUNDS = 5
#: Rounds and clients whose reply is lost.
LOST = {(1, 2), (2, 2), (3, 2), (2, 0)}


class Net(LightningModule):
    """A foreign module with dropout and BatchNorm, which momentum trains."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.ReLU(), nn.Linear(6, 2)
        ).double()

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


def client_module(*terms):
    return ClientModule(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double(), terms)


class PerClient(HyperparameterPolicy):
    """Hyperparameters that differ from client to client and round to round."""

    def sample(self, round, clients):
        return {"lr": 0.05 + 0.02 * clients.double(), "num_steps": 2 + (clients + round) % 3}


class Learning(PerClient):
    """A policy that asks for the validation loss."""

    learns_from = frozenset({"val_loss"})


ONLY_LOOP = {"optimizer_state", "update_transforms", "phases"}


def by_the_loop(module, data, folder, **options):
    trainer(folder, FederatedLoop(seed=3, **options), rounds=ROUNDS).fit(module, datamodule=data())
    return module.state_dict()


def apart(module, data, rule, rounds=ROUNDS, server=None, kept=None, clients=None, **options):
    """Train with a server and clients that share no object."""
    of_clients = {name: options.pop(name) for name in ONLY_LOOP & options.keys()}
    both = {n: options[n] for n in ("buffers", "local_parameters") if n in options}
    others = copy.deepcopy(module)
    server = server or RemoteServer(module, copy.deepcopy(rule), seed=3, **options)
    clients = clients or [
        RemoteClient(
            copy.deepcopy(others),
            data(),
            copy.deepcopy(rule),
            {"accelerator": "cpu"},
            **copy.deepcopy(of_clients),
            **both,
        )
        for _ in range(5)
    ]
    if not len(server.num_samples):
        server.begin(*zip(*(client.work(i) for i, client in enumerate(clients)), strict=True))
    kept = {} if kept is None else kept
    for _ in range(rounds):
        server.finish(replies_of(clients, server.tasks(), kept))
    return server, kept, clients


CASES = {
    "FedAvg": (Net, FedAvg(), {}),
    "a few clients": (Net, FedAvg(), {"clients_per_round": 3}),
    "FedAdam": (Net, FedAdam(), {}),
    "CoordinateMedian": (Net, CoordinateMedian(), {}),
    "FedProx": (lambda: client_module(Proximal(0.3)), FedAvg(), {}),
    "SCAFFOLD": (client_module, Scaffold(), {"clients_per_round": 3}),
    "qFedAvg": (client_module, QFedAvg(), {}),
    "ClusteredFL": (client_module, ClusteredFL(warmup=1, eps1=9.0, eps2=0.0), {}),
    "hyperparameters of clients": (Net, FedAvg(), {"policy": PerClient}),
    "kept momentum": (Net, FedAvg(), {"optimizer_state": "keep", "clients_per_round": 3}),
    "local layers": (Net, FedAvg(), {"local_parameters": ["net.4.*"]}),
    "local buffers": (Net, FedAvg(), {"buffers": "local"}),
    "error feedback": (
        Net,
        FedAvg(),
        {"update_transforms": [TopK(0.3)], "clients_per_round": 3},
    ),
}
#: Rules are tested in test_every_rule.py, too.
QUICK = ("FedAvg", "SCAFFOLD", "hyperparameters of clients", "kept momentum", "error feedback")


@pytest.mark.filterwarnings("ignore:validation and test use the global model")
@pytest.mark.parametrize("name", others_slow(QUICK, CASES))
def test_the_global_model_is_that_of_the_loop(tmp_path, name):
    make, rule, options = CASES[name]

    def fresh():
        made = copy.deepcopy(options)
        if "policy" in made:
            made["policy"] = made["policy"]()
        return {"policy": Schedule(local_epochs=1), "buffers": "average", **made}

    torch.manual_seed(0)
    module = make()
    loop = by_the_loop(
        copy.deepcopy(module), samples, tmp_path, aggregator=copy.deepcopy(rule), **fresh()
    )
    server, _, _ = apart(copy.deepcopy(module), samples, rule, **fresh())
    for key, value in server.module.state_dict().items():
        assert torch.equal(value, loop[key]), key
    assert any(not torch.equal(loop[key], value) for key, value in module.state_dict().items())


def test_a_server_resumes_where_it_was(tmp_path):
    """Also the moments of the rule; clients keep their own state."""
    torch.manual_seed(0)
    module, options = client_module(), {"policy": Schedule(local_epochs=1)}
    expected, _, _ = apart(copy.deepcopy(module), samples, FedAdam(), **options)
    first, kept, clients = apart(copy.deepcopy(module), samples, FedAdam(), rounds=2, **options)
    torch.save(first.state_dict(), tmp_path / "server.pt")
    again = RemoteServer(client_module(), FedAdam(), seed=3, **options)
    again.begin(*zip(*(client.work(i) for i, client in enumerate(clients)), strict=True))
    again.load_state_dict(torch.load(tmp_path / "server.pt", weights_only=True))
    apart(module, samples, None, rounds=3, server=again, kept=kept, clients=clients)
    assert again.round == 5
    for key, value in expected.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[key], value)


def test_a_server_killed_in_a_round_repeats_it(tmp_path):
    """The clients have trained in that round, and begin it again from their state before it."""
    torch.manual_seed(0)
    module, options = client_module(), {"policy": Schedule(local_epochs=1)}
    expected, _, _ = apart(copy.deepcopy(module), samples, Scaffold(), rounds=4, **options)
    first, kept, clients = apart(copy.deepcopy(module), samples, Scaffold(), rounds=2, **options)
    torch.save(first.state_dict(), tmp_path / "server.pt")
    replies_of(clients, first.tasks(), kept)  # of which the server learns nothing
    again = RemoteServer(client_module(), Scaffold(), seed=3, **options)
    again.begin(*zip(*(client.work(i) for i, client in enumerate(clients)), strict=True))
    again.load_state_dict(torch.load(tmp_path / "server.pt", weights_only=True))
    apart(module, samples, None, rounds=2, server=again, kept=kept, clients=clients)
    for key, value in expected.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[key], value)


@pytest.mark.filterwarnings("ignore:.*dropped")
def test_replies_lost_in_several_rounds_in_a_row_lose_no_state(tmp_path):
    """The client continues from the state of its last used update, as a dropped one in the loop."""

    class Lost(Callback):
        def on_client_updates(self, plan, clients, delta, dropped):
            dropped.update((i, "late") for i in clients.tolist() if (plan.round, i) in LOST)
            return delta

    torch.manual_seed(0)
    module, options = client_module(), {"policy": Schedule(local_epochs=1)}
    simulated, loop = copy.deepcopy(module), FederatedLoop(Scaffold(), seed=3, **options)
    trainer(tmp_path, loop, Lost(), rounds=ROUNDS).fit(simulated, datamodule=samples())
    server, kept, clients = apart(module, samples, Scaffold(), rounds=0, **options)
    for round in range(ROUNDS):
        replies = replies_of(clients, server.tasks(), kept)
        server.finish({i: reply for i, reply in replies.items() if (round, i) not in LOST})
    for key, value in simulated.state_dict().items():
        assert torch.equal(server.module.state_dict()[key], value), key


def test_a_client_that_lost_its_state_says_so():
    kept = Kept().after("a", -1, 0, {"c": torch.zeros(1)}).after("a", 0, 2, {}).after("a", 2, 5, {})
    assert sorted(kept.states) == [2, 5]
    again = kept.after("a", 2, 5, {"c": torch.ones(1)})  # a repeated round
    assert sorted(again.states) == [2, 5]
    assert again.at("a", 5)["c"] == 1
    assert sorted(kept.after("a", 2, 7, {}).states) == [2, 7]  # the update of round 5 was lost
    with pytest.warns(UserWarning, match="has lost its state of round 1, and continues without"):
        assert kept.at("a", 0) == {}
    assert kept.at("a", -1) == {}


def test_a_client_does_not_use_the_state_of_another_run(tmp_path):
    kept = Kept().after("first", -1, 1, {"c": torch.ones(1)})
    assert kept.at("second", -1) == {}
    with pytest.warns(UserWarning, match="has lost its state of round 2"):
        assert kept.at("second", 1) == {}
    assert list(kept.after("second", -1, 3, {}).states) == [3]
    kept.write(tmp_path / "client.pt")
    assert Kept.read(tmp_path / "client.pt").at("first", 1)["c"] == 1


def test_schedulers_and_vectorized_modules_are_refused():
    class Scheduled(Net):
        def configure_optimizers(self):
            made = super().configure_optimizers()
            return [made], [torch.optim.lr_scheduler.StepLR(made, 2)]

    server = RemoteServer(Scheduled(), seed=3, buffers="average")
    with pytest.raises(FederationError, match="Scheduled has a learning rate scheduler"):
        server.begin([12] * 5, [3] * 5)
    server = RemoteServer(Net(), seed=3, buffers="average")
    server.begin([12] * 5, [3] * 5)
    client = RemoteClient(Scheduled(), samples(), trainer={"accelerator": "cpu"})
    with pytest.raises(FederationError, match="Scheduled has a learning rate scheduler"):
        client.train(server.tasks()[0], {})
    with pytest.raises(FederationError, match="pass the module itself"):
        RemoteClient(VectorizedClients(Net()), samples())


def test_a_checkpoint_of_another_federation_is_refused():
    server, _, _ = apart(client_module(), samples, FedAdam(), rounds=1)
    other = RemoteServer(client_module(), FedAvg(), seed=3)
    other.begin([12] * 5, [3] * 5)
    with pytest.raises(FederationError, match=r"has aggregator 'FedAdam', and this .* 'FedAvg'"):
        other.load_state_dict(server.state_dict())


def test_a_file_that_is_no_state_or_cannot_be_written_is_named_before_clients_train(tmp_path):
    server, _, _ = apart(client_module(), samples, FedAdam(), rounds=0)
    file = tmp_path / "new" / "server.pt"
    assert not server.read(file)
    server.write(file)
    assert server.read(file)
    damaged, other = tmp_path / "damaged.pt", tmp_path / "other.pt"
    damaged.write_bytes(file.read_bytes()[:-500])
    torch.save({"state_dict": {}}, other)
    for path, match in [
        (damaged, r"damaged\.pt is damaged, or not a checkpoint of a server"),
        (other, r"other\.pt is damaged, or not a checkpoint of a server: it has other entries"),
        (tmp_path, "cannot be written .Is a directory.: choose another file"),
        (damaged / "server.pt", r"server\.pt cannot be written .* choose another file"),
    ]:
        with pytest.raises(FederationError, match=match):
            server.read(path)


def test_a_client_of_another_version_is_refused():
    server, _, clients = apart(client_module(), samples, FedAvg(), rounds=0)
    task = replace(server.tasks()[0], version="0.0.1")
    with pytest.raises(FederationError, match=r"server has version 0\.0\.1 of .* the same version"):
        clients[0].train(task, {})


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_hostile_file_of_a_server_or_client_runs_no_code(tmp_path):
    server, _, _ = apart(client_module(), samples, FedAdam(), rounds=0)
    file = tmp_path / "hostile.pt"
    torch.save({**server.state_dict(), "run": Payload(tmp_path / "ran")}, file)
    for read in (server.read, Kept.read):
        with pytest.raises(FederationError, match=r"hostile\.pt is damaged.*"):
            read(file)
    assert not (tmp_path / "ran").exists()


def test_a_damaged_state_of_a_client_says_what_to_do(tmp_path):
    (tmp_path / "client-0.pt").write_bytes(b"PK")
    with pytest.raises(FederationError, match=r"client-0\.pt is damaged: restore it, or delete it"):
        Kept.read(tmp_path / "client-0.pt")


def test_clients_that_fail_are_dropped_as_in_the_loop():
    torch.manual_seed(0)
    module = client_module()
    server = RemoteServer(module, FedAvg(), seed=3, min_clients=2)
    clients = [RemoteClient(client_module(), samples(), trainer={"accelerator": "cpu"})] * 5
    server.begin(*zip(*(client.work(i) for i, client in enumerate(clients)), strict=True))
    before = copy.deepcopy(module.state_dict())
    tasks = server.tasks()
    one, _ = clients[0].train(tasks[0], {})
    with pytest.warns(UserWarning, match="round 1: ") as caught:
        metrics = server.finish({0: one})  # four did not reply, and two are needed
    assert "round 1: dropped 4 of 5 client updates: clients 1, 2, 3, 4 (dropped out)" in said(
        caught
    )
    assert "round 1: 1 of 5 clients returned, too few for min_clients=2 and FedAvg" in said(caught)
    assert (metrics["clients"], metrics["dropped"]) == (5, 4)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    replies = {task.client: clients[0].train(task, {})[0] for task in server.tasks()}
    replies[1] = replace(replies[1], delta=replies[1].delta * torch.nan)
    del replies[4]
    expected = before_and_after(server, replies, but=(1, 4))
    dropped = r"round 2: .* client 4 \(dropped out\), client 1 \(non-finite values\)"
    with pytest.warns(UserWarning, match=dropped):
        assert server.finish(replies)["dropped"] == 2
    assert torch.equal(server.runner.read().vector, expected)


def before_and_after(server, replies, but):
    """The mean of the updates of the other clients, added to the global model."""
    used = {i: reply for i, reply in replies.items() if i not in but}
    total = sum(reply.num_samples for reply in used.values())
    move = sum(reply.delta * (reply.num_samples / total) for reply in used.values())
    return (server.runner.read().vector + move).to(torch.float64)


def said(caught):
    """Return the texts of warnings."""
    return "\n".join(str(each.message) for each in caught)


SPOILED = {
    "shape": (
        lambda reply: replace(reply, delta=reply.delta[1:]),
        "43 values in torch.float64, and",
    ),
    "dtype": (
        lambda reply: replace(reply, delta=reply.delta.float()),
        "44 values in torch.float32",
    ),
    "counters": (lambda reply: replace(reply, counters=torch.zeros(3)), "the model exchanges 44"),
    "nothing more": (lambda reply: replace(reply, extras={}), "requires control_change of the cli"),
    "more": (lambda reply: with_extra(reply, torch.ones(1, 1)), r"of shape \(44,\) .* got \(1,\)"),
    "of two": (lambda reply: with_extra(reply, torch.ones(2, 44)), "not that of one client"),
    "number": (lambda reply: with_extra(reply, torch.tensor(torch.nan)), "not that of one client"),
    "rate": (lambda reply: replace(reply, lr=float("nan")), r"\(non-finite values\)"),
    "cause": (lambda reply: replace(reply, dropped="x" * 999), r"\(dropped out\)"),
}


def with_extra(reply, value):
    return replace(reply, extras={"control_change": value})


@pytest.mark.parametrize("name", SPOILED)
def test_an_update_that_does_not_fit_drops_its_client_alone(name):
    spoil, message = SPOILED[name]
    torch.manual_seed(0)
    server = RemoteServer(client_module(), Scaffold(), seed=3)
    client = RemoteClient(client_module(), samples(), Scaffold(), {"accelerator": "cpu"})
    server.begin(*zip(*(client.work(i) for i in range(5)), strict=True))
    expected = copy.deepcopy(server)
    replies = {task.client: client.train(task, {})[0] for task in server.tasks()}
    with pytest.warns(UserWarning, match="client 2 ") as caught:
        assert server.finish(replies | {2: spoil(replies[2])})["dropped"] == 1
    assert re.search(f"client 2 .*{message}", said(caught))
    expected.tasks()
    del replies[2]
    with pytest.warns(UserWarning, match=r"round 1: dropped 1 of 5 client updates: client 2 \("):
        expected.finish(replies)
    for key, value in expected.module.state_dict().items():
        assert torch.equal(server.module.state_dict()[key], value)
    assert torch.equal(server.rule.control, expected.rule.control)
    assert server.last == expected.last


def test_a_diverging_client_says_why_it_sends_nothing():
    class Diverges(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * torch.nan

    torch.manual_seed(0)
    module = Diverges()
    server = RemoteServer(module, seed=3, buffers="average")
    client = RemoteClient(copy.deepcopy(module), samples(), trainer={"accelerator": "cpu"})
    server.begin(*zip(*(client.work(i) for i in range(5)), strict=True))
    with pytest.warns(UserWarning, match="non-finite values|0 of 1 clients returned"):
        reply, state = client.train(server.tasks()[0], {})
    assert (reply.dropped, state) == ("non_finite", {})
    with pytest.warns(UserWarning, match="round 1: ") as caught:
        assert server.finish({0: reply})["dropped"] == 5
    assert "clients 1, 2, 3, 4 (dropped out), client 0 (non-finite values)" in said(caught)


def test_sites_with_their_own_data_have_random_numbers_of_their_own():
    whole = samples()
    whole.setup("fit")
    own = [torch.utils.data.Subset(whole.train, part.tolist()) for part in whole.parts]
    clients = [
        RemoteClient(client_module(), data, trainer={"accelerator": "cpu"}, batch_size=4)
        for data in own
    ]
    assert [client.work(i) for i, client in enumerate(clients)] == [(12, 3)] * 5
    server = RemoteServer(client_module(), seed=3)
    server.begin([12] * 5, [3] * 5)
    one, other = server.tasks()[:2]
    same = [clients[0].train(task, {})[0].delta for task in (one, one, other)]
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])  # the same samples in another order


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"seed": 3}, "seed is not an option of a client, which has optimizer_state, buffers"),
        ({"optimizer_state": "keeps"}, "optimizer_state must be"),
        ({"aggregator": Scaffold}, r"aggregator must be a Aggregator, got .*: write Scaffold\(\)"),
        ({"trainer": {"max_epochs": 3}}, "cannot have max_epochs: the server says"),
        ({"trainer": {"callbacks": []}}, "cannot have callbacks: the server says"),
        ({"trainer": {"fast_dev_run": True}}, "cannot have fast_dev_run: the server says"),
        ({"trainer": {"accelerator": "cpu", "devices": 2}}, "and its Trainer has 2: set devices=1"),
    ],
)
def test_options_of_a_client_are_checked_before_it_trains(options, match):
    with pytest.raises(FederationError, match=match):
        RemoteClient(client_module(), samples(), **options)


def test_a_client_without_samples_is_named():
    client = RemoteClient(client_module(), samples(), trainer={"accelerator": "cpu"})
    with pytest.raises(FederationError, match="client 7 has no samples: the data has 5 clients"):
        client.work(7)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"aggregator": PFNM()}, "PFNM replaces the network"),
        ({"aggregator": FedBuff()}, "FedBuff simulates the times"),
        ({"policy": Learning()}, "Learning learns from val_loss"),
        ({"min_clients": 0}, "min_clients must be an integer of at least 1"),
    ],
)
def test_what_needs_all_clients_in_one_process_is_refused(options, match):
    with pytest.raises(FederationError, match=match):
        RemoteServer(client_module(), **options)
