"""Stages of a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lightning_fl.errors import FederationError
from lightning_fl.options import check_integer


def stage_of(rounds: Sequence[int], round: int) -> int:
    """Return the stage index of a round, from 0.

    Args:
        rounds: Number of rounds of each stage except the last.
        round: Round index, from 0.

    Example:
        >>> [stage_of([2, 1], round) for round in range(5)]
        [0, 0, 1, 2, 2]
    """
    return sum(round >= end for end in accumulate(rounds))


def check_stages(rounds: Sequence[int], rules: Sequence[object], name: str) -> None:
    """Raise an error if the numbers of rounds and of rules do not match.

    Args:
        rounds: Number of rounds of each stage except the last.
        rules: Rule of each stage.
        name: Name of the ``rules`` argument for error messages.
    """
    if len(rules) != len(rounds) + 1:
        raise FederationError(
            f"{name} must have one more entry than rounds, got {len(rules)} and"
            f" rounds={list(rounds)}"
        )
    for i, count in enumerate(rounds):
        check_integer(f"rounds[{i}]", count, min=1)
