"""Format numbers, sizes and durations as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.ticker import EngFormatter

from lightning_fl.functional.intervals import mean_and_std

#: Non-breaking space.
NBSP = "\u00a0"
#: Separator of phrases.
SEPARATOR = " · "


def number(value: float | None) -> str:
    """Format a number with four significant digits, an integer with all digits.

    Example:
        >>> number(0.123456), number(1234567.0), number(float("nan")), number(None)
        ('0.1235', '1,234,567', 'not finite', '-')
        >>> number(9999.7), number(3.4e20)
        ('10,000', '3.4e+20')
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "not finite"
    # Below 999.95, four digits have a decimal; page.js has the same limits.
    is_rounded = value == int(value) or abs(value) >= 999.95
    return f"{value:,.0f}" if is_rounded and abs(value) < 1e15 else f"{value:.4g}"


def size(value: float) -> str:
    """Format a number of bytes.

    Example:
        >>> size(999), size(18_024_000), size(3.2e9)
        ('999.0 B', '18.0 MB', '3.2 GB')
    """
    return EngFormatter("B", places=1)(value)


def seconds(value: float) -> str:
    """Format a duration.

    Example:
        >>> seconds(7.25), seconds(150), seconds(7500)
        ('7.25 s', '2 min 30 s', '2 h 5 min')
    """
    if not value >= 60:
        return f"{number(value)} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def counted(count: float, noun: str) -> str:
    """Format a count with its noun.

    Example:
        >>> counted(1, "round"), counted(3, "update")
        ('1 round', '3 updates')
    """
    return f"{number(count)} {noun}{'s' * (count != 1)}"


def span(values: Sequence[float]) -> str:
    """Format the lowest and the highest of some values, or only one if they are equal.

    Example:
        >>> span([3, 1200, 2]), span([600, 600])
        ('2 to 1,200', '600')
    """
    low, high = min(values), max(values)
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def listed(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return the first texts, and how many there are beyond them.

    Example:
        >>> listed(["a", "b", "c"], 2), listed(["a"], 2)
        ('a, b and 1 more', 'a')
    """
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def plus_minus(values: Sequence[float]) -> str:
    """Format mean and standard deviation with two digits, or only the mean if values are equal.

    Example:
        >>> plus_minus([0.5, 0.61, 0.7]).replace(NBSP, " "), plus_minus([0.5]), plus_minus([])
        ('0.60 ± 0.10', '0.5', '-')
    """
    if not values:
        return "-"
    mean, std = mean_and_std(values)
    if std == 0 or not math.isfinite(std):
        return number(mean)
    digits = max(0, 1 - math.floor(math.log10(std)))
    return f"{mean:,.{digits}f}{NBSP}±{NBSP}{std:,.{digits}f}"
