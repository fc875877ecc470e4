from fractions import Fraction

import pytest
import torch

from lightning_fl.functional.drift import effective_steps, next_control


def test_a_client_that_does_not_move_keeps_its_control_variate():
    own, lr = torch.ones(2, 3), torch.tensor([0.0, 0.5])
    found = next_control(own, torch.ones(3), torch.zeros(2, 3), torch.tensor([4, 4]), lr)
    assert torch.equal(found, torch.tensor([[1.0] * 3, [0.0] * 3]))


@pytest.mark.parametrize("pull", [0.0, 1e-300, 1e-17, 1e-12, 1e-9, 0.4999, 0.5001, 1.0, 1.5])
def test_effective_steps_have_no_cancellation(pull):
    exact = sum((1 - Fraction(pull)) ** i for i in range(9))
    found = effective_steps(torch.tensor([9]), pull=torch.tensor([pull], dtype=torch.float64))
    assert float(found) == pytest.approx(float(exact), rel=1e-13)
