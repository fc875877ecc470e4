"""Page on several runs, in groups of runs that differ only in the seed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

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
from lightning_fl.report.lead import setting, warnings
from lightning_fl.report.page import Report, Section, Table, Verbatim
from lightning_fl.report.paper import latex, markdown
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
    time = common_time(runs)
    measured = [[_measures(run, time) for run in each.runs] for each in groups]
    options = top_level(_differing(groups))
    lead = f"{counted(len(runs), 'run')} in {counted(len(groups), 'group')}"
    lead += f", which differ in {listed(options, 6)}." if options else "."
    if len(groups) > MOST_LINES:
        lead += f" Figures show the first {MOST_LINES} groups."
    sections = [
        _comparison(groups, measured),
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
        [lead, SEPARATOR.join(_common(runs)), *_ranking(groups, measured)],
        [],
        [section for section in sections if section is not None],
        [*left_out, *_mixed(groups), *(text for run in runs for text in warnings(run))],
    )


def _differing(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Return the options in which groups with a config differ, with the value of each of them."""
    return differences([identity(each.runs[0]) for each in groups if each.runs[0].config])


def _mixed(groups: Sequence[Group]) -> Iterator[str]:
    """Yield warnings about what the means of groups do not show."""
    runs = [run for each in groups for run in each.runs]
    for each in groups:
        if len(kinds := alike(each.runs)) > 1:
            options = top_level(differences([identity(runs[0]) for runs in kinds]))
            what = f": {listed(options, 6)}" if options else ""
            yield f"Runs of {each.name} differ not only in the seed{what}. Means are over all."
    if any(not run.config for run in runs):
        yield (
            "Of runs without a config.yaml, modules, terms, optimizers and rules are compared, but"
            " no other options."
        )
    untested = [run.name for run in runs if not run.test]
    if 0 < len(untested) < len(runs):
        yield (
            f"{len(untested)} of {len(runs)} runs were not tested: {listed(untested, 5)}. Test"
            " metrics are means over the others. To test a run, run lightning-fl test with --config"
            " config.yaml of the run."
        )


def _common(runs: Sequence[Run]) -> list[str]:
    """Return the phrases on the setting that all runs have in common."""
    first, *others = (list(setting(run)) for run in runs)
    return [phrase for phrase in first if all(phrase in other for other in others)]


def _ranking(groups: Sequence[Group], measured: Sequence[Sequence[Measures]]) -> list[str]:
    """Return a sentence on the best group; empty if there are fewer than two groups."""
    metric, mode = groups[0].runs[0].metric, groups[0].runs[0].mode
    finals = {
        group.name: _values(runs, f"final {metric}")
        for group, runs in zip(groups, measured, strict=True)
    }
    means = {name: mean_and_std(values)[0] for name, values in finals.items() if values}
    means = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    if len(means) < 2:
        return []
    top = (max if mode == "max" else min)(means, key=means.__getitem__)
    return [f"{top} has the best final {metric}, {plus_minus(finals[top])}."]


def _measures(run: Run, time: float | None) -> Measures:
    """Return what runs are compared by.

    Args:
        run: The run.
        time: Virtual time at which runs are compared; None if a run has no virtual time.
    """
    measures: Measures = {}
    if judged := final_and_best(run):
        measures |= {f"final {run.metric}": judged[0], f"best {run.metric}": judged[1]}
    if time is not None and math.isfinite(value := at_time(run, run.metric or "", time)):
        measures[f"{run.metric} after {seconds(time)} of virtual time"] = value
    tested = list(run.test.get("metrics", {}).items())[:6]
    measures |= {name: value for name, value in tested if math.isfinite(value)}
    if math.isfinite(worst := worst_decile(run)):
        measures[f"worst tenth of clients, {client_scores(run)[0]}"] = worst
    measures["updates dropped"] = total(run, "dropped")
    measures["upload and download (MB)"] = (total(run, "bytes_up") + total(run, "bytes_down")) / 1e6
    for column, unit in (("virtual_time", " (s)"), ("epsilon", ""), ("backdoor_acc", "")):
        if points := run.column(column):
            measures[column.replace("virtual_", "virtual ") + unit] = points[-1][1]
    return measures


def _values(runs: Sequence[Measures], name: str) -> list[float]:
    return [measures[name] for measures in runs if name in measures]


def _of_seeds(values: Sequence[float], seeds: int) -> str:
    """Return mean and standard deviation, with the number of seeds if some lack the value."""
    text = plus_minus(values)
    return text if len(values) in (0, seeds) else f"{text} ({len(values)} of {seeds} seeds)"


def _interval(values: Sequence[float], form: Callable[[float], str] = number) -> str:
    """Return the 95 % confidence interval of a mean as text."""
    mean, half = t_interval(values)
    return f"{form(mean - half)} to {form(mean + half)}" if math.isfinite(half) else "-"


def _comparison(groups: Sequence[Group], measured: Sequence[Sequence[Measures]]) -> Section:
    """Return a table that compares groups, their differences, and tables for papers."""
    names = list(dict.fromkeys(name for runs in measured for each in runs for name in each))
    final = f"final {groups[0].runs[0].metric}"
    head = ["group", "seeds", "rounds"]
    for name in names:
        head += [name, "95 % interval"] if name == final else [name]
    rows = []
    for group, runs in zip(groups, measured, strict=True):
        row = [group.name, _seeds(group), span([run.rounds for run in group.runs])]
        for name in names:
            values = _values(runs, name)
            row.append(_of_seeds(values, len(runs)))
            row += [_interval(values)] if name == final else []
        rows.append(row)
    caption = (
        "Mean ± sample standard deviation (n - 1) over the seeds that have the value. The interval"
        " is the 95 % confidence interval of the mean by Student's t distribution, mean ± t s/√n."
    )
    tables = [Table(head, rows, caption, sortable=len(rows) > 2), *_differences(groups)]
    papers = [
        Verbatim("Table for a paper: LaTeX", latex(head, rows, caption)),
        Verbatim("Table for a paper: Markdown", markdown(head, rows)),
        Verbatim("Table for a paper: CSV with all digits", _csv(groups, names, measured)),
    ]
    return Section("Groups", (), (), tables, papers)


def _seeds(group: Group) -> str:
    return ", ".join("-" if run.seed is None else str(run.seed) for run in group.runs)


def _csv(
    groups: Sequence[Group], names: Sequence[str], measured: Sequence[Sequence[Measures]]
) -> str:
    """Return number of runs, mean, standard deviation and 95 % interval of each measure."""
    rows = []
    for group, runs in zip(groups, measured, strict=True):
        row: list[object] = [group.name, _seeds(group)]
        for name in names:
            values = _values(runs, name)
            mean, half = t_interval(values)
            std = mean_and_std(values)[1] if len(values) > 1 else math.nan
            figures = (mean, std, mean - half, mean + half)
            row += [len(values), *(figure if math.isfinite(figure) else "" for figure in figures)]
        rows.append(row)
    parts = ("n", "mean", "std", "ci95_low", "ci95_high")
    return csv_text(["group", "seeds", *(f"{n} {part}" for n in names for part in parts)], rows)


def _differences(groups: Sequence[Group]) -> list[Table]:
    """Return a table of the options that differ, with one column per group."""
    names = [each.name for each in groups if each.runs[0].config]
    rows = [
        [option, *("-" if value is None else str(value) for value in values)]
        for option, values in _differing(groups).items()
    ]
    return [Table(["option", *names], rows)] if rows else []


def _paired(groups: Sequence[Group]) -> Section | None:
    """Compare each group with the first one seed by seed; None without common seeds."""
    base, *others = map(_finals_by_seed, groups)
    rows = []
    for group, finals in zip(groups[1:], others, strict=True):
        pairs = {seed: finals[seed] - base[seed] for seed in sorted(base.keys() & finals.keys())}
        if pairs:
            by_seed = listed([f"{seed}: {_signed(value)}" for seed, value in pairs.items()], 20)
            values = list(pairs.values())
            mean = _signed(t_interval(values)[0])
            rows.append([group.name, by_seed, mean, _interval(values, _signed)])
    if not rows:
        return None
    head = ["group", "difference by seed", "mean difference", "95 % interval"]
    text = (
        f"Differences of final {groups[0].runs[0].metric} from {groups[0].name}, between runs with"
        " the same seed, and the 95 % confidence interval of their mean by Student's t"
        " distribution. If it contains 0, the seeds do not show which group is better."
    )
    return Section("Paired seeds", [text], (), [Table(head, rows)])


def _signed(value: float) -> str:
    return f"{value:+.4g}"


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
        curves: dict[str, list[Any]] = {}
        for run in each.runs:
            samples, scores = client_scores(run)
            label = f"{client_metric(run)} on {samples}"
            if values := [row["server"] for row in scores.get("server", [])]:
                curves.setdefault(label, []).append(np.quantile(values, share).tolist())
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
            seed = "-" if run.seed is None else str(run.seed)
            rows.append([run.name, group.name, seed, done, *map(number, judged)][: len(head)])
    table = Table(head, rows, "All runs", folded=len(rows) > 12, sortable=True)
    return Section("Runs", (), (), [table])
