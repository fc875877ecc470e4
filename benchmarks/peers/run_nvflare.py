"""Seconds per round and accuracy of NVFlare: FedAvg in its simulator, a process per client.

With fewer processes than clients, it starts a new process for each client and round.

Its environment, then a run:

    benchmarks/peers/install.sh nvflare
    .peers/nvflare/bin/python benchmarks/peers/run_nvflare.py '<json>' OUT.json
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import nvflare.client as flare
import torch
from networks import accuracy, batches, network, synthetic
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe.sim_env import SimEnv
from torch import nn
from torch.nn.functional import cross_entropy

#: The variable with the arguments of the run, for the processes that the simulator starts.
ARGUMENTS = "LIGHTNING_FL_PEER"
#: Most clients of a workload, since each has a process.
MOST_CLIENTS = 16


class Net(nn.Sequential):
    """The network of the run; NVFlare makes models by their class, without arguments."""

    def __init__(self) -> None:
        w, _ = json.loads(os.environ[ARGUMENTS])
        super().__init__(*network(tuple(w["shape"]), w["name"]))


def client() -> None:
    """Train as a site; the first one also reads the clock and measures the accuracy."""
    torch.set_num_threads(1)
    w, out = json.loads(os.environ[ARGUMENTS])
    flare.init()
    site = int(flare.get_site_name().removeprefix("site-")) - 1
    shape = tuple(w["shape"])
    x, y = synthetic(w["clients"], w["samples"], shape, w["classes"])[site]
    net, clock = Net(), list[float]()
    while flare.is_running():
        received = flare.receive()
        clock.append(time.perf_counter())
        net.load_state_dict(received.params)
        if len(clock) <= w["rounds"]:
            net.train()
            optimizer = torch.optim.SGD(net.parameters(), lr=w["lr"])
            for batch in batches(len(x), w["batch_size"], w["steps"]):
                optimizer.zero_grad()
                cross_entropy(net(x[batch]), y[batch]).backward()
                optimizer.step()
        elif site == 0:
            seconds = [end - start for start, end in pairwise(clock)]
            found = {"seconds": seconds, "accuracy": accuracy(net, shape, w["classes"])}
            Path(out).write_text(json.dumps(found))
        flare.send(flare.FLModel(params=net.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": len(x)}))


def main() -> None:
    """Start the simulator, with a round more, in which nobody trains."""
    w, out = json.loads(sys.argv[1]), Path(sys.argv[2]).absolute()
    if w["clients"] > MOST_CLIENTS:
        raise ValueError(f"{w['clients']} processes do not fit on a small machine")
    folder = str(Path(__file__).parent.absolute())
    os.environ |= {ARGUMENTS: json.dumps([w, str(out)]), "PYTHONPATH": folder}
    recipe = FedAvgRecipe(
        name="job",
        model=Net(),
        min_clients=w["clients"],
        num_rounds=w["rounds"] + 1,
        train_script=__file__,
        server_expected_format="pytorch",
    )
    with tempfile.TemporaryDirectory() as workspace:
        recipe.execute(SimEnv(num_clients=w["clients"], workspace_root=workspace))


if __name__ == "__main__":
    # Under its own name the module can be imported by the server, which makes the network.
    import run_nvflare

    run_nvflare.client() if ARGUMENTS in os.environ else run_nvflare.main()
