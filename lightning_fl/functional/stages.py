"""Stages of a run."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_fl.types import FederationError


def stage_of(rounds: Sequence[int], round: int) -> int:
    """Return which stage a round is in, counted from 0.

    Example:
        >>> [stage_of([2, 1], round) for round in range(5)]
        [0, 0, 1, 2, 2]
    """
    return sum(round >= sum(rounds[:i]) for i in range(1, len(rounds) + 1))


def check_stages(rounds: Sequence[int], rules: Sequence[object], name: str) -> None:
    """Refuse stages that do not fit."""
    if len(rules) != len(rounds) + 1:
        raise FederationError(
            f"{name} must be one more than rounds, got {len(rules)} and rounds={list(rounds)}"
        )
    if any(count < 1 or int(count) != count for count in rounds):
        raise FederationError(f"rounds must be whole numbers from 1 up, got {list(rounds)}")
