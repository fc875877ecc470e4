"""Validate the options of a data module."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from lightning_fl.types import FederationError


def integer(name: str, value: Any, minimum: int, allowed: str = "") -> int:
    """Return a Python or numpy integer as a Python integer; raise for other values."""
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if number < minimum or isinstance(value, bool):
        allowed = allowed or f"an integer of at least {minimum}"
        raise FederationError(f"{name} must be {allowed}, got {value!r}")
    return number


def fraction_or_count(name: str, value: Any) -> int | float:
    """Return a fraction in [0, 1) as float, or a count as int; raise for other values."""
    if isinstance(value, float | np.floating) and 0 <= value < 1:
        return float(value)
    return integer(name, value, 0, "a fraction in [0, 1) or a number of samples")
