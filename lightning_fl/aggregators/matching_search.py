"""The search over those options of a matching that are not given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from lightning_fl.aggregators.matching_options import MatchingRuleOptions
from lightning_fl.functional.networks import MatchingOptions

#: Values of gamma, client_variance and prior_variance that are tried where they are None (the
#: authors' program).
SEARCHED = ((1.0, 1e-3, 50.0), (1.0, 0.1, 0.5), (1.0, 10.0))


def candidates(
    options: MatchingRuleOptions, round: int, settled: Sequence[float] | None = None
) -> list[MatchingOptions]:
    """Return all combinations of the options that are given and those that are searched.

    Args:
        options: Options of the rule.
        round: Number of the round, from 0.
        settled: Values of gamma, client_variance and prior_variance that a search has found before.
    """
    given = settled or (options.gamma, options.client_variance, options.prior_variance)
    axes = [
        values if value is None else (value,) for value, values in zip(given, SEARCHED, strict=True)
    ]
    return [
        options.matching(gamma, client_variance, prior_variance, round)
        for gamma, client_variance, prior_variance in product(*axes)
    ]


def narrowest(
    tried: Sequence[MatchingOptions],
    tolerance: float,
    score: Callable[[MatchingOptions], tuple[float, int]],
) -> tuple[MatchingOptions, float]:
    """Return the options of the narrowest network that is accurate enough, and its accuracy.

    Args:
        tried: What is tried, one after another.
        tolerance: By how much the accuracy may be below the best.
        score: Returns accuracy and width of the network that is merged with these options.

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
