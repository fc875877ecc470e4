"""FedProx: stay near the server."""

import pytest
import torch

from lightning_fl.objectives import ModelView, Proximal
from lightning_fl.types import FederationError


def sides(own, fixed):
    return (
        ModelView({name: torch.tensor(value, requires_grad=True) for name, value in own.items()}),
        ModelView({name: torch.tensor(value) for name, value in fixed.items()}),
    )


def test_two_parameters_by_hand():
    own, fixed = sides({"w": [1.0, 2.0], "b": 4.0}, {"w": [1.0, 0.0], "b": 1.0})
    # 0.5 / 2 * (4 + 9) = 3.25
    penalty = Proximal(mu=0.5)(own, fixed, batch=None)
    assert penalty.item() == 3.25
    penalty.backward()
    assert own.params["w"].grad.tolist() == [0, 1]
    assert own.params["b"].grad.item() == 1.5


def test_it_has_nothing_to_learn_or_to_save():
    assert Proximal(mu=1.0).state_dict() == {}
    assert list(Proximal(mu=1.0).parameters()) == []


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf")])
def test_a_mu_out_of_range_is_refused(mu):
    with pytest.raises(
        FederationError, match=f"mu must be a finite number of at least 0, got {mu}"
    ):
        Proximal(mu=mu)
