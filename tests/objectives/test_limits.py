"""Terms and modules that are plain training in a limit, and options out of range."""

from functools import partial

import pytest
import torch

from by_hand import network, sgd
from lightning_fl import ClientModule
from lightning_fl.objectives import (
    APFL,
    MOON,
    Ditto,
    FedDecorr,
    FedLC,
    FedNTD,
    FedRoD,
    FedRS,
    FedSAM,
    Proximal,
    RepresentationMatching,
)
from lightning_fl.types import FederationError

#: Terms, or functions of the network that return a module, and whether the results are equal.
LIMITS = {
    "APFL": (partial(APFL, 0.0, False), True),
    "Ditto": (partial(Ditto, 0.0), True),
    "Ditto, tied": (partial(Ditto, 19.0), True),
    "FedDecorr": (partial(FedDecorr, 0.0), False),
    "FedLC": (partial(FedLC, 0.0), False),
    "FedNTD": (partial(FedNTD, 0.0), True),
    "FedRS": (partial(FedRS, 1.0), False),
    "FedRoD": (partial(FedRoD, 0.0), False),
    "FedSAM": (lambda net: FedSAM(net, rho=0.0, optimizer=sgd()), True),
    "MOON": (partial(MOON, 0.0), True),
    "Proximal": (partial(Proximal, 0.0), True),
    "RepresentationMatching": (partial(RepresentationMatching, 0.0), True),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limit_is_plain_training(run, name):
    make, is_equal = LIMITS[name]
    user = make(network(True)) if name == "FedSAM" else ClientModule(network(True), [make()], sgd())
    plain = ClientModule(network(True), (), sgd())
    for each in (user, plain):
        run(each.double(), rounds=2)
    for key, value in plain.net.state_dict().items():
        found = user.net.state_dict()[key]
        torch.testing.assert_close(found, value, rtol=0, atol=0 if is_equal else 1e-13)


@pytest.mark.parametrize("term", [APFL, Ditto, FedRoD])
def test_second_model_is_not_clipped_with_the_first(fit, data, term):
    user = ClientModule(network(True), [term()], sgd()).double()
    with pytest.raises(FederationError, match=r"gradient_clip_val=1.0 clips the joint norm"):
        fit(user, datamodule=data(), gradient_clip_val=1.0)
    clipped = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    fit(user, datamodule=data(), rounds=1, **clipped)
