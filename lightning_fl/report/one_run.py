"""Page on one run, and the section on reproducing runs."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_fl.report import summary
from lightning_fl.report.clients import clients, participation, partition
from lightning_fl.report.curves import cost, hyper_parameters, progress
from lightning_fl.report.groups import Group, alike
from lightning_fl.report.page import Report, Section, Table, Verbatim
from lightning_fl.report.run import Run, values_of
from lightning_fl.report.words import SEPARATOR


def about_run(run: Run, title: str | None = None) -> Report:
    """Return the page on one run.

    Args:
        run: The run.
        title: Title of the page; None derives it from the name of the run.
    """
    run = summary.with_derived(run, *summary.headline([run]))
    alone = [Group(run.name, [run])]
    sections = [progress(alone), cost(alone), hyper_parameters(alone)]
    sections += [partition(run), participation(run), clients(run), settings(alone)]
    return Report(
        title or "Run " + run.name.partition("/")[0],
        [SEPARATOR.join(summary.setting(run))],
        list(summary.key_figures(run)),
        [section for section in sections if section is not None],
        list(summary.warnings(run)),
        list(summary.alarms(run)),
    )


#: Seeds of a config by dotted name, as options of the command line.
SEEDS = {
    "seed_everything": "seed_everything",
    "federation.seed": "federation.seed",
    "data.seed": "data.init_args.seed",
}


def settings(groups: Sequence[Group]) -> Section:
    """List the settings of runs, and the commands that repeat them.

    Args:
        groups: Groups of runs. The config of the first run of each kind is shown.
    """
    known: dict[str, dict[str, None]] = {}
    for run in (run for group in groups for run in group.runs):
        for name, value in values_of(run.environment).items():
            if value not in (None, []):
                known.setdefault(name, {})[str(value)] = None
    rows = [[name, ", ".join(values)] for name, values in known.items()]
    kinds = [
        (group.name if len(groups) > 1 else "the run", kind)
        for group in groups
        for kind in alike(group.runs)
        if kind[0].config
    ]
    text = (
        "To repeat a run, use the config.yaml of its folder. With the same versions, device and"
        " data, the results are equal bit for bit."
    )
    verbatim = []
    for name, kind in kinds:
        verbatim += [
            Verbatim(f"Repeat {name}", "\n".join(map(command, kind)), folded=False),
            Verbatim(f"config.yaml of {kind[0].name}", kind[0].config_text),
        ]
    tables = [Table(["", ""], rows, "environment.json", folded=True)] if rows else []
    return Section("Versions, seeds and config", [text] if kinds else [], (), tables, verbatim)


def command(run: Run) -> str:
    """Return the command that repeats a run from the config of its group.

    Options that the config leaves to the machine get the values of the run.
    """
    config, machine = run.config, run.environment.get("machine", {})
    options = {name: config[name] for name in SEEDS if type(config.get(name)) is int}
    if run.planned and run.planned != config.get("trainer.max_epochs"):  # resumed with more
        options["trainer.max_epochs"] = run.planned
    if config.get("threads") is None and machine:
        options["threads"] = machine["threads"]  # sums depend on it
    if config.get("trainer.devices") == "auto":
        options["trainer.devices"] = machine["processes"]
    if config.get("trainer.accelerator") == "auto":
        options["trainer.accelerator"] = "cpu" if machine["device"] == "CPU" else "gpu"
    words = [f"--{SEEDS.get(name, name)}={value}" for name, value in options.items()]
    return " ".join(["lightning-fl fit --config config.yaml", *words])
