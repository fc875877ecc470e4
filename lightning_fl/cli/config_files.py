"""Check the files of configurations before they are parsed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from lightning_fl.cli.arguments import CONFIGS, config_files
from lightning_fl.cli.messages import did_you_mean
from lightning_fl.files import one_line, read_text
from lightning_fl.types import FederationError


def check_configs(args: Sequence[str]) -> None:
    """Check that the configurations of a command exist and are YAML with options.

    Args:
        args: Arguments of the command line.

    Raises:
        FederationError: If one of them does not; the message names the file.
    """
    for _, value in config_files(args):
        path = Path(value)
        if not path.exists():
            shipped = {each.relative_to(CONFIGS).as_posix() for each in CONFIGS.rglob("*.yaml")}
            similar = did_you_mean(value.removeprefix("configs/"), sorted(shipped))
            remedy = similar or ": lightning-fl configs lists those that come with the package"
            raise FederationError(f"config {value} does not exist{remedy}")
        try:
            found = yaml.safe_load(read_text(path))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise FederationError(f"config {value} cannot be read: {_reason(error)}") from error
        if not isinstance(found, dict) or not found:
            what = "is empty" if not found else f"is a {type(found).__name__}"
            raise FederationError(f"config {value} {what}: it needs options, such as trainer: ...")


def _reason(error: Exception) -> str:
    """Return the reason of an error in one line, with the place in the file if it is known."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return one_line(error)
    return one_line(f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}")  # type: ignore[attr-defined]
