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
    describe_differences,
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
    finite,
    headline,
    total,
    with_derived,
    worst_decile,
)
from lightning_fl.report.settings import settings
from lightning_fl.report.words import counted, listed, number, plus_minus, seconds, span


def about_groups(
    groups: Sequence[Group], title: str | None = None, left_out: Sequence[str] = ()
) -> Report:
    """Return the page on several runs.

    Args:
        groups: Groups of runs.
        title: Title of the page; None derives it from the number of runs.
        left_out: Warnings about runs that were skipped.
    """
    groups = [replace(each, runs=[with_derived(run) for run in each.runs]) for each in groups]
    runs = [run for each in groups for run in each.runs]
    name, best = headline(runs)
    configs = [identity(each.runs[0]) for each in groups if each.runs[0].config]
    differing = differences(configs)
    lead = f"{counted(len(runs), 'run')} in {counted(len(groups), 'group')}."
    if not (mixed := list(_mixed(groups))):
        lead += " Runs of a group differ only in the seed."
    if differing:
        top = top_level(differing)
        lead += f" Groups differ in {', '.join(top[:6])}{', ...' * (len(top) > 6)}."
    by_folder = [each.runs for each in groups if not each.is_named]
    if any(len(runs) > 1 and not runs[0].config for runs in by_folder):
        lead += " Runs without a config.yaml are grouped by folder. Of their modules, terms and"
        lead += " optimizers are compared, but no other options."
    if len(groups) > MOST_LINES:
        lead += f" Figures show the first {MOST_LINES} groups."
    sections = [
        _comparison(groups, name, best),
        _paired(groups, name, best),
        progress(groups),
        cost(groups),
        hyper_parameters(groups),
        _clients(groups),
        _each_run(groups, name, best),
        settings(groups),
    ]
    return Report(
        title or f"{counted(len(runs), 'run')} compared",
        [lead, " ".join([*_common(runs), *_ranking(groups, name, best)])],
        [],
        [section for section in sections if section is not None],
        [*left_out, *mixed, *warnings(runs), *_untested(runs)],
    )


def _mixed(groups: Sequence[Group]) -> Iterator[str]:
    """Yield a warning for each group that the user has made of runs of different settings."""
    for each in groups:
        if len(kinds := alike(each.runs)) > 1:
            top = top_level(differences([identity(runs[0]) for runs in kinds]))
            what = f": {listed(top, 6)}" if top else ""
            yield (
                f"Runs of {each.name} differ not only in the seed{what}. Means and intervals are"
                " over all of them."
            )


def _untested(runs: Sequence[Run]) -> list[str]:
    """Return a warning if only some of the runs were tested."""
    names = [run.name for run in runs if not run.test]
    if not names or len(names) == len(runs):
        return []
    return [
        f"{len(names)} of {len(runs)} runs were not tested: {listed(names, 5)}. Test"
        " metrics are means over the others. To test a run, run lightning-fl test with --config"
        " config.yaml of the run."
    ]


def _common(runs: Sequence[Run]) -> list[str]:
    """Return the sentences on the setting that all runs have in common."""
    first, *others = (list(setting(run)) for run in runs)
    return [sentence for sentence in first if all(sentence in other for other in others)]


def _ranking(groups: Sequence[Group], name: str | None, best: Callable[..., Any]) -> list[str]:
    """Return a sentence on the best group; empty if there are fewer than two groups."""
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


#: Values of the runs of a group by name of the measure.
Measures = dict[str, list[float]]


def _measures(
    group: Group, name: str | None, best: Callable[..., Any], time: float | None
) -> Measures:
    """Return what groups are compared by.

    Args:
        group: The group.
        name: Column of the main metric.
        best: ``max`` or ``min``.
        time: Virtual time at which groups are compared; None if a run has no virtual time.
    """
    runs = group.runs
    judged = [found for run in runs if (found := final_and_best(run, name, best))]
    last = {
        column: [points[-1][1] for run in runs if (points := run.column(column))]
        for column in ("virtual_time", "epsilon", "backdoor_acc")
    }
    measures: Measures = {
        f"final {name}": [final for final, *_ in judged],
        f"best {name}": [top for _, top, _ in judged],
    }
    if name and time is not None:
        after = f"{name} after {seconds(time)} of virtual time"
        measures[after] = finite(at_time(run, name, time) for run in runs)
    tests = [run.test["metrics"] for run in runs if run.test]
    for metric in list(dict.fromkeys(metric for test in tests for metric in test))[:6]:
        measures[metric] = finite(test[metric] for test in tests if metric in test)
    moved = [total(run, "bytes_up") + total(run, "bytes_down") for run in runs]
    for run in runs:
        if math.isfinite(worst := worst_decile(run)):
            of = f"worst tenth of clients, {client_scores(run)[0]}"
            measures.setdefault(of, []).append(worst)
    return measures | {
        "updates dropped": [total(run, "dropped") for run in runs],
        "upload and download (MB)": [each / 1e6 for each in moved],
        "virtual time (s)": last["virtual_time"],
        "epsilon": last["epsilon"],
        "backdoor_acc": last["backdoor_acc"],
    }


def _of_seeds(values: Sequence[float], seeds: int) -> str:
    """Return mean and standard deviation, with the number of seeds if some lack the value."""
    text = plus_minus(values)
    return text if len(values) in (0, seeds) else f"{text} ({len(values)} of {seeds} seeds)"


def _interval(values: Sequence[float]) -> str:
    """Return the 95 % confidence interval of a mean as text."""
    mean, half = t_interval(values)
    return f"{number(mean - half)} to {number(mean + half)}" if math.isfinite(half) else "-"


def _comparison(groups: Sequence[Group], name: str | None, best: Callable[..., Any]) -> Section:
    """Return a table that compares groups, their differences in words, and tables for papers."""
    time = common_time([run for group in groups for run in group.runs])
    measured = [_measures(each, name, best, time) for each in groups]
    names = list(dict.fromkeys(n for measures in measured for n in measures))
    names = [n for n in names if any(measures.get(n) for measures in measured)]
    head, rows = ["group", "seeds", "rounds"], [_group_cells(each) for each in groups]
    for column in names:
        head.append(column)
        for row, measures, each in zip(rows, measured, groups, strict=True):
            row.append(_of_seeds(measures.get(column, []), len(each.runs)))
        if column == f"final {name}":
            head.append("95 % interval")
            for row, measures in zip(rows, measured, strict=True):
                row.append(_interval(measures[column]))
    caption = (
        "Mean ± sample standard deviation (n - 1) over the seeds of a group; a number of seeds in"
        " parentheses means that the other runs lack the value. The interval is the"
        " 95 % confidence interval of the mean by Student's t distribution, mean ± t s/√n."
    )
    tables = [Table(head, rows, caption, sortable=len(rows) > 2)]
    if words := _differences(groups):
        tables.append(words)
    papers = [
        Verbatim("Table for a paper: LaTeX", latex(head, rows, caption)),
        Verbatim("Table for a paper: Markdown", markdown(head, rows)),
        Verbatim("Table for a paper: CSV with all digits", _csv(groups, names, measured)),
    ]
    return Section("Groups", (), (), tables, papers)


def _group_cells(group: Group) -> list[str]:
    seeds = ", ".join(map(_seed, group.runs))
    return [group.name, seeds, span([run.rounds for run in group.runs])]


def _seed(run: Run) -> str:
    return "-" if run.seed is None else str(run.seed)


def _csv(groups: Sequence[Group], names: Sequence[str], measured: Sequence[Measures]) -> str:
    """Return number of runs, mean, standard deviation and 95 % interval of each measure."""
    parts = ("n", "mean", "std", "ci95_low", "ci95_high")
    rows = []
    for each, measures in zip(groups, measured, strict=True):
        row: list[object] = [each.name, " ".join(map(_seed, each.runs))]
        for name in names:
            if not (values := measures.get(name)):
                row += [0, "", "", "", ""]
                continue
            mean, half = t_interval(values)
            std = mean_and_std(values)[1] if len(values) > 1 else math.nan
            found = (mean, std, mean - half, mean + half)
            row += [len(values), *(value if math.isfinite(value) else "" for value in found)]
        rows.append(row)
    return csv_text(["group", "seeds", *(f"{n} {part}" for n in names for part in parts)], rows)


def _differences(groups: Sequence[Group]) -> Table | None:
    """Return the differences of configs from that of the first group in words."""
    known = [each for each in groups if each.runs[0].config]
    if len(known) < 2:
        return None
    base, rows = identity(known[0].runs[0]), []
    for each in known[1:]:
        words = describe_differences(base, identity(each.runs[0])) or "-"
        rows.append([each.name, words if len(words) <= 600 else words[:599] + "…"])
    return Table(["group", f"configuration, compared with {known[0].name}"], rows)


def _paired(groups: Sequence[Group], name: str | None, best: Callable[..., Any]) -> Section | None:
    """Compare each group with the first one seed by seed; None without common seeds."""
    base, *others = (_finals_by_seed(each, name, best) for each in groups)
    rows = []
    for each, finals in zip(groups[1:], others, strict=True):
        seeds = sorted(base.keys() & finals.keys())
        if not seeds:
            continue
        pairs = {seed: finals[seed] - base[seed] for seed in seeds}
        by_seed = listed([f"{seed}: {value:+.4g}" for seed, value in pairs.items()], 20)
        mean, half = t_interval(list(pairs.values()))
        interval = f"{mean - half:+.4g} to {mean + half:+.4g}" if math.isfinite(half) else "-"
        rows.append([each.name, by_seed, f"{mean:+.4g}", interval])
    if not rows:
        return None
    head = ["group", "difference by seed", "mean difference", "95 % interval"]
    text = (
        f"Differences of final {name} from {groups[0].name}, between runs with the same seed. Such"
        " runs share what the seed determines, such as the partition and the initial model, so"
        " their differences usually vary less than their values. The interval is the 95 %"
        " confidence interval of the mean difference by Student's t distribution. If it contains 0,"
        " the seeds do not show which group is better."
    )
    return Section("Paired seeds", [text], (), [Table(head, rows)])


def _finals_by_seed(group: Group, name: str | None, best: Callable[..., Any]) -> dict[int, float]:
    """Return the finite final values by seed, without seeds that several runs have."""
    counts = Counter(run.seed for run in group.runs)
    finals = {run.seed: final_and_best(run, name, best) for run in group.runs}
    return {
        seed: found[0]
        for seed, found in finals.items()
        if seed is not None and counts[seed] == 1 and found and math.isfinite(found[0])
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
    caption = (
        "Scores of the last round's model on each client's samples, in ascending order. A flat line"
        " means that all clients have the same score."
    )
    across = "clients, worst first (%)"
    return Section("Clients", (), [picture("clients", caption, panels, groups, across)])


def _each_run(groups: Sequence[Group], name: str | None, best: Callable[..., Any]) -> Section:
    """Return the table of all runs."""
    head = ["run", "group", "seed", "rounds"]
    if name is not None:
        head += [f"final {name}", f"best {name}", "in round"]
    rows = []
    for each in groups:
        for run in each.runs:
            judged = final_and_best(run, name, best) or (None, None, None)
            done = f"{run.rounds}{f' of {run.planned}' if run.planned else ''}"
            state = "" if run.is_finished else " (unfinished)"
            row = [run.name, each.name, _seed(run), done + state, *map(number, judged)]
            rows.append(row[: len(head)])
    return Section(
        "Runs", (), (), [Table(head, rows, "All runs", folded=len(rows) > 12, sortable=True)]
    )
