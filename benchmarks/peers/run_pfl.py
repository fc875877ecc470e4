"""Seconds per round and accuracy of pfl-research: its simulated backend, a thread per process.

Its environment, then a run:

    benchmarks/peers/install.sh pfl
    .peers/pfl/bin/python benchmarks/peers/run_pfl.py '<json>' OUT.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("PFL_PYTORCH_DEVICE", "cpu")

import numpy as np
import torch
from networks import accuracy, network, synthetic
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Network(nn.Module):
    """A network with the two methods that pfl asks for."""

    def __init__(self, shape: tuple[int, ...], workload: str) -> None:
        super().__init__()
        self.net = network(shape, workload)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch."""
        return cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict:
        """No metrics: pfl evaluates in the first round, whatever the frequency."""
        return {}


class Clock(TrainingProcessCallback):
    """Reads the clock before the first round and after each."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """Start the first round."""
        self.times.append(time.perf_counter())
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """End a round."""
        self.times.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    """Train the workload, write the seconds of each round and the accuracy."""
    w, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        # Start over in as many processes as threads are asked for; they share out each cohort.
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={w['threads']}",
        ]
        os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])
    torch.set_num_threads(1)
    np.random.seed(0)  # noqa: NPY002  # pfl draws from NumPy's global state
    epochs, rest = divmod(w["steps"] * w["batch_size"], w["samples"])
    if rest or w["samples"] % w["batch_size"]:
        raise ValueError("pfl counts local training in passes: the steps must make up whole ones")
    clients = synthetic(w["clients"], w["samples"], tuple(w["shape"]), w["classes"])
    datasets = [PyTorchTensorDataset(data) for data in clients]
    sampler = get_user_sampler("minimize_reuse", range(w["clients"]))
    federation = FederatedDataset(datasets.__getitem__, sampler)
    net = Network(tuple(w["shape"]), w["name"])
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=w["rounds"],
            evaluation_frequency=w["rounds"],
            train_cohort_size=w["cohort"],
            val_cohort_size=0,
        ),
        SimulatedBackend(federation, federation, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(
            net,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
        ),
        NNTrainHyperParams(
            local_num_epochs=epochs, local_learning_rate=w["lr"], local_batch_size=w["batch_size"]
        ),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    if os.environ["RANK"] == "0":
        seconds = [end - start for start, end in pairwise(clock.times)]
        found = accuracy(net.net, tuple(w["shape"]), w["classes"])
        out.write_text(json.dumps({"seconds": seconds, "accuracy": found}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
