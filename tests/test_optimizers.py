"""The optimisers of servers, against their equations written plainly."""

import math

import pytest
import torch

from lightning_fl.optimizers import Adaptive
from lightning_fl.types import FederationError


def plainly(rule, gradients, lr, beta1, beta2, tau):
    """Reddi et al. (2021), Algorithm 2, for one number."""
    x, m, v = 0.0, 0.0, tau**2
    for gradient in gradients:
        delta = -gradient
        m = beta1 * m + (1 - beta1) * delta
        if rule == "adagrad":
            v = v + delta**2
        elif rule == "adam":
            v = beta2 * v + (1 - beta2) * delta**2
        else:
            v = v - (1 - beta2) * delta**2 * ((v > delta**2) - (v < delta**2))
        x = x + lr * m / (math.sqrt(v) + tau)
    return x


@pytest.mark.parametrize("rule", ["adagrad", "adam", "yogi"])
@pytest.mark.parametrize("tau", [1e-3, 0.5])
def test_a_few_steps_are_the_equations(rule, tau):
    gradients = [[0.5, -2.0], [0.1, 1.0], [-3.0, 0.0], [0.2, 0.3]]
    x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = Adaptive([x], rule, lr=0.3, betas=(0.8, 0.9), tau=tau)
    for gradient in gradients:
        x.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    expected = [plainly(rule, each, 0.3, 0.8, 0.9, tau) for each in zip(*gradients, strict=True)]
    assert x.tolist() == pytest.approx(expected, abs=1e-14)


def test_it_minimises_with_a_closure_and_leaves_what_has_no_gradient():
    x, idle = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = Adaptive([{"params": [x]}, {"params": [idle], "lr": 5.0}], "yogi", lr=0.05)

    def closure():
        optimizer.zero_grad()
        loss = (x**2).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(100)]
    assert losses[-1] < 0.05 * losses[0]
    assert idle.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rule": "sgd"}, "rule must be adagrad, adam or yogi, got 'sgd'"),
        ({"lr": 0.0}, "lr and tau must be positive and finite, got 0.0"),
        ({"tau": -1.0}, "got 0.1 and -1.0"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\)"),
        ({"betas": (0.9,)}, r"betas must be two numbers in \[0, 1\)"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(FederationError, match=words):
        Adaptive([torch.zeros(1)], **({"rule": "adam"} | options))
