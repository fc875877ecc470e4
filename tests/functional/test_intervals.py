"""Confidence intervals against numbers worked out by hand with tables of the t distribution."""

import math

import pytest

from lightning_fl.functional.intervals import t_interval


@pytest.mark.parametrize(
    ("values", "mean", "half"),
    [
        # s = sqrt(0.02), t(1) = 12.7062.
        ([0.2, 0.4], 0.3, 12.7062 * math.sqrt(0.02 / 2)),
        # s = 1, t(2) = 4.30265.
        ([1.0, 2.0, 3.0], 2.0, 4.30265 / math.sqrt(3)),
        # s² = 2.5, t(4) = 2.77645.
        ([1.0, 2.0, 3.0, 4.0, 5.0], 3.0, 2.77645 * math.sqrt(2.5 / 5)),
        ([0.5, 0.5], 0.5, 0.0),
    ],
)
def test_the_interval_is_that_of_a_textbook(values, mean, half):
    assert t_interval(values) == pytest.approx((mean, half), rel=1e-5)


def test_another_level():
    # t(2) = 2.91999 for 90 %.
    assert t_interval([1.0, 2.0, 3.0], 0.9)[1] == pytest.approx(2.91999 / math.sqrt(3), rel=1e-5)


def test_one_value_has_no_interval():
    mean, half = t_interval([0.5])
    assert mean == 0.5
    assert math.isnan(half)


@pytest.mark.parametrize("values", [[], [0.5, math.nan], [math.inf, 0.5]])
def test_values_that_are_not_finite_have_neither(values):
    assert all(map(math.isnan, t_interval(values)))
