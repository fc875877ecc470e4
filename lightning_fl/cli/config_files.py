"""Check the files of configurations before they are parsed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_fl.cli.arguments import CONFIGS, config_files
from lightning_fl.cli.messages import did_you_mean
from lightning_fl.files import one_line, read_text, short_repr
from lightning_fl.types import FederationError

#: Parts of a configuration that are made of their options.
PARTS = ("trainer", "federation", "checkpoint")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Refuse duplicate keys, of which YAML would keep the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and keys.setdefault(key.value, key) is not key:
                problem = f"duplicate key {key.value}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return node


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
            found = yaml.load(read_text(path), _Loader)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise FederationError(f"config {value} cannot be read: {_reason(error)}") from error
        if not isinstance(found, dict) or not found:
            what = "is empty" if not found else f"is a {type(found).__name__}"
            raise FederationError(f"config {value} {what}: it needs options, such as trainer: ...")
        for name in PARTS:
            if not isinstance(part := found.get(name, {}), dict | str):  # a text names a file
                what = "is empty" if part is None else f"is {short_repr(part)}"
                raise FederationError(f"config {value}: {name} {what}: add options, or remove it")


def _reason(error: Exception) -> str:
    """Return the reason of an error in one line, with the place in the file if it is known."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return one_line(error)
    return one_line(f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}")  # type: ignore[attr-defined]
