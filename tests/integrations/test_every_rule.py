"""Each rule, policy and sampler trains on remote clients as in the loop, or is refused by name."""

import copy
import inspect
from functools import partial

import pytest
import torch

from adapted import Adapted
from apart import compare, federation, net
from lightning_fl import ClientModule, aggregators, policies, samplers
from lightning_fl.aggregators import AFL, PowerOfChoice
from lightning_fl.objectives import FedLC, Proximal
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError
from mlp import MATCHED

CANDIDATES = [{"num_steps": 1}, {"num_steps": 3}]
GRID = {"lr": [0.05, 0.1], "num_steps": [1, 2, 3]}
#: Options of those that need some.
OPTIONS = {
    "AFL": {"gamma": 0.1},
    "ClusteredFL": {"eps1": 99.0, "eps2": 0.0, "warmup": 0, "min_size": 2},
    "DPFedAvg": {"noise_multiplier": 0.5, "clip_norm": 0.1},
    "FedDyn": {"alpha": 0.1},
    "AsynchronousSampler": {"concurrency": 4},
    "HighLossSampler": {"candidates": 4},
    "FlexLoRA": {"ranks": {1: 0.5, 2: 0.5}},
    "Gossip": {"graph": "ring"},
    "NormClipping": {"max_norm": 0.1},
    "QFedAvg": {"q": 2.0},
    "ZeroPadding": {"ranks": {1: 0.5, 2: 0.5}},
    **dict.fromkeys(("PFNM", "FedMA", "StreamingPFNM"), MATCHED),
    "AdaptiveMu": {"mu": 0.5, "policy": Schedule(num_steps=2), "patience": 1, "loss": "clients"},
    "DiscreteGaussianReinforce": {"grid": GRID, "loss": "clients"},
    "PersonalizedPolicyGradient": {"candidates": CANDIDATES},
    "Stragglers": {"fraction": 0.9, "policy": Schedule(num_steps=4)},
    "StagedPolicy": {"rounds": [1], "policies": [Schedule(lr=0.1), Schedule(lr=0.05)]},
    "Staged": {"rounds": [1], "aggregators": [aggregators.FedAvgM(), aggregators.FedAvg()]},
}
#: What needs all clients in one process, and a word of the reason.
REFUSED = {
    "PFNM": "replaces the network",
    "FedMA": "replaces the network",
    "StreamingPFNM": "replaces the network",
    "FedBuff": "simulates the times",
    "FedAsync": "simulates the times",
    "DPFedAvg": "draws its noise from the seed",
    "SecureAggregation": "simulates what a server would not see",
    "PersonalizedPolicyGradient": "learns from",
    "AsynchronousSampler": "AsynchronousSampler",
}


#: Rules whose clients do what those of others do.
SLOW = (
    *("CoordinateMedian", "Downpour", "FedAdagrad", "FedAdam", "FedAvgM", "FedCostWAvg", "FedOpt"),
    *("FedPIDAvg", "FedYogi", "GeometricMedian", "Krum", "TrimmedMean", "ZeroPadding"),
)


def kinds(package):
    """Return the public classes of a package that can be made."""
    for name in package.__all__:
        kind = getattr(package, name)
        if inspect.isclass(kind) and not inspect.isabstract(kind):
            yield pytest.param(name, kind, marks=[pytest.mark.slow] * (name in SLOW))


def module(name):
    if name in ("FlexLoRA", "ZeroPadding"):
        return Adapted(2, features=4, classes=2).double()
    terms = {"AdaptiveMu": [Proximal(0.3)], "class counts": [FedLC()]}.get(name, [])
    return ClientModule(net(), terms, partial(torch.optim.SGD, lr=0.1))


def check(name, folder, rule=None, **options):
    """Compare a server and its clients with the loop."""
    make = partial(module, name)
    options = {"policy": Schedule(lr=0.1, local_epochs=1), "clients_per_round": 4, **options}
    if name in ("AFL", "Gossip", "Krum"):  # they need more clients
        options["clients_per_round"] = None
    if name not in REFUSED:
        compare(folder, make, rule, **options)
        return
    with pytest.raises(FederationError, match=f"{name}.*{REFUSED[name]}|{REFUSED[name]}"):
        federation(make, rule, **options)


pytestmark = pytest.mark.filterwarnings("ignore")  # rules warn of options that do not matter here


@pytest.mark.parametrize(("name", "kind"), list(kinds(aggregators)))
def test_a_rule(tmp_path, name, kind):
    check(name, tmp_path, kind(**copy.deepcopy(OPTIONS.get(name, {}))))


@pytest.mark.parametrize(("name", "kind"), list(kinds(policies)))
def test_a_policy(tmp_path, name, kind):
    check(name, tmp_path, policy=kind(**copy.deepcopy(OPTIONS.get(name, {}))))


@pytest.mark.parametrize(("name", "kind"), list(kinds(samplers)))
def test_a_sampler(tmp_path, name, kind):
    rules = {"AFLSampler": AFL(0.1, mode="sampling"), "HighLossSampler": PowerOfChoice()}
    check(name, tmp_path, rules.get(name), sampler=kind(**OPTIONS.get(name, {})))


@pytest.mark.parametrize("own", [False, True])
def test_a_term_gets_the_class_counts_of_its_client(tmp_path, own):
    check("class counts", tmp_path, own=own)
