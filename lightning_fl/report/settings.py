"""Section on reproducing a run: seeds, versions, machine and config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_fl.report.page import Section, Table
from lightning_fl.report.run import Run

#: Maximum number of configs on a page.
MOST_CONFIGS = 24


def settings(runs: Sequence[Run], configs_of: Mapping[str, Run]) -> Section:
    """List the settings of runs.

    Args:
        runs: Runs whose seeds, versions and machines are listed.
        configs_of: Runs whose configs are shown, by name: one per group.
    """
    values: dict[str, list[Any]] = {}
    versions: dict[str, list[str]] = {}
    for run in runs:
        for name, version in _mapping(run, "versions").items():
            _add(versions.setdefault(str(name), []), str(version)[:40])
        for name, value in {"seed": run.seed, **_mapping(run, "machine"), **_parts(run)}.items():
            column = values.setdefault(str(name)[:40], [])
            if value not in (None, ""):
                _add(column, value)
    rows = [[name, ", ".join(str(value)[:300] for value in each)] for name, each in values.items()]
    rows.append(["versions", ", ".join(f"{n} {' or '.join(v)}" for n, v in versions.items())])
    table = Table(["", ""], [row for row in rows if row[1]])
    unknown = "Versions and machine are unknown, because the run has no environment.json."
    return Section(
        "Versions, seeds and config",
        [] if any(run.environment for run in runs) else [unknown],
        (),
        [table] if table.rows else [],
        [
            (f"config.yaml of {name}", run.config_text)
            for name, run in list(configs_of.items())[:MOST_CONFIGS]
            if run.config_text
        ],
    )


def _mapping(run: Run, name: str) -> dict[str, Any]:
    found = run.environment.get(name)
    return found if isinstance(found, dict) else {}


def _parts(run: Run) -> dict[str, Any]:
    """Return the module and the rules of a run by name."""
    parts = {}
    for name in ("module", "aggregator", "policy", "sampler", "update_transforms"):
        value = run.environment.get(name)
        parts[name] = ", ".join(map(str, value)) if isinstance(value, list) else value
    return parts


def _add(values: list[Any], value: Any) -> None:
    if value not in values:
        values.append(value)
