"""Weights of stale updates, by hand."""

import pytest
import torch

from lightning_fl.functional.staleness import staleness_weight

TAU = torch.tensor([0, 1, 4, 5, 24])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"function": "constant"}, [1, 1, 1, 1, 1]),
        ({}, [1, 2**-0.5, 5**-0.5, 6**-0.5, 1 / 5]),
        ({"exponent": 2.0}, [1, 1 / 4, 1 / 25, 1 / 36, 1 / 625]),
        ({"function": "hinge"}, [1, 1, 1, 1 / 11, 1 / 201]),
        ({"function": "hinge", "slope": 2.0, "delay": 0.5}, [1, 1 / 2, 1 / 8, 1 / 10, 1 / 48]),
    ],
)
def test_weights_by_hand(options, expected):
    found = staleness_weight(TAU, **options)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-15)
    assert found[0] == 1  # exactly: synchronous rounds are bit-equal
