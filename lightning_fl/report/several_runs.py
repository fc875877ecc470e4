"""Page on several runs, in groups of runs that differ only in the seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lightning_fl.files import csv_text
from lightning_fl.functional.intervals import t_interval
from lightning_fl.report.curves import cost, hyper_parameters, picture, progress
from lightning_fl.report.figures import MOST_LINES, Line, mean_line
from lightning_fl.report.groups import Group, alike, differences, identity, top_level
from lightning_fl.report.lead import alarms, setting, warnings
from lightning_fl.report.measures import Comparison
from lightning_fl.report.page import Report, Section, Table, Verbatim
from lightning_fl.report.paper import latex
from lightning_fl.report.run import Run
from lightning_fl.report.scores import client_metric, client_scores
from lightning_fl.report.settings import settings
from lightning_fl.report.words import SEPARATOR, counted, listed, number, plus_minus, span

#: What the intervals of the page are.
INTERVAL = "95 % confidence interval of the mean by Student's t distribution"


def about_groups(
    groups: Sequence[Group], title: str | None = None, left_out: Sequence[str] = ()
) -> Report:
    """Return the page on several runs.

    Args:
        groups: Groups of runs.
        title: Title of the page; None derives it from the number of runs.
        left_out: Warnings about runs that were skipped.
    """
    compared = Comparison(groups)
    groups, runs = compared.groups, compared.runs
    differing = differences([identity(each.runs[0]) for each in groups])
    lead = f"{counted(len(runs), 'run')} in {counted(len(groups), 'group')}"
    lead += f", which differ in {listed(top_level(differing), 6)}." if differing else "."
    if len(groups) > MOST_LINES:
        lead += f" Figures show the first {MOST_LINES} groups."
    options = [
        [option, *("-" if value is None else str(value) for value in values)]
        for option, values in differing.items()
    ]
    head = ["option", *(each.name for each in groups)]
    sections = [
        _comparison(compared, [Table(head, options)] if options else []),
        _paired(compared),
        progress(groups),
        cost(groups),
        hyper_parameters(groups),
        _clients(groups),
        _each_run(compared),
        settings(groups),
    ]
    return Report(
        title or f"{counted(len(runs), 'run')} compared",
        [lead, SEPARATOR.join(_common(runs)), *_best(compared)],
        [],
        [section for section in sections if section is not None],
        [*left_out, *_mixed(groups), *(text for run in runs for text in warnings(run))],
        [text for run in runs for text in alarms(run)],
    )


def _mixed(groups: Sequence[Group]) -> Iterator[str]:
    """Yield warnings about groups whose runs differ in more than the seed."""
    for each in groups:
        if len(kinds := alike(each.runs)) > 1:
            options = top_level(differences([identity(runs[0]) for runs in kinds]))
            yield (
                f"Runs of {each.name} differ not only in the seed: {listed(options, 6)}. Means are"
                " over all."
            )


def _common(runs: Sequence[Run]) -> list[str]:
    """Return the phrases on the setting that all runs have in common."""
    first, *others = (list(setting(run)) for run in runs)
    return [phrase for phrase in first if all(phrase in other for other in others)]


def _best(compared: Comparison) -> list[str]:
    """Return sentences on the best group; empty if there are fewer than two groups."""
    name = f"final {compared.groups[0].runs[0].metric}"
    if (found := compared.best(name)) is None:
        return []
    best, close = compared.sound[found[0]], found[1]
    text = f"{best.name} has the best {name}, {plus_minus(compared.values(best, name))}."
    text += f" The seeds do not separate it from {listed(close, 6)}." if close else ""
    text += " Runs with an alarm are left out." if compared.sound != compared.groups else ""
    return [text]


def _interval(values: Sequence[float], form: Callable[[float], str] = number) -> str:
    """Return the 95 % confidence interval of a mean as text."""
    mean, half = t_interval(values)
    return f"{form(mean - half)} to {form(mean + half)}" if math.isfinite(half) else "-"


def _comparison(compared: Comparison, differences: Sequence[Table]) -> Section:
    """Return a table that compares groups, their differences, and tables for papers."""
    head, rows = ["group", "seeds", "rounds"], []
    for name in compared.names:
        head += [name, "95 % interval"] if name.startswith("final ") else [name]
    for group in compared.groups:
        seeds = ", ".join(map(_seed, group.runs))
        row = [group.name, seeds, span([run.rounds for run in group.runs])]
        for name in compared.names:
            values = compared.values(group, name)
            is_whole = len(values) in (0, len(group.runs))
            some = "" if is_whole else f" ({len(values)} of {len(group.runs)} seeds)"
            row += [plus_minus(values) + some, *([_interval(values)] * name.startswith("final "))]
        rows.append(row)
    caption = (
        "Mean ± sample standard deviation (n - 1) over the seeds that have the value. The interval"
        f" is the {INTERVAL}, mean ± t s/√n."
    )
    table = Table(head, rows, caption, sortable=len(rows) > 2)
    paper = Verbatim("Table for a paper: LaTeX", latex(compared))
    return Section("Groups", (), (), [table, *differences], [paper])


def _seed(run: Run) -> str:
    return "-" if run.seed is None else str(run.seed)


def _paired(compared: Comparison) -> Section | None:
    """Compare each group with the first one seed by seed; None without common seeds."""
    base, *others = compared.groups
    name, rows = f"final {base.runs[0].metric}", []
    for group in others:
        if pairs := compared.differences(base, group, name):
            by_seed = listed([f"{seed}: {_signed(value)}" for seed, value in pairs.items()], 20)
            values = list(pairs.values())
            mean = _signed(t_interval(values)[0])
            rows.append([group.name, by_seed, mean, _interval(values, _signed)])
    if not rows:
        return None
    head = ["group", "difference by seed", "mean difference", "95 % interval"]
    text = (
        f"Differences of {name} from {base.name}, between runs with the same seed, and the"
        f" {INTERVAL}. If it contains 0, the seeds do not show which group is better."
    )
    return Section("Paired seeds", [text], (), [Table(head, rows)])


def _signed(value: float) -> str:
    return f"{value:+.4g}"


def _clients(groups: Sequence[Group]) -> Section | None:
    """Draw the distribution of client accuracies in each group; None if they are unknown."""
    panels: dict[str, list[Line]] = {}
    share = np.arange(51) / 50
    for each in groups:
        curves: dict[str, list[list[float]]] = {}
        for run in each.runs:
            samples, scores = client_scores(run)
            if values := [row["server"] for row in scores.get("server", [])]:
                curves.setdefault(f"{client_metric(run)} on {samples}", []).append(
                    np.quantile(values, share).tolist()
                )
        for label, found in curves.items():
            points = list(zip((100 * share).tolist(), zip(*found, strict=True), strict=True))
            panels.setdefault(label, []).append(mean_line(each.name, points))
    if not panels:
        return None
    caption = "Scores of the last round's model on each client's samples, in ascending order."
    across = dict.fromkeys(panels, "clients, worst first (%)")
    return Section("Clients", (), [picture("clients", caption, panels, groups, across)])


def _each_run(compared: Comparison) -> Section:
    """Return the table of all runs, also with all digits."""
    names = compared.names
    rows, digits = [], []
    for group in compared.groups:
        for run in group.runs:
            done = f"{run.rounds} of {run.planned}" if run.planned else f"{run.rounds}"
            done += "" if run.is_finished else " (unfinished)"
            start, values = [run.name, group.name, _seed(run), done], compared.of_run(run)
            rows.append([*start, *(number(values.get(name)) for name in names)])
            digits.append([*start, *(values.get(name, "") for name in names)])
    head = ["run", "group", "seed", "rounds", *names]
    table = Table(head, rows, "All runs", folded=len(rows) > 12, sortable=True)
    text = Verbatim("All runs: CSV with all digits", csv_text(head, digits))
    return Section("Runs", (), (), [table], [text])
