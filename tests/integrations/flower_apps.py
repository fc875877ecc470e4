"""A ServerApp and a ClientApp, which Flower's workers import."""

import os
import sys
import time
from pathlib import Path

import torch
from flwr.serverapp import ServerApp
from torch import nn

from lightning_fl.aggregators import CoordinateMedian, FedAdam, FedAvg, Scaffold
from lightning_fl.integrations.client import RemoteClient
from lightning_fl.integrations.flower import FederationStrategy, client_app
from lightning_fl.integrations.server import RemoteServer
from lightning_fl.objectives import ClientModule, Proximal
from lightning_fl.policies import Schedule
from two_classes import samples

RULES = {
    "FedAvg": FedAvg,
    "FedAdam": FedAdam,
    "CoordinateMedian": CoordinateMedian,
    "FedProx": FedAvg,
    "SCAFFOLD": Scaffold,
}
#: A case in which client 1 hangs in the second round.
HANGS = "hangs"


def module(name):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    return ClientModule(net, [Proximal(0.3)] if name == "FedProx" else ())


def policy():
    return Schedule(lr=0.2, local_epochs=1)


def server(name, result, rounds=5, clients=5, sampled=3, checkpoint=None):
    """A server that writes the last global model into a file."""
    app = ServerApp()

    @app.main()
    def main(grid, context):
        trained = module(name)
        rule = RULES.get(name, FedAvg)()
        served = RemoteServer(trained, rule, policy(), clients_per_round=sampled, seed=3)
        plan = FederationStrategy(served, clients, checkpoint)
        plan.start(grid, num_rounds=rounds, timeout=120)
        torch.save(trained.state_dict(), result)

    return app


def client(name, clients=5, folder=None):
    """A client of the simulation in ``two_classes``."""

    def remote(context):
        return RemoteClient(module(name), samples(clients), RULES[name](), {"accelerator": "cpu"})

    return client_app(remote, folder)


class Hanging(RemoteClient):
    """A client that does not reply in the second round, and says so in a file."""

    marker: Path

    def train(self, task, kept):
        if (task.client, task.round) == (1, 1):
            self.marker.touch()
            time.sleep(600)
        return super().train(task, kept)


def hanging_client(marker):
    def remote(context):
        made = Hanging(module(HANGS), samples(2), FedAvg(), {"accelerator": "cpu"})
        made.marker = marker
        return made

    return client_app(remote)


if __name__ == "__main__":  # Flower's simulation engine, in a process of its own
    from flwr.simulation import run_simulation

    case, result = sys.argv[1:]
    run_simulation(
        server(case, Path(result)),
        client(case),
        num_supernodes=5,
        backend_config={"client_resources": {"num_cpus": 1}},
    )
elif "FLOWER_CASE" in os.environ:  # the processes of a deployment
    case, result = os.environ["FLOWER_CASE"], Path(os.environ["FLOWER_RESULT"])
    rounds = int(os.environ["FLOWER_ROUNDS"])
    server_app = server(case, result, rounds, 2, 2, checkpoint=result.with_suffix(".ckpt"))
    if case == HANGS:
        client_app_of_case = hanging_client(result.with_suffix(".hangs"))
    else:
        client_app_of_case = client(case, 2, result.parent / "kept")
