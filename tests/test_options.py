"""The checks of options, and that every constructor of the package uses them."""

import importlib
import inspect
import math
import re
from collections import UserList

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fl import _PACKAGES, aggregators, policies
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.contracts.phases import Phase
from lightning_fl.optimizers import Adaptive
from lightning_fl.options import check_choice, check_integer, check_number, check_that
from lightning_fl.types import FederationError


@pytest.mark.parametrize(
    ("value", "limits", "allowed"),
    [
        (-1, {"min": 0}, "a finite number of at least 0"),
        (0, {"above": 0}, "a finite number greater than 0"),
        (math.inf, {"above": 0}, "a finite number greater than 0"),
        (math.inf, {}, "a finite number"),
        (2, {"max": 1}, "a number in (-inf, 1]"),
        (-math.inf, {"max": math.inf}, "a number in (-inf, inf]"),
        (math.nan, {"above": 0, "max": math.inf}, "a number in (0, inf]"),
        (1, {"min": 0, "below": 1}, "a number in [0, 1)"),
        (0.0, {"above": 0, "max": 1, "optional": True}, "a number in (0, 1], or None"),
        (None, {"min": 0}, "a finite number of at least 0"),
    ],
)
def test_the_error_says_what_is_allowed(value, limits, allowed):
    with pytest.raises(
        FederationError, match=f"^{re.escape(f'x must be {allowed}, got {value}')}$"
    ):
        check_number("x", value, **limits)


@pytest.mark.parametrize(
    "value", [math.nan, np.float64("nan"), True, np.bool_(True), "1", [1], torch.ones(()), 1j]
)
def test_what_is_not_a_number_is_refused(value):
    for check in (check_number, check_integer):
        with pytest.raises(FederationError, match=re.escape(f"got {value!r}: use 1")):
            check("x", value, optional=True, hint="use 1")


def test_value_that_is_not_what_it_must_be_raises():
    assert check_that("x", [1], True, "a list") == [1]
    with pytest.raises(FederationError, match=r"^x must be odd, got 4: use 3 or 5$"):
        check_that("x", 4, False, "odd", hint="use 3 or 5")


def test_numbers_of_numpy_become_numbers_of_python():
    assert type(check_number("x", np.float32(0.5), max=1)) is float
    assert type(check_number("x", np.int64(2), min=2)) is int
    assert type(check_integer("x", np.uint8(2))) is int


@pytest.mark.parametrize("value", ["", "c", None, True, 1, ["a"], np.array(["a", "b"])])
def test_unknown_choice_raises(value):
    assert check_choice("x", "a", "a", "b") == "a"
    with pytest.raises(FederationError, match="x must be a, b or cc, got"):
        check_choice("x", value, "a", "b", "cc")


# --- every constructor ----------------------------------------------------------------------------

#: Arguments without which classes cannot be constructed.
REQUIRED = {
    "fraction": 0.5,
    "is_trained": True,
    "candidates": [{"lr": 0.1}, {"lr": 0.2}],
    "clients": [TensorDataset(torch.zeros(1))],
    "datamodule": LightningDataModule(),
    "dataset": "saved",
    "module": nn.Linear(1, 1),
    "net": nn.Linear(1, 1),
    "params": [torch.zeros(1)],
    "name": "test_vit",
    "num_classes": 2,
    "path": "train.h5",
    "rate": 8000,
    "rule": "adam",
    "samples": 8000,
    "sizes": [1, 1],
    "vocabulary": 30,
}

#: Modules of the public classes.
ROOMS = sorted({*_PACKAGES} - {"functional", "runners"})

#: Classes with checks of their own.
CHECKED_ELSEWHERE = ("Manifest",)


#: Values that are refused, by the annotated types of an option.
WRONG = {("int", "float"): (math.nan, True, "1"), ("bool",): ("false", 1)}
#: Values beyond the limits of an option.
BEYOND = {
    "AFL": {"gamma": [-1.0]},
    "APFL": {"alpha": [1.5]},
    "Backdoor": {"poison_fraction": [0.0]},
    "ClientFaults": {"bandwidth": [0.0], "speed_sigma": [1e3]},
    "FederatedLoop": {
        "clients_per_round": [0], "client_fraction": [1.5], "min_clients": [0], "buffers": ["mean"],
    },
    "LabelFlip": {"clients": [1, "abc"]},
    "RunReport": {"client_samples": [-1, 0.5]},
    "AdaptiveMu": {"mu": [-0.1], "step": [0.0], "patience": [0]},
    "Adaptive": {"lr": [0.0], "tau": [-1.0]},
    "AsynchronousSampler": {"concurrency": [0]},
    "Augment": {"time_shift": [2.0], "mask": [-1]},
    "ByLabel": {"classes_per_client": [0, 1.5]},
    "Characters": {"length": [0]},
    "CifarCNN": {"width": [0], "hidden": [-1], "in_channels": [0], "num_classes": [0]},
    "ClusteredFL": {"min_size": [1]},
    "DPFedAvg": {
        "noise_multiplier": [-1.0], "clip_norm": [0.0], "delta": [1.0], "quantile": [1.5],
        "clip_lr": [-1.0, 11.0],
    },
    "DiscreteGaussianReinforce": {
        "policy_lr": [-1.0], "precision": [0.0], "window": [math.inf], "seed": [-1],
    },
    "Dirichlet": {"alpha": [0, math.inf], "min_size": [0, 1.5]},
    "Ditto": {"strength": [-1.0], "lr_factor": [0.0]},
    "EntropyRegularizer": {"min_entropy": [-0.1, math.inf], "coefficient": [-0.1]},
    "FashionCNN": {"width": [0], "hidden": [0], "num_classes": [0]},
    "FedALA": {"lr": [-1.0], "fraction": [0.0], "first_passes": [0], "tensors": [-1]},
    "FedAMP": {"strength": [1.1], "sigma": [0.0]},
    "FedAdam": {"tau": [0.0]},
    "FedAsync": {"alpha": [0, 1.5]},
    "FedAvgM": {"lr": [-1.0]},
    "FedBuff": {
        "lr": [0], "staleness": ["linear"], "exponent": [-1], "max_staleness": [1.5],
        "momentum": [1.0],
    },
    "FedCM": {"alpha": [0.0]},
    "FedControl": {"alpha": [-0.1], "decay": [1.2]},
    "FedCostWAvg": {"alpha": [1.5]},
    "FedDyn": {"alpha": [0.0]},
    "FedEM": {"components": [0]},
    "FedExP": {"eps": [-1.0]},
    "FedLC": {"tau": [-1.0]},
    "FedNTD": {"beta": [-1.0], "temperature": [0.0]},
    "FedPIDAvg": {"cancellation": [1.0]},
    "FedProto": {"strength": [-1.0]},
    "FedRS": {"alpha": [1.5]},
    "FedRoD": {"gamma": [-1.0]},
    "FedSAM": {"rho": [-1.0]},
    "FedYogi": {"lr": [-1.0]},
    "FederatedDataModule": {
        "batch_size": [0, 2.5], "eval_batch_size": [-3, None], "num_workers": [-1],
        "num_clients": [0, 2.5], "seed": [-1], "stream_steps": [0],
    },
    "Gossip": {"graph": ["star"], "probability": [0.0]},
    "HeteroFL": {"rates": [[], 0.5], "drawn": [1]},
    "IFCA": {"clusters": [0]},
    "Krum": {"attackers": [-1], "keep": [0]},
    "MOON": {"mu": [-1.0], "temperature": [0.0]},
    "NormClipping": {"max_norm": [0.0]},
    "PFNM": {
        "gamma": [0.0], "client_variance": [-1], "prior_variance": [0], "bias_mean": [math.inf],
        "popularity": [math.inf], "sweeps": [-1, 1.5], "cap": [0], "max_width": [0, 9.5],
        "tolerance": [-0.1],
    },
    "PFedMe": {"lr": [0.0], "lam": [-1.0], "inner_steps": [0]},
    "PerFedAvg": {"inner_lr": [-1.0]},
    "PersonalizedPolicyGradient": {"step": [-1.0], "floor": [1.0]},
    "Proximal": {"mu": [-0.1, math.inf]},
    "QFedAvg": {"q": [-1.0]},
    "QuantitySkew": {"alpha": [0, math.inf], "min_size": [0, 1.5]},
    "Quantize": {"bits": [0, 2.5]},
    "RepresentationMatching": {"coefficient": [-1], "lr_factor": [0]},
    "Resized": {"size": [0]},
    "Scaffold": {"lr": [0.0, math.inf]},
    "SecureAggregation": {"clip": [0.0], "bits": [1, 54, 8.5], "max_weight": [0.0]},
    "Schedule": {
        "num_steps": [0, 1.5], "lr": [0, -0.1, math.inf], "local_epochs": [0],
        "decay": [0, math.inf],
    },
    "Shards": {"shards_per_client": [0, 1.5]},
    "SpokenDigits": {"seconds": [0], "image_size": [0]},
    "Stragglers": {"fraction": [1.5]},
    "StreamingPFNM": {"fresh": [-1, 2.5], "noise": [-1.0]},
    "TopK": {"fraction": [0.0]},
    "TrimmedMean": {"fraction": [0.5]},
    "WeightDivergence": {"coefficient": [-0.1]},
    "Words": {"length": [0]},
}  # fmt: skip


def options():
    """Return class, name and wrong values of the options of the public classes."""
    found = []
    for room in ROOMS:
        module = importlib.import_module(f"lightning_fl.{room}")
        for name, made in vars(module).items():
            is_own = inspect.isclass(made) and made.__module__.startswith(module.__name__)
            is_public = not name.startswith("_") and name not in CHECKED_ELSEWHERE
            if is_own and is_public and not inspect.isabstract(made):
                beyond = BEYOND.get(name, {}).items()
                found += [(made, *option) for option in (*simple(made), *beyond)]
    return found


def simple(made):
    """Return numbers, flags and choices with wrong values, also those in ``**options``."""
    names = {}
    for base in made.__mro__:
        if base.__module__.startswith("lightning_fl") and "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters.values()
            for parameter in parameters:
                kinds = re.sub(r"\[.*\]", "", str(parameter.annotation)).split(" | ")
                for wanted, wrong in WRONG.items():
                    if {*wanted} & {*kinds} and kinds[-1] != "Literal":
                        names[parameter.name] = wrong
                if re.fullmatch(r"Literal\[[^|]*\]", str(parameter.annotation)):
                    names[parameter.name] = ("other",)
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return list(names.items())


@pytest.mark.parametrize(
    ("made", "option", "wrong"), options(), ids=lambda value: getattr(value, "__name__", None)
)
def test_every_constructor_refuses(made, option, wrong):
    parameters = inspect.signature(made).parameters
    needed = [name for name, each in parameters.items() if each.default is inspect.Parameter.empty]
    given = {name: REQUIRED[name] for name in needed if name in REQUIRED}
    for value in wrong:
        got = re.escape(repr(value))
        refused = rf"\b{option}\b.* must be .*, got {got}|multiple values .* '{option}'"
        with pytest.raises((FederationError, TypeError), match=refused):
            made(**{**given, option: value})


def test_the_options_of_every_constructor_are_found():
    found = {(made.__name__, option) for made, option, _ in options()}
    some = {("Schedule", "lr"), ("PFNM", "restart"), ("FedAdam", "tau"), ("Stragglers", "drop")}
    assert some <= found
    assert {(name, option) for name, given in BEYOND.items() for option in given} <= found
    assert len(options()) > 250


def test_lists_may_be_any_sequence():
    patterns = UserList(["net.*"])  # as a list of OmegaConf
    phases = UserList([Phase(patterns, num_steps=1), Phase("all")])
    loop = FederatedLoop(policy=policies.Schedule(phases=phases), local_parameters=patterns)
    assert list(loop.options.local_parameters) == ["net.*"]
    assert aggregators.PFNM(widths=UserList([4])).widths == [4]
    assert Adaptive([nn.Parameter(torch.zeros(1))], "adam", betas=UserList([0.5, 0.9]))
