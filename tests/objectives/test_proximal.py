"""FedProx: stay near the server."""

import torch

from lightning_fl.objectives import ModelView, Proximal


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
