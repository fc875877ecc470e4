"""Units of narrower networks."""

import math

import pytest

from lightning_fl.functional.sub_networks import held_units


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.3, 1 / 16])
@pytest.mark.parametrize("first", [0, 3, 9, 23])
def test_units_are_counted_up_and_go_around(rate, first):
    for width in (1, 4, 10, 17):
        wanted = {(first + i) % width for i in range(math.ceil(rate * width))}
        assert set(held_units(width, rate, first).nonzero()[:, 0].tolist()) == wanted


def test_rounding_adds_no_unit():
    """In floating point 0.07 * 100 is above 7."""
    assert int(held_units(100, 0.07).sum()) == 7
    assert int(held_units(100, 0.071).sum()) == 8
