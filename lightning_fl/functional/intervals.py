"""Means over runs, with standard deviations and confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from scipy.stats import t


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation (n - 1), which is 0 for one value.

    Example:
        >>> mean_and_std([1.0, 2.0, 3.0])
        (2.0, 1.0)
    """
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def t_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    r"""Return the mean and half the width of its confidence interval.

    The interval of ``n`` values is :math:`\bar x \pm t_{n-1} \, s / \sqrt n`, where :math:`s` is
    the sample standard deviation and :math:`t_{n-1}` the quantile of Student's t distribution with
    ``n - 1`` degrees of freedom. For paired runs, pass the differences of the pairs.

    Args:
        values: Independent values, such as the accuracies of several seeds.
        level: Probability that the interval covers the mean of normally distributed values.

    Returns:
        Mean and half width. The half width is NaN for fewer than two values; both are NaN if a
        value is not finite.

    Example:
        >>> mean, half = t_interval([1.0, 2.0, 3.0])
        >>> round(mean, 4), round(half, 4)  # t = 4.3027 and s = 1
        (2.0, 2.4841)
    """
    if not values or not all(map(math.isfinite, values)):
        return math.nan, math.nan
    if (n := len(values)) < 2:
        return fmean(values), math.nan
    return fmean(values), float(t.ppf((1 + level) / 2, n - 1)) * stdev(values) / math.sqrt(n)
