"""Seconds per round and accuracy of BlazeFL, its own FedAvg in the faster of its parallel modes.

Its environment, then a run:

    benchmarks/peers/install.sh blazefl
    .peers/blazefl/bin/python benchmarks/peers/run_blazefl.py '<json>' OUT.json
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from blazefl.contrib.fedavg import (
    FedAvgBaseServerHandler,
    FedAvgProcessPoolClientTrainer,
    FedAvgThreadPoolClientTrainer,
)
from blazefl.core import IPCMode
from networks import accuracy, network, synthetic
from torch import Tensor, nn

#: Rounds for which both modes are tried, before the one that counts.
TRIAL = 3


class Batches:
    """Batches of a client in memory: faster than torch's loader, which collates single samples."""

    def __init__(self, samples: tuple[Tensor, Tensor], size: int, random: torch.Generator) -> None:
        self.dataset, self.size, self.random = samples, size, random

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.dataset
        for index in torch.randperm(len(x), generator=self.random).split(self.size):
            yield x[index], y[index]


class Clients:
    """The samples of all clients, as BlazeFL asks for them."""

    def __init__(self, samples: list[tuple[Tensor, Tensor]]) -> None:
        self.samples = samples

    def get_dataloader(
        self, type_: str, cid: int, batch_size: int, generator: torch.Generator
    ) -> Batches:
        """Return the batches of a client."""
        return Batches(self.samples[cid], batch_size, generator)

    def set_dataset(self, type_: str, cid: int, dataset: object) -> None:
        """Do nothing: samples do not change."""


class Networks:
    """Makes the network."""

    def __init__(self, shape: tuple[int, ...], workload: str) -> None:
        self.shape, self.workload = shape, workload

    def select_model(self, name: str) -> nn.Module:
        """Return a new network."""
        return network(self.shape, self.workload)


def trainers(w: dict, clients: Clients, networks: Networks, epochs: int, folder: Path) -> dict:
    """Return the parallel modes by name."""
    common = {
        "model_selector": networks,
        "model_name": "net",
        "dataset": clients,
        "device": "cpu",
        "num_clients": w["clients"],
        "epochs": epochs,
        "batch_size": w["batch_size"],
        "lr": w["lr"],
        "seed": 0,
        "num_parallels": w["threads"],
    }
    folders = {"share_dir": folder / "share", "state_dir": folder / "state"}
    processes = FedAvgProcessPoolClientTrainer(**common, **folders, ipc_mode=IPCMode.SHARED_MEMORY)
    return {"threads": FedAvgThreadPoolClientTrainer(**common), "processes": processes}


def rounds(trainer: object, server: FedAvgBaseServerHandler, count: int) -> list[float]:
    """Run rounds; return the seconds of each."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        trainer.local_process(server.downlink_package(), server.sample_clients())
        for package in trainer.uplink_package():
            server.load(package)
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Train the workload, write the seconds of each round and the accuracy."""
    w, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    epochs, rest = divmod(w["steps"] * w["batch_size"], w["samples"])
    if rest or w["samples"] % w["batch_size"]:
        raise ValueError("BlazeFL counts local training in passes: steps must make up whole ones")
    shape = tuple(w["shape"])
    clients = Clients(synthetic(w["clients"], w["samples"], shape, w["classes"]))
    networks = Networks(shape, w["name"])
    share = (w["cohort"] + 0.5) / w["clients"]  # which the server rounds down

    def new_server() -> FedAvgBaseServerHandler:
        return FedAvgBaseServerHandler(
            networks, "net", clients, 10**9, w["clients"], share, "cpu", 1000, 0
        )

    with tempfile.TemporaryDirectory() as folder:
        found = {}
        modes = trainers(w, clients, networks, epochs, Path(folder))
        for name, trainer in modes.items():
            trainer.progress_fn = lambda jobs: jobs  # no progress bars
            found[name] = median(rounds(trainer, new_server(), TRIAL)[1:])
        name = min(found, key=found.__getitem__)
        print(f"the faster mode: {name}", file=sys.stderr)
        server = new_server()
        seconds = rounds(modes[name], server, w["rounds"])
    result = {"seconds": seconds, "accuracy": accuracy(server.model, shape, w["classes"])}
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
