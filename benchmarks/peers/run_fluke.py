"""Seconds per round and accuracy of fluke: its FedAVG, whose clients train one after another.

It trains with one of torch's threads or with all, whichever is faster in rounds before.

Its environment, then a run:

    benchmarks/peers/install.sh fluke
    .peers/fluke/bin/python benchmarks/peers/run_fluke.py '<json>' OUT.json
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from fluke.utils import FederationObserver
from networks import accuracy, network, synthetic
from torch import Tensor, nn

#: Rounds for which each number of threads is tried, before those that count.
TRIAL = 2


class Clock(FederationObserver):
    """Reads the clock before the first round and after each."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def start_round(self, round: int, global_model: Any) -> None:
        """Start the first round."""
        if not self.times:
            self.times.append(time.perf_counter())

    def end_round(self, round: int) -> None:
        """End a round."""
        self.times.append(time.perf_counter())


def client(index: int, samples: tuple[Tensor, Tensor], w: dict, epochs: int) -> Client:
    """A client of fluke with its samples in memory."""
    batches = FastDataLoader(
        *samples, num_labels=w["classes"], batch_size=w["batch_size"], shuffle=True
    )
    return Client(
        index=index,
        train_set=batches,
        test_set=None,
        optimizer_cfg=OptimizerConfigurator(DDict(name="SGD", lr=w["lr"])),
        loss_fn=nn.CrossEntropyLoss(),
        local_epochs=epochs,
        persistency=False,
    )


def train(w: dict, rounds: int, threads: int) -> tuple[list[float], nn.Module]:
    """Train a new federation; return the seconds of each round and the network."""
    torch.set_num_threads(threads)
    epochs, rest = divmod(w["steps"] * w["batch_size"], w["samples"])
    if rest or w["samples"] % w["batch_size"]:
        raise ValueError("fluke counts local training in passes: steps must make up whole ones")
    shape, clock = tuple(w["shape"]), Clock()
    samples = synthetic(w["clients"], w["samples"], shape, w["classes"])
    clients = [client(index, some, w, epochs) for index, some in enumerate(samples)]
    server = Server(network(shape, w["name"]), None, clients)
    federation = FedAVG(len(clients), None, None, clients=clients, server=server)
    federation.set_callbacks(clock)
    everyone = w["cohort"] == w["clients"]
    share = 1.0 if everyone else (w["cohort"] + 0.5) / w["clients"]  # which fluke rounds down
    federation.run(rounds, share)
    return [end - start for start, end in pairwise(clock.times)], server.model


def main() -> None:
    """Train the workload, write the seconds of each round and the accuracy."""
    w, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    FlukeENV().set_seed(0)
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    threads = min({1, w["threads"]}, key=lambda count: train(w, TRIAL, count)[0][-1])
    print(f"the faster number of threads: {threads}", file=sys.stderr)
    seconds, net = train(w, w["rounds"], threads)
    found = accuracy(net, tuple(w["shape"]), w["classes"])
    out.write_text(json.dumps({"seconds": seconds, "accuracy": found}))


if __name__ == "__main__":
    main()
