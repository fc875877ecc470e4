"""Import of optional packages."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightning_fl.errors import FederationError


def imported(name: str, user: str, extra: str) -> Any:
    """Import an optional package.

    Args:
        name: Name of the module.
        user: What needs it, for the error message.
        extra: The extra of ``lightning_fl`` that installs it.

    Raises:
        FederationError: If the package is not installed.

    Example:
        >>> imported("nonexistent", user="It", extra="hf")
        Traceback (most recent call last):
        lightning_fl.errors.FederationError: It requires the package nonexistent, which is not in...
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != name.partition(".")[0]:
            raise  # a package that the optional one needs
        raise FederationError(
            f"{user} requires the package {name.partition('.')[0]}, which is not installed:"
            f' pip install "lightning_fl[{extra}]"'
        ) from error
