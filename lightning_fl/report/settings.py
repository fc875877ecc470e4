"""Section on reproducing a run: seeds, versions, machine and config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_fl.report.groups import Group, alike
from lightning_fl.report.page import Section, Table, Verbatim
from lightning_fl.report.run import Run

#: Maximum number of characters of all configs on a page.
MOST_CONFIG = 200_000


def settings(groups: Sequence[Group]) -> Section:
    """List the settings of runs, and the commands that repeat them.

    Args:
        groups: Groups of runs. The config of the first run of each group is shown.
    """
    runs = [run for group in groups for run in group.runs]
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
    text = []
    if not any(run.environment for run in runs):
        text.append("Versions and machine are unknown, because the run has no environment.json.")
    several = [(group.name, alike(group.runs)) for group in groups]
    known = [
        Group(f"{name}, {runs[0].name}" if len(kinds) > 1 else name, runs)
        for name, kinds in several
        for runs in kinds
        if runs[0].config_text
    ]
    if known:
        text.append(
            "To repeat a run, save its config below as config.yaml, or use the file in its folder."
            " With the same versions and device, and the same data, the results are equal bit for"
            " bit."
        )
    verbatim = []
    room = MOST_CONFIG
    for group in known:
        if (room := room - len(group.runs[0].config_text)) < 0:
            text.append("Other configs are left out; the folders of the runs have them.")
            break
        of = f" {group.name}" if max(len(groups), len(known)) > 1 else " the run"
        verbatim.append(Verbatim(f"Repeat{of}", "\n".join(map(command, group.runs)), folded=False))
        verbatim.append(Verbatim(f"config.yaml of {group.runs[0].name}", group.runs[0].config_text))
    tables = [table] if table.rows else []
    return Section("Versions, seeds and config", text, (), tables, verbatim)


def command(run: Run) -> str:
    """Return the command that repeats a run from the config of its group.

    Options that the config leaves to the machine get the values of the run.
    """
    config, machine = run.config, _mapping(run, "machine")
    options = [
        f"--{name}={config[name]}"
        for name in ("seed_everything", "federation.seed", "data.seed")
        if type(config.get(name)) is int
    ]
    options = [o.replace("--data.seed", "--data.init_args.seed") for o in options]
    if run.planned not in (None, config.get("trainer.max_epochs")):  # resumed with more rounds
        options.append(f"--trainer.max_epochs={run.planned}")
    if config.get("threads") is None and type(machine.get("threads")) is int:
        options.append(f"--threads={machine['threads']}")  # sums depend on it
    if config.get("trainer.devices") == "auto" and type(machine.get("processes")) is int:
        options.append(f"--trainer.devices={machine['processes']}")
    if config.get("trainer.accelerator") == "auto" and "device" in machine:
        options.append(f"--trainer.accelerator={'cpu' if machine['device'] == 'CPU' else 'gpu'}")
    return " ".join(["lightning-fl fit --config config.yaml", *options])


def _mapping(run: Run, name: str) -> dict[str, Any]:
    found = run.environment.get(name)
    return found if isinstance(found, dict) else {}


def _parts(run: Run) -> dict[str, Any]:
    """Return the module and the rules of a run by name."""
    parts = {}
    names = ("module", "terms", "optimizer", "aggregator", "policy", "sampler", "update_transforms")
    for name in names:
        value = run.environment.get(name)
        parts[name] = ", ".join(map(str, value)) if isinstance(value, list) else value
    return parts


def _add(values: list[Any], value: Any) -> None:
    if value not in values:
        values.append(value)
