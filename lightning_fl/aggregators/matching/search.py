"""Search over the matching options that are not given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from lightning_fl.functional.networks import MatchingOptions

#: Values of gamma, client_variance and prior_variance to try if they are None (from the authors'
#: program).
SEARCHED = ((1.0, 1e-3, 50.0), (1.0, 0.1, 0.5), (1.0, 10.0))


def candidates(given: Sequence[float | None]) -> list[tuple[float, float, float]]:
    """Return all combinations of given and searched options.

    Args:
        given: Values of gamma, client_variance and prior_variance; None is searched.

    Example:
        >>> candidates((7.0, 1.0, None))
        [(7.0, 1.0, 1.0), (7.0, 1.0, 10.0)]
    """
    gammas, client_variances, prior_variances = (
        values if value is None else (value,) for value, values in zip(given, SEARCHED, strict=True)
    )
    return list(product(gammas, client_variances, prior_variances))


def narrowest(
    tried: Sequence[MatchingOptions],
    tolerance: float,
    score: Callable[[MatchingOptions], tuple[float, int]],
) -> tuple[MatchingOptions, float]:
    """Return the options of the narrowest network within the tolerance, and its accuracy.

    Args:
        tried: Options to try.
        tolerance: Maximum difference from the best accuracy.
        score: Function that returns accuracy and width of the network merged with given options.

    Example:
        >>> scores = {1.0: (0.90, 30), 2.0: (0.89, 20), 3.0: (0.5, 10)}
        >>> tried = [MatchingOptions(gamma=gamma) for gamma in scores]
        >>> best, accuracy = narrowest(tried, 0.02, lambda options: scores[options.gamma])
        >>> best.gamma, accuracy
        (2.0, 0.89)
    """
    scored = [(*score(options), options) for options in tried]
    least = max(accuracy for accuracy, *_ in scored) - tolerance
    accurate = (row for row in scored if row[0] >= least)
    accuracy, _, best = min(accurate, key=lambda row: (row[1], -row[0]))
    return best, accuracy
