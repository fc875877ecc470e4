"""Grids of cases of which the quick tests run a diagonal."""

import pytest


def diagonal(rows, columns):
    """All pairs of two lists. Quick are those in which each value occurs; the others are slow."""
    rows, columns = list(rows), list(columns)
    quick = {(i % len(rows), i % len(columns)) for i in range(max(len(rows), len(columns)))}
    return [
        pytest.param(row, column, marks=[pytest.mark.slow] * ((i, j) not in quick))
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def others_slow(quick, cases):
    """All cases; those that are not named are slow."""
    return [pytest.param(case, marks=[pytest.mark.slow] * (case not in quick)) for case in cases]
