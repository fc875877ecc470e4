"""A server and clients that share no object, and their comparison with the loop."""

import copy

import torch
from torch import nn
from torch.utils.data import Subset

from lightning_fl.callbacks import FederatedLoop
from lightning_fl.integrations.client import OF_CLIENT, RemoteClient
from lightning_fl.integrations.exchange import Kept
from lightning_fl.integrations.server import RemoteServer
from lightning_fl.policies import Schedule
from tutorial import trainer
from two_classes import samples

ROUNDS = 4
CPU = {"accelerator": "cpu"}
#: Options of the loop that the server and its clients both have.
BOTH = ("buffers", "local_parameters")
#: Of a federation that has what servers and clients keep, in ``lightning-fl fit`` and in an app.
CONFIG = """
seed_everything: 3
trainer: {accelerator: cpu, max_epochs: 3, gradient_clip_val: 0.5, logger: false}
model:
  class_path: ClientModule
  init_args:
    net: {class_path: MLPClassifier, init_args: {sizes: [64, 20, 10]}}
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1, momentum: 0.5}}
    terms: [{class_path: Proximal, init_args: {mu: 0.1}}]
data:
  class_path: Digits
  init_args: {num_clients: 4, batch_size: 32}
federation:
  aggregator: FedAdam
  policy: {class_path: Schedule, init_args: {lr: 0.1, num_steps: 3}}
  clients_per_round: 3
  optimizer_state: keep
"""


def net():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def replies_of(clients, tasks, kept):
    """Let clients train, each with what it keeps."""
    replies = {}
    for task in tasks:
        before = kept.get(task.client, Kept())
        replies[task.client], kept[task.client] = clients[task.client].train(task, before)
    return replies


def run(server, clients, rounds=ROUNDS, kept=None):
    """Run rounds; return what clients keep."""
    kept = {} if kept is None else kept
    for _ in range(rounds):
        server.finish(replies_of(clients, server.tasks(), kept))
    return kept


def train(server, client):
    """Return the reply of a client to the first task of a round."""
    return client.train(server.tasks()[0], Kept())[0]


def made(make):
    torch.manual_seed(0)
    return make()


def usual(options):
    return {"policy": Schedule(local_epochs=1), "buffers": "average", **options}


def federation(make, rule=None, data=samples, own=False, checkpoint=None, **options):
    """Return a server that has begun and its clients, from options of a loop and two others.

    Args:
        make: Function that returns the module.
        rule: The aggregation rule.
        data: Function that returns the data of the simulation.
        own: Whether a client has its own samples only.
        checkpoint: Checkpoint of the server.
        options: Options of the loop, of the Trainer (``trainer``), and ``send_frozen``.
    """
    options = copy.deepcopy({"trainer": CPU, "seed": 3, **usual(options)})
    of_server = {n: v for n, v in options.items() if n not in OF_CLIENT or n in BOTH}
    of_clients = {n: options[n] for n in OF_CLIENT if n in options}
    server = RemoteServer(made(make), copy.deepcopy(rule), **of_server)
    whole = data()
    whole.setup("fit")
    clients = [
        RemoteClient(
            made(make),
            Subset(whole.train, part.tolist()) if own else data(),
            copy.deepcopy(rule),
            {**CPU, **options["trainer"]},
            whole.batch_size,
            **copy.deepcopy(of_clients),
        )
        for part in whole.parts
    ]
    work = (client.work(i) for i, client in enumerate(clients))
    server.begin(*zip(*work, strict=True), num_rounds=ROUNDS, checkpoint=checkpoint)
    return server, clients


def by_the_loop(folder, make, rule=None, data=samples, *callbacks, **options):
    """Return the module that the loop has trained."""
    options = copy.deepcopy({"seed": 3, **usual(options)})
    of_trainer = options.pop("trainer", {})
    module, loop = made(make), FederatedLoop(copy.deepcopy(rule), **options)
    trainer(folder, loop, *callbacks, rounds=ROUNDS, **of_trainer).fit(module, datamodule=data())
    return module


def assert_same(module, other):
    """Compare the states of modules bit for bit."""
    found, expected = module.state_dict(), other.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def compare(folder, make, rule=None, data=samples, own=False, **options):
    """Compare a server and its clients with the loop, bit for bit; return the server."""
    server, clients = federation(make, rule, data, own, **options)
    run(server, clients)
    simulated = by_the_loop(folder, make, rule, data, **options)
    assert_same(server.module, simulated)
    start, end = made(make).state_dict(), simulated.state_dict()  # empty if layers come later
    assert not start or any(not torch.equal(start[name], end[name]) for name in start)
    return server
