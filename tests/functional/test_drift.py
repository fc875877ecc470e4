from fractions import Fraction

import pytest
import torch

from lightning_fl.functional.drift import effective_steps, next_control


def test_the_next_control_variate_is_the_mean_gradient_of_the_way():
    """Steps of SGD with corrections, written out: what remains is the mean of the gradients."""
    random = torch.Generator().manual_seed(0)
    gradients = torch.randn(2, 7, 3, generator=random, dtype=torch.float64)
    own, server = torch.randn(2, 3, generator=random, dtype=torch.float64), torch.ones(3).double()
    lr, steps = torch.tensor([0.1, 0.3]), torch.tensor([7, 4])
    delta = torch.zeros(2, 3, dtype=torch.float64)
    for k in range(2):
        for i in range(int(steps[k])):
            delta[k] -= lr[k].double() * (gradients[k, i] - own[k] + server)
    found = next_control(own, server, delta, steps, lr)
    expected = torch.stack([gradients[k, : steps[k]].mean(0) for k in range(2)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


def test_a_client_that_does_not_move_keeps_its_control_variate():
    own, lr = torch.ones(2, 3), torch.tensor([0.0, 0.5])
    found = next_control(own, torch.ones(3), torch.zeros(2, 3), torch.tensor([4, 4]), lr)
    assert torch.equal(found, torch.tensor([[1.0] * 3, [0.0] * 3]))


@pytest.mark.parametrize("tau", [1, 2, 9])
@pytest.mark.parametrize(
    ("momentum", "pull"), [(0.0, None), (0.9, None), (0.5, None), (0.0, 0.2), (0.0, 0.0)]
)
def test_effective_steps_are_the_coefficients_of_the_gradients_summed(tau, momentum, pull):
    """The local solver in numbers: all gradients are 1, the rate is 1."""
    way, velocity = 0.0, 0.0
    for _ in range(tau):
        velocity = momentum * velocity + 1 - (pull or 0) * way
        way += velocity
    pulls = None if pull is None else torch.tensor([pull])
    found = effective_steps(torch.tensor([tau]), momentum, pulls)
    assert float(found) == pytest.approx(way, rel=1e-7)


@pytest.mark.parametrize("pull", [1e-300, 1e-17, 1e-12, 1e-9, 0.4999, 0.5001, 1.0, 1.5])
def test_effective_steps_have_no_cancellation(pull):
    exact = sum((1 - Fraction(pull)) ** i for i in range(9))
    found = effective_steps(torch.tensor([9]), pull=torch.tensor([pull], dtype=torch.float64))
    assert float(found) == pytest.approx(float(exact), rel=1e-13)
