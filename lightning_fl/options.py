"""Checks of options, and texts that describe a rule by its options."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np

from lightning_fl.errors import FederationError

_T = TypeVar("_T")


def check_number(
    name: str,
    value: _T,
    *,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    below: float | None = None,
    integer: bool = False,
    optional: bool = False,
    hint: str = "",
) -> _T:
    """Return a finite Python or numpy number as a Python number; raise for other values.

    Args:
        name: Name of the option for the error message.
        value: Its value. Booleans and strings are refused.
        min: Smallest allowed value.
        max: Largest allowed value; infinity allows infinity.
        above: Lower bound; not allowed itself.
        below: Upper bound; not allowed itself.
        integer: Whether only integers are allowed.
        optional: Whether None is allowed.
        hint: How to fix a wrong value; the end of the error message.

    Raises:
        FederationError: If the value is not a number or out of range.

    Example:
        >>> check_number("fraction", 0.5, above=0, max=1)
        0.5
        >>> check_number("lr", float("nan"), above=0)
        Traceback (most recent call last):
        lightning_fl.errors.FederationError: lr must be a finite number greater than 0, got nan
    """
    number: Any = value.item() if isinstance(value, np.generic) else value
    if value is None and optional:
        return value
    if (
        isinstance(number, int if integer else int | float)
        and not isinstance(number, bool)
        and number > -np.inf
        and (number < np.inf or max == np.inf)
        and (min is None or number >= min)
        and (max is None or number <= max)
        and (above is None or number > above)
        and (below is None or number < below)
    ):
        return cast("_T", number)
    if max is not None or below is not None:
        low = f"[{min}" if min is not None else f"({-np.inf if above is None else above}"
        limits = f" in {low}, {max}]" if below is None else f" in {low}, {below})"
    else:
        limits = f" of at least {min}" if min is not None else ""
        limits += f" greater than {above}" if above is not None else ""
    kind = "an integer" if integer else "a number" if " in " in limits else "a finite number"
    none, fix = ", or None" * optional, f": {hint}" * bool(hint)
    raise FederationError(f"{name} must be {kind}{limits}{none}, got {value!r:.200}{fix}")


def check_that(name: str, value: _T, holds: bool, wanted: str, hint: str = "") -> _T:
    """Return a value that is what it must be; raise otherwise.

    Args:
        name: Name of the option for the error message.
        value: Its value.
        holds: Whether it is what it must be.
        wanted: What it must be, in words.
        hint: How to fix a wrong value; the end of the error message.

    Raises:
        FederationError: If the value is not what it must be.

    Example:
        >>> check_that("kernel_size", 4, 4 % 2 == 1, "odd")
        Traceback (most recent call last):
        lightning_fl.errors.FederationError: kernel_size must be odd, got 4
    """
    if not holds:
        fix = f": {hint}" * bool(hint)
        raise FederationError(f"{name} must be {wanted}, got {value!r:.200}{fix}")
    return value


def check_integer(
    name: str,
    value: _T,
    *,
    min: int | None = None,
    max: int | None = None,
    optional: bool = False,
    hint: str = "",
) -> _T:
    """Return a Python or numpy integer as a Python integer; see :func:`check_number`.

    Args:
        name: Name of the option for the error message.
        value: Its value. Booleans, strings and floats such as 2.0 are refused.
        min: Smallest allowed value.
        max: Largest allowed value.
        optional: Whether None is allowed.
        hint: How to fix a wrong value; the end of the error message.

    Raises:
        FederationError: If the value is not an integer or out of range.

    Example:
        >>> check_integer("window", 0, min=1)
        Traceback (most recent call last):
        lightning_fl.errors.FederationError: window must be an integer of at least 1, got 0
    """
    return check_number(name, value, min=min, max=max, integer=True, optional=optional, hint=hint)


def check_sizes(**sizes: int) -> None:
    """Check that options are integers of at least 1; see :func:`check_integer`.

    Args:
        sizes: Values by name.

    Example:
        >>> check_sizes(width=32, depth=0)
        Traceback (most recent call last):
        lightning_fl.errors.FederationError: depth must be an integer of at least 1, got 0
    """
    for name, size in sizes.items():
        check_integer(name, size, min=1)


def check_exclusive(**options: object) -> None:
    """Check that at most one of some options is set.

    Args:
        options: Values by name; None is not set.

    Example:
        >>> check_exclusive(num_steps=3, local_epochs=1.5)
        Traceback (most recent call last):
        lightning_fl.errors.FederationError: num_steps=3 excludes local_epochs=1.5: set one of them
    """
    given = [f"{name}={value!r:.200}" for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise FederationError(f"{' excludes '.join(given)}: set one of them")


def check_choice(name: str, value: _T, *allowed: str) -> _T:
    """Return a string if it is one of those allowed; raise otherwise.

    Args:
        name: Name of the option for the error message.
        value: Its value.
        allowed: Allowed strings.

    Raises:
        FederationError: If the value is not allowed.

    Example:
        >>> check_choice("weighting", "sample", "samples", "uniform")
        Traceback (most recent call last):
        lightning_fl.errors.FederationError: weighting must be samples or uniform, got 'sample'
    """
    words = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
    return check_that(name, value, isinstance(value, str) and value in allowed, words)


def check_flag(name: str, value: _T) -> _T:
    """Return a Python or numpy boolean as a Python boolean; raise for other values.

    Args:
        name: Name of the option for the error message.
        value: Its value. Strings such as ``"false"`` and numbers are refused.

    Raises:
        FederationError: If the value is not a boolean.

    Example:
        >>> check_flag("centered", "false")
        Traceback (most recent call last):
        lightning_fl.errors.FederationError: centered must be true or false, got 'false'
    """
    check_that(name, value, isinstance(value, bool | np.bool_), "true or false")
    return cast("_T", bool(value))


def is_list(value: object) -> bool:
    """Return whether a value is a list, or a sequence like one, such as a list of OmegaConf.

    Example:
        >>> is_list((1, 2)), is_list("ab")
        (True, False)
    """
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


# --- descriptions ---------------------------------------------------------------------------------


def describe(rule: object) -> str:
    """Return the class name of a rule with its constructor arguments of plain types.

    Example:
        >>> from lightning_fl.partition import Dirichlet
        >>> describe(Dirichlet(alpha=0.5))
        'Dirichlet(alpha=0.5, min_size=1, balanced=False)'
    """
    arguments = (f"{name}={value!r}" for name, value in plain_options(rule).items())
    return f"{type(rule).__name__}({', '.join(arguments)})"


def plain_options(rule: object) -> dict[str, Any]:
    """Return the constructor arguments that a rule stores as attributes of plain types.

    Example:
        >>> from lightning_fl.partition import Dirichlet
        >>> plain_options(Dirichlet(alpha=0.5))
        {'alpha': 0.5, 'min_size': 1, 'balanced': False}
    """
    kept = {name: getattr(rule, name, ...) for name in _arguments(type(rule))}
    plain = (int, float, str, bool, list, tuple, dict, type(None))
    return {name: value for name, value in kept.items() if isinstance(value, plain)}


def _arguments(kind: type) -> list[str]:
    """Return the names of a constructor's arguments, including those passed to parent classes."""
    names: dict[str, None] = {}
    for parent in kind.__mro__:
        if init := vars(parent).get("__init__"):
            parameters = inspect.signature(init).parameters
            names |= dict.fromkeys(list(parameters)[1:])
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                break
    return list(names)
