"""Rules that are federated averaging in a limit."""

# ruff: noqa: F403, F405

from functools import partial

import pytest

from lightning_fl.aggregators import *
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.partition import QuantitySkew
from lightning_fl.policies import Schedule
from two_classes import samples
from written_plainly import Uneven, close, hidden, module, vector

DECAYING = Schedule(lr=0.13, num_steps=3, decay=0.9)
#: Rules and the weighting of FedAvg, and what differs from a round of three clients.
EQUAL, EVERYBODY = {"atol": 0.0}, {"clients_per_round": None}
LIMITS = {
    "AFL": (partial(AFL, 0.0), "uniform", EQUAL | EVERYBODY | {"policy": Uneven()}),
    "AFL, samples": (partial(AFL, 0.0, "samples"), "samples", EQUAL | EVERYBODY),
    "ClusteredFL": (partial(ClusteredFL, warmup=99), "samples", {}),
    "DPFedAvg": (partial(DPFedAvg, 0.0, 1e6), "uniform", EVERYBODY | {"buffers": "server"}),
    "FedALA": (partial(FedALA, lr=0.0), "samples", EQUAL),
    "FedAvgM": (partial(FedAvgM, momentum=0.0), "samples", {}),
    "FedCM": (partial(FedCM, alpha=1.0), "uniform", {}),
    "FedControl": (partial(FedControl, 1.0, 0.0), "samples", {}),
    "FedCostWAvg": (partial(FedCostWAvg, 1.0), "samples", {}),
    "FedNova": (FedNova, "samples", {}),
    "FedOpt": (FedOpt, "samples", {}),
    "FedPIDAvg": (partial(FedPIDAvg, 1.0, 0.0), "samples", {}),
    "Gossip": (partial(Gossip, "complete"), "uniform", EVERYBODY),
    "HeteroFL": (partial(HeteroFL, [1.0]), "uniform", EQUAL),
    "IFCA": (partial(IFCA, 1), "uniform", {}),
    "QFedAvg": (partial(QFedAvg, 0.0), "uniform", EQUAL | {"policy": DECAYING}),
    "TrimmedMean": (partial(TrimmedMean, 0.0), "uniform", {}),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limit_is_fedavg(fit, name):
    make, weighting, options = LIMITS[name]
    options = {"atol": 1e-12, "clients_per_round": 3, "policy": Schedule(num_steps=3)} | options
    found, atol = [], options.pop("atol")
    for rule in (make(), FedAvg(weighting)):
        made = module(make=hidden)
        data = samples(partition=QuantitySkew(2.0, min_size=4))
        fit(made, FederatedLoop(rule, seed=1, **options), data, rounds=3)
        found.append(vector(made))
    close(*found, atol=atol)
