"""Page on several runs, in groups of runs that differ only in the seed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from lightning_fl.files import csv_text
from lightning_fl.functional.intervals import mean_and_std, t_interval
from lightning_fl.report.curves import cost, hyper_parameters, picture, progress
from lightning_fl.report.figures import MOST_LINES, Line
from lightning_fl.report.groups import (
    Group,
    alike,
    at_time,
    common_time,
    differences,
    identity,
    top_level,
)
from lightning_fl.report.lead import alarms, setting, warnings
from lightning_fl.report.page import Report, Section, Table, Verbatim
from lightning_fl.report.paper import latex
from lightning_fl.report.run import Run
from lightning_fl.report.scores import (
    client_metric,
    client_scores,
    final_and_best,
    headline,
    total,
    with_derived,
    worst_decile,
)
from lightning_fl.report.settings import settings
from lightning_fl.report.words import SEPARATOR, counted, listed, number, plus_minus, seconds, span

#: Values of a run by name of the measure.
Measures = dict[str, float]
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
    metric, mode = headline([run for each in groups for run in each.runs])
    groups = [
        replace(each, runs=[with_derived(run, metric, mode) for run in each.runs])
        for each in groups
    ]
    runs = [run for each in groups for run in each.runs]
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
    compared = _comparison(groups, [Table(head, options)] if options else [])
    sections = [
        compared,
        _paired(groups),
        progress(groups),
        cost(groups),
        hyper_parameters(groups),
        _clients(groups),
        _each_run(groups),
        settings(groups),
    ]
    return Report(
        title or f"{counted(len(runs), 'run')} compared",
        [lead, SEPARATOR.join(_common(runs)), *_best(groups)],
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


def _best(groups: Sequence[Group]) -> list[str]:
    """Return sentences on the best group; empty if there are fewer than two groups.

    Runs with an alarm are left out. Groups are separated from the best one if the interval of
    their paired differences does not contain 0.
    """
    metric, mode = groups[0].runs[0].metric, groups[0].runs[0].mode
    sound = [replace(g, runs=[run for run in g.runs if not any(alarms(run))]) for g in groups]
    finals = {
        group.name: [judged[0] for run in group.runs if (judged := final_and_best(run))]
        for group in sound
    }
    means = {name: mean_and_std(values)[0] for name, values in finals.items() if values}
    means = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    if len(means) < 2:
        return []
    top = (max if mode == "max" else min)(means, key=means.__getitem__)
    (best,) = (group for group in sound if group.name == top)
    close = [
        group.name
        for group in sound
        if group.name in means.keys() - {top} and not _is_separated(best, group)
    ]
    text = f"{top} has the best final {metric}, {plus_minus(finals[top])}."
    text += f" The seeds do not separate it from {listed(close, 6)}." if close else ""
    text += " Runs with an alarm are left out." if sound != groups else ""
    return [text]


def _is_separated(base: Group, other: Group) -> bool:
    """Return whether the 95 % interval of paired differences does not contain 0."""
    mean, half = t_interval(list(_pairs(base, other).values()))
    return abs(mean) > half  # half is NaN without two common seeds


def _measures(run: Run, time: float | None) -> Measures:
    """Return what runs are compared by.

    Args:
        run: The run.
        time: Virtual time at which runs are compared; None if a run has no virtual time.
    """
    measures: Measures = {}
    if judged := final_and_best(run):
        measures |= {f"final {run.metric}": judged[0], f"best {run.metric}": judged[1]}
    optional = dict(list(run.test.get("metrics", {}).items())[:6])
    if time is not None:
        by_then = f"{run.metric} after {seconds(time)} of virtual time"
        optional = {by_then: at_time(run, run.metric or "", time)} | optional
    optional[f"worst tenth of clients, {client_scores(run)[0]}"] = worst_decile(run)
    measures |= {name: value for name, value in optional.items() if math.isfinite(value)}
    measures["updates dropped"] = total(run, "dropped")
    measures["upload and download (MB)"] = (total(run, "bytes_up") + total(run, "bytes_down")) / 1e6
    for column, unit in (("virtual_time", " (s)"), ("epsilon", ""), ("backdoor_acc", "")):
        if points := run.column(column):
            measures[column.replace("virtual_", "virtual ") + unit] = points[-1][1]
    return measures


def _interval(values: Sequence[float], form: Callable[[float], str] = number) -> str:
    """Return the 95 % confidence interval of a mean as text."""
    mean, half = t_interval(values)
    return f"{form(mean - half)} to {form(mean + half)}" if math.isfinite(half) else "-"


def _comparison(groups: Sequence[Group], differences: Sequence[Table]) -> Section:
    """Return a table that compares groups, their differences, and tables for papers."""
    time = common_time([run for group in groups for run in group.runs])
    measured = [[_measures(run, time) for run in group.runs] for group in groups]
    names = list(dict.fromkeys(name for runs in measured for each in runs for name in each))
    head, head_csv = ["group", "seeds", "rounds"], ["group", "seeds"]
    rows, rows_csv = [], []
    for group, runs in zip(groups, measured, strict=True):
        seeds = ", ".join(map(_seed, group.runs))
        row = [group.name, seeds, span([run.rounds for run in group.runs])]
        row_csv: list[object] = [group.name, seeds]
        for name in names:
            values = [measures[name] for measures in runs if name in measures]
            is_whole = len(values) in (0, len(runs))
            row.append(plus_minus(values))
            row[-1] += "" if is_whole else f" ({len(values)} of {len(runs)} seeds)"
            row += [_interval(values)] if name.startswith("final ") else []
            row_csv += [len(values), *_digits(values)]
        rows.append(row)
        rows_csv.append(row_csv)
    for name in names:
        head += [name, "95 % interval"] if name.startswith("final ") else [name]
        head_csv += [f"{name} {part}" for part in ("n", "mean", "std", "ci95_low", "ci95_high")]
    caption = (
        "Mean ± sample standard deviation (n - 1) over the seeds that have the value. The interval"
        f" is the {INTERVAL}, mean ± t s/√n."
    )
    papers = [
        Verbatim("Table for a paper: LaTeX", latex(head, rows, caption)),
        Verbatim("Table for a paper: CSV with all digits", csv_text(head_csv, rows_csv)),
    ]
    table = Table(head, rows, caption, sortable=len(rows) > 2)
    return Section("Groups", (), (), [table, *differences], papers)


def _seed(run: Run) -> str:
    return "-" if run.seed is None else str(run.seed)


def _digits(values: Sequence[float]) -> list[object]:
    """Return mean, standard deviation and 95 % interval; those that are unknown are empty."""
    mean, half = t_interval(values)
    std = mean_and_std(values)[1] if len(values) > 1 else math.nan
    known = (mean, std, mean - half, mean + half)
    return [value if math.isfinite(value) else "" for value in known]


def _paired(groups: Sequence[Group]) -> Section | None:
    """Compare each group with the first one seed by seed; None without common seeds."""
    rows = []
    for group in groups[1:]:
        if pairs := _pairs(groups[0], group):
            by_seed = listed([f"{seed}: {_signed(value)}" for seed, value in pairs.items()], 20)
            values = list(pairs.values())
            mean = _signed(t_interval(values)[0])
            rows.append([group.name, by_seed, mean, _interval(values, _signed)])
    if not rows:
        return None
    head = ["group", "difference by seed", "mean difference", "95 % interval"]
    text = (
        f"Differences of final {groups[0].runs[0].metric} from {groups[0].name}, between runs with"
        f" the same seed, and the {INTERVAL}. If it contains 0, the seeds do not show which group"
        " is better."
    )
    return Section("Paired seeds", [text], (), [Table(head, rows)])


def _signed(value: float) -> str:
    return f"{value:+.4g}"


def _pairs(base: Group, other: Group) -> dict[int, float]:
    """Return the differences of final values from another group, by common seed."""
    ours, theirs = _finals_by_seed(other), _finals_by_seed(base)
    return {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}


def _finals_by_seed(group: Group) -> dict[int, float]:
    """Return the finite final values by seed, without seeds that several runs have."""
    counts = Counter(run.seed for run in group.runs)
    return {
        run.seed: judged[0]
        for run in group.runs
        if run.seed is not None
        and counts[run.seed] == 1
        and (judged := final_and_best(run))
        and math.isfinite(judged[0])
    }


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
            means, bands = zip(*map(t_interval, zip(*found, strict=True)), strict=True)
            line = Line(each.name, (100 * share).tolist(), means, bands)
            panels.setdefault(label, []).append(line)
    if not panels:
        return None
    caption = "Scores of the last round's model on each client's samples, in ascending order."
    across = dict.fromkeys(panels, "clients, worst first (%)")
    return Section("Clients", (), [picture("clients", caption, panels, groups, across)])


def _each_run(groups: Sequence[Group]) -> Section:
    """Return the table of all runs."""
    metric = groups[0].runs[0].metric
    head = ["run", "group", "seed", "rounds"]
    head += [f"final {metric}", f"best {metric}", "in round"] if metric else []
    rows = []
    for group in groups:
        for run in group.runs:
            done = f"{run.rounds} of {run.planned}" if run.planned else f"{run.rounds}"
            done += "" if run.is_finished else " (unfinished)"
            judged = final_and_best(run) or (None, None, None)
            rows.append([run.name, group.name, _seed(run), done, *map(number, judged)][: len(head)])
    table = Table(head, rows, "All runs", folded=len(rows) > 12, sortable=True)
    return Section("Runs", (), (), [table])
