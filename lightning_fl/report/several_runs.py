"""Page on several runs, in groups of runs that differ only in the seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_fl.report.curves import band_note, cost, group_names, hyper_parameters, progress
from lightning_fl.report.figures import MOST_LINES, Line, lines
from lightning_fl.report.groups import (
    Group,
    at_time,
    common_time,
    differences,
    identity,
    mean_and_std,
)
from lightning_fl.report.lead import setting, warnings
from lightning_fl.report.page import Picture, Report, Section, Table
from lightning_fl.report.run import Run
from lightning_fl.report.scores import (
    client_scores,
    final_and_best,
    finite,
    headline,
    total,
    with_derived,
    worst_decile,
)
from lightning_fl.report.settings import settings
from lightning_fl.report.words import counted, number, plus_minus, seconds, size


def about_groups(
    groups: Sequence[Group], title: str | None = None, left_out: Sequence[str] = ()
) -> Report:
    """Return the page on several runs.

    Args:
        groups: Groups of runs.
        title: Title of the page; None derives it from the number of runs.
        left_out: Warnings about runs that were skipped.
    """
    groups = [Group(each.name, [with_derived(run) for run in each.runs]) for each in groups]
    runs = [run for each in groups for run in each.runs]
    differing = differences([identity(each.runs[0]) for each in groups if each.runs[0].config])
    lead = f"{counted(len(runs), 'run')} in {counted(len(groups), 'group')}. Runs of a group differ"
    lead += " only in the seed."
    if differing:
        top = [n for n in differing if not any(n.startswith(f"{o}.") for o in differing)]
        lead += f" Groups differ in {', '.join(top[:6])}{', ...' * (len(top) > 6)}."
    if len(groups) > MOST_LINES:
        lead += f" Figures show the first {MOST_LINES} groups."
    sections = [
        _comparison(groups, differing),
        progress(groups),
        cost(groups),
        hyper_parameters(groups),
        _clients(groups),
        _each_run(groups),
        settings(runs, {each.name: each.runs[0] for each in groups}),
    ]
    return Report(
        title or f"{counted(len(runs), 'run')} compared",
        [lead, " ".join([*_common(runs), *_ranking(groups)])],
        [],
        [section for section in sections if section is not None],
        [*left_out, *warnings(runs)],
    )


def _common(runs: Sequence[Run]) -> list[str]:
    """Return the sentences on the setting that all runs have in common."""
    first, *others = (list(setting(run)) for run in runs)
    return [sentence for sentence in first if all(sentence in other for other in others)]


def _ranking(groups: Sequence[Group]) -> list[str]:
    """Return a sentence on the best group; empty if there are fewer than two groups."""
    name, best = headline([run for each in groups for run in each.runs])
    finals = {
        each.name: [f[0] for run in each.runs if (f := final_and_best(run, name, best))]
        for each in groups
    }
    means = {group: mean_and_std(values)[0] for group, values in finals.items() if values}
    means = {group: mean for group, mean in means.items() if finite([mean])}
    if len(means) < 2:
        return []
    top = best(means, key=means.__getitem__)
    return [f"{top} has the best final {name}, {plus_minus(finals[top])}."]


def _comparison(groups: Sequence[Group], differing: Mapping[str, Sequence[Any]]) -> Section:
    """Return a table that compares groups, and a table of the options that differ."""
    name, best = headline([run for each in groups for run in each.runs])
    time = common_time([run for group in groups for run in group.runs])
    rows = [_compared(each, name, best, time) for each in groups]
    head = [column for column in rows[0] if any(row[column] != "-" for row in rows)]
    caption = "Mean ± sample standard deviation (n - 1) over the seeds of a group"
    tables = [Table(head, [[row[column] for column in head] for row in rows], caption)]
    if differing:
        options = list(differing.items())[:60]
        tables.append(
            Table(
                ["option", *(each.name for each in groups if each.runs[0].config)],
                [[option, *map(number, values)] for option, values in options],
                "Options that differ between configs; - means that a config lacks the option",
                folded=len(differing) > 15,
            )
        )
    return Section("Groups", (), (), tables)


def _compared(
    group: Group, name: str | None, best: Any, time: float | None = None
) -> dict[str, str]:
    """Return the cells of a group by column; ``-`` for missing values.

    Args:
        group: The group.
        name: Column of the main metric.
        best: ``max`` or ``min``.
        time: Virtual time at which groups are compared; None if a run has no virtual time.
    """
    runs = group.runs
    judged = [found for run in runs if (found := final_and_best(run, name, best))]
    rounds = sorted({run.rounds for run in runs})
    last = {
        column: [points[-1][1] for run in runs if (points := run.column(column))]
        for column in ("virtual_time", "epsilon", "backdoor_acc")
    }
    timed: dict[str, str] = {}
    if name and time is not None:
        values = finite(at_time(run, name, time) for run in runs)
        timed[f"{name} after {seconds(time)} of virtual time"] = plus_minus(values)
    moved = [total(run, "bytes_up") + total(run, "bytes_down") for run in runs]
    return {
        "group": group.name,
        "seeds": ", ".join(number(run.seed) for run in runs),
        "rounds": " to ".join(map(str, rounds[:: max(1, len(rounds) - 1)])),
        f"final {name}": plus_minus([final for final, *_ in judged]),
        f"best {name}": plus_minus([top for _, top, _ in judged]),
        **timed,
        "worst tenth of clients": plus_minus(finite(map(worst_decile, runs))),
        "updates dropped": plus_minus([total(run, "dropped") for run in runs]),
        "upload and download": plus_minus(moved, size),
        "virtual time": plus_minus(last["virtual_time"], seconds),
        "epsilon": plus_minus(last["epsilon"]),
        "backdoor_acc": plus_minus(last["backdoor_acc"]),
    }


def _clients(groups: Sequence[Group]) -> Section | None:
    """Draw the distribution of client accuracies in each group; None if they are unknown."""
    panels: dict[str, list[Line]] = {}
    share = np.arange(51) / 50
    for each in groups:
        curves: dict[str, list[Any]] = {}
        for run in each.runs:
            samples, scores = client_scores(run)
            if values := [row["server"] for row in scores.get("server", [])]:
                curves.setdefault(samples, []).append(np.quantile(values, share).tolist())
        for samples, drawn in curves.items():
            means, stds = zip(*map(mean_and_std, zip(*drawn, strict=True)), strict=True)
            line = Line(each.name, (100 * share).tolist(), means, stds)
            panels.setdefault(f"accuracy on {samples}", []).append(line)
    if not panels:
        return None
    caption = (
        "Accuracy of the last round's model on each client's samples, in ascending order. A flat"
        " line means that all clients have the same accuracy." + band_note(groups)
    )
    figure = lines(panels, "clients, worst first (%)", group_names(groups))
    return Section("Clients", (), [Picture.of("clients", figure, caption)])


def _each_run(groups: Sequence[Group]) -> Section:
    """Return the table of all runs."""
    name, best = headline([run for each in groups for run in each.runs])
    rows = []
    for each in groups:
        for run in each.runs:
            judged = final_and_best(run, name, best) or (None, None, None)
            done = f"{run.rounds}{f' of {run.planned}' if run.planned else ''}"
            state = "" if run.is_finished else " (unfinished)"
            rows.append([run.name, each.name, number(run.seed), done + state, *map(number, judged)])
    head = ["run", "group", "seed", "rounds", f"final {name}", f"best {name}", "in round"]
    return Section("Runs", (), (), [Table(head, rows, "All runs", folded=len(rows) > 12)])
