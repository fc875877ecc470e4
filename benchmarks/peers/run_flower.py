"""Seconds per round and accuracy of Flower: its simulation engine, a thread per client and actor.

Its environment, then a run:

    benchmarks/peers/install.sh flower
    .peers/flower/bin/python benchmarks/peers/run_flower.py '<json>' OUT.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import cache
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from networks import accuracy, batches, network, synthetic
from torch import nn
from torch.nn.functional import cross_entropy

client_app = ClientApp()
cached_samples = cache(synthetic)


@cache
def cached_network(shape: tuple[int, ...], workload: str) -> nn.Module:
    """The network that the clients of one actor share; the first call sets the actor up."""
    torch.set_num_threads(1)
    return network(shape, workload)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model on the samples of one client."""
    w = message.content["config"]
    shape = tuple(w["shape"])
    model = cached_network(shape, w["name"])
    clients = cached_samples(w["clients"], w["samples"], shape, w["classes"])
    x, y = clients[context.node_config["partition-id"]]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=w["lr"])
    for batch in batches(len(x), w["batch_size"], w["steps"]):
        optimizer.zero_grad()
        cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(x)}),
        }
    )
    return Message(content=content, reply_to=message)


def main() -> None:
    """Train the workload, write the seconds of each round and the accuracy."""
    w, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    shape, clock = tuple(w["shape"]), list[float]()
    net = network(shape, w["name"])
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=w["cohort"] / w["clients"],
            fraction_evaluate=0.0,
            min_train_nodes=w["cohort"],
            min_available_nodes=w["clients"],
        )
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(net.state_dict()),
            num_rounds=w["rounds"],
            train_config=ConfigRecord(w),
            # Called before the first round and after each: it only reads the clock.
            evaluate_fn=lambda server_round, arrays: clock.append(time.perf_counter()),
        )
        net.load_state_dict(result.arrays.to_torch_state_dict())

    run_simulation(
        server_app,
        client_app,
        num_supernodes=w["clients"],
        backend_config={
            "init_args": {"num_cpus": w["threads"], "num_gpus": 0},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    seconds = [end - start for start, end in pairwise(clock)]
    out.write_text(json.dumps({"seconds": seconds, "accuracy": accuracy(net, shape, w["classes"])}))


if __name__ == "__main__":
    # Under its own name the module is imported once by each actor, which keeps its caches;
    # functions of __main__ would travel with each message.
    import run_flower

    run_flower.main()
