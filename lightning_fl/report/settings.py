"""Section on reproducing a run: seeds, versions, machine and config."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_fl.report.groups import Group, alike
from lightning_fl.report.page import Section, Table, Verbatim
from lightning_fl.report.run import Run

#: Entries of ``environment.json`` that are shown.
PARTS = ("module", "terms", "optimizer", "aggregator", "policy", "sampler", "update_transforms")


def settings(groups: Sequence[Group]) -> Section:
    """List the settings of runs, and the commands that repeat them.

    Args:
        groups: Groups of runs. The config of the first run of each kind is shown.
    """
    runs = [run for group in groups for run in group.runs]
    settings = _distinct(
        {"seed": run.seed}
        | run.environment.get("machine", {})
        | {part: run.environment.get(part) for part in PARTS}
        for run in runs
    )
    rows = [[name, ", ".join(values)] for name, values in settings.items() if values]
    if versions := _distinct(run.environment.get("versions", {}) for run in runs):
        packages = (f"{name} {' or '.join(values)}" for name, values in versions.items())
        rows.append(["versions", ", ".join(packages)])
    kinds = [
        (group.name if len(groups) > 1 else "the run", kind)
        for group in groups
        for kind in alike(group.runs)
        if kind[0].config
    ]
    text = []
    if kinds:
        text.append(
            "To repeat a run, use the config.yaml of its folder. With the same versions, device and"
            " data, the results are equal bit for bit."
        )
    verbatim = []
    for name, kind in kinds:
        commands = "\n".join(map(command, kind))
        verbatim.append(Verbatim(f"Repeat {name}", commands, folded=False))
        verbatim.append(Verbatim(f"config.yaml of {kind[0].name}", kind[0].config_text))
    return Section("Versions, seeds and config", text, (), [Table(["", ""], rows)], verbatim)


def _distinct(settings: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the different values of each setting as texts."""
    texts: dict[str, list[str]] = {}
    for each in settings:
        for name, value in each.items():
            text = ", ".join(value) if isinstance(value, list) else str(value)
            known = texts.setdefault(name, [])
            if value is not None and text and text not in known:
                known.append(text)
    return texts


def command(run: Run) -> str:
    """Return the command that repeats a run from the config of its group.

    Options that the config leaves to the machine get the values of the run.
    """
    config, machine = run.config, run.environment.get("machine", {})
    seeds = {
        "seed_everything": "seed_everything",
        "federation.seed": "federation.seed",
        "data.seed": "data.init_args.seed",
    }
    options = [
        f"--{option}={config[name]}"
        for name, option in seeds.items()
        if type(config.get(name)) is int
    ]
    if run.planned not in (None, config.get("trainer.max_epochs")):  # resumed with more rounds
        options.append(f"--trainer.max_epochs={run.planned}")
    if config.get("threads") is None and "threads" in machine:
        options.append(f"--threads={machine['threads']}")  # sums depend on it
    if config.get("trainer.devices") == "auto" and "processes" in machine:
        options.append(f"--trainer.devices={machine['processes']}")
    if config.get("trainer.accelerator") == "auto" and "device" in machine:
        options.append(f"--trainer.accelerator={'cpu' if machine['device'] == 'CPU' else 'gpu'}")
    return " ".join(["lightning-fl fit --config config.yaml", *options])
