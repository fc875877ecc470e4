"""Page on several runs, in groups of runs that differ only in the seed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_fl.files import csv_text
from lightning_fl.functional.intervals import t_interval
from lightning_fl.options import check_choice
from lightning_fl.report import groups as grouping
from lightning_fl.report import summary, words
from lightning_fl.report.curves import cost, hyper_parameters, picture, progress
from lightning_fl.report.figures import MOST_LINES, Line, mean_line
from lightning_fl.report.groups import Group, top_level
from lightning_fl.report.one_run import settings
from lightning_fl.report.page import Report, Section, Table, Verbatim
from lightning_fl.report.run import Run, differences
from lightning_fl.report.words import counted, listed, number, plus_minus

#: What the intervals of the page are.
INTERVAL = "95 % confidence interval of the mean by Student's t distribution"


def about_groups(groups: Sequence[Group], title: str | None = None) -> Report:
    """Return the page on several runs.

    Args:
        groups: Groups of runs.
        title: Title of the page; None derives it from the number of runs.
    """
    compared = Comparison(groups)
    groups, runs = compared.groups, compared.runs
    differing = differences([grouping.identity(each.runs[0]) for each in groups])
    lead = f"{counted(len(runs), 'run')} in {counted(len(groups), 'group')}"
    lead += f", which differ in {listed(top_level(differing), 6)}." if differing else "."
    if len(groups) > MOST_LINES:
        lead += f" Figures show the first {MOST_LINES} groups."
    settings_of_runs = [list(summary.setting(run)) for run in runs]
    common = [each for each in settings_of_runs[0] if all(each in s for s in settings_of_runs)]
    sections = [
        _comparison(compared, differing),
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
        [lead, words.SEPARATOR.join(common), *_best(compared)],
        [],
        [section for section in sections if section is not None],
        [*_mixed(groups), *(text for run in runs for text in summary.warnings(run))],
        compared.alarms,
    )


def _mixed(groups: Sequence[Group]) -> Iterator[str]:
    """Yield warnings about groups whose runs differ in more than the seed."""
    for each in groups:
        kinds = [grouping.identity(runs[0]) for runs in grouping.alike(each.runs)]
        if options := top_level(differences(kinds)):
            yield (
                f"Runs of {each.name} differ not only in the seed: {listed(options, 6)}. Means are"
                " over all."
            )


def _best(compared: Comparison) -> list[str]:
    """Return a sentence on the best group; nothing if there are fewer than two groups."""
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


def _comparison(compared: Comparison, differing: Mapping[str, Sequence[Any]]) -> Section:
    """Return a table that compares groups, the options in which they differ, and LaTeX."""
    head, rows = ["group", "seeds", "rounds"], []
    for name in compared.names:
        head += [name, "95 % interval"] if name.startswith("final ") else [name]
    for group in compared.groups:
        seeds = ", ".join(map(_seed, group.runs))
        row = [group.name, seeds, words.span([run.rounds for run in group.runs])]
        for name in compared.names:
            values = compared.values(group, name)
            row.append(plus_minus(values) + _how_many(values, group, " seeds"))
            row += [_interval(values)] * name.startswith("final ")
        rows.append(row)
    caption = (
        "Mean ± sample standard deviation (n - 1) over the seeds that have the value. The interval"
        f" is the {INTERVAL}, mean ± t s/√n."
    )
    tables = [Table(head, rows, caption, sortable=len(rows) > 2)]
    options = []
    for option, found in differing.items():
        # Of another class, or not in a list: there is no such option, so that it has no default.
        is_part = option not in top_level(differing) or option.rpartition(".")[2].isdecimal()
        unset = "-" if is_part else "default"
        options.append([option, *(unset if value is None else str(value) for value in found)])
    if options:
        tables.append(Table(["option", *(each.name for each in compared.groups)], options))
    paper = Verbatim("Table for a paper: LaTeX", latex(compared))
    return Section("Groups", (), (), tables, [paper])


def _how_many(values: Sequence[float], group: Group, of: str = "") -> str:
    """Return how many runs of a group have a value, unless all or none have it."""
    count = len(group.runs)
    return "" if len(values) in (0, count) else f" ({len(values)} of {count}{of})"


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
            samples, scores = summary.client_scores(run)
            if values := [row["server"] for row in scores.get("server", [])]:
                label = f"{summary.client_metric(run)} on {samples}"
                curves.setdefault(label, []).append(np.quantile(values, share).tolist())
        for label, found in curves.items():
            points = list(zip((100 * share).tolist(), zip(*found, strict=True), strict=True))
            panels.setdefault(label, []).append(mean_line(each.name, points))
    if not panels:
        return None
    caption = "Scores of the model on each client's samples, in ascending order."
    across = dict.fromkeys(panels, "clients, worst first (%)")
    return Section("Clients", (), [picture("clients", caption, panels, groups, across)])


def _each_run(compared: Comparison) -> Section:
    """Return the table of all runs, also with all digits."""
    rows, digits = [], []
    for group in compared.groups:
        for run in group.runs:
            done = summary.rounds_done(run) + " (unfinished)" * (not run.is_finished)
            start, values = [run.name, group.name, _seed(run), done], compared.of[id(run)]
            rows.append([*start, *(number(values.get(name)) for name in compared.names)])
            digits.append([*start, *(values.get(name, "") for name in compared.names)])
    head = ["run", "group", "seed", "rounds", *compared.names]
    table = Table(head, rows, "All runs", folded=len(rows) > 12, sortable=True)
    text = Verbatim("All runs: CSV with all digits", csv_text(head, digits))
    return Section("Runs", (), (), [table], [text])


# --- measures ------------------------------------------------------------------------------------


def measures(run: Run, time: float | None = None) -> dict[str, float]:
    """Return what runs are compared by.

    Args:
        run: The run.
        time: Virtual time at which runs are compared; None if a run has no virtual time.
    """
    values: dict[str, float] = {}
    if judged := summary.final_and_best(run):
        values |= {f"final {run.metric}": judged[0], f"best {run.metric}": judged[1]}
    optional: dict[str, float] = {}
    if time is not None:
        curve = grouping.curve(run, run.metric or "", "virtual_time")
        by_then = f"{run.metric} after {words.seconds(time)} of virtual time"
        optional[by_then] = grouping.value_at(curve, time)
    optional |= dict(list(run.test.get("metrics", {}).items())[:6])
    samples, _ = summary.client_scores(run)
    optional[f"worst tenth of clients, {samples}"] = summary.worst_decile(run)
    values |= {name: value for name, value in optional.items() if math.isfinite(value)}
    sums = {name: summary.total(run, name) for name in ("dropped", "bytes_up", "bytes_down")}
    values["updates dropped"] = sums["dropped"]
    values["upload and download (MB)"] = (sums["bytes_up"] + sums["bytes_down"]) / 1e6
    for column, unit in (("virtual_time", " (s)"), ("epsilon", ""), ("backdoor_acc", "")):
        if points := run.column(column):
            values[column.replace("virtual_", "virtual ") + unit] = points[-1][1]
    return values


class Comparison:
    """Measures of groups of runs, by seed.

    Args:
        groups: Groups of runs.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        metric, mode = summary.headline([run for each in groups for run in each.runs])
        #: The groups, of runs with the metric and the derived columns.
        self.groups = [
            replace(each, runs=[summary.with_derived(run, metric, mode) for run in each.runs])
            for each in groups
        ]
        self.runs = runs = [run for group in self.groups for run in group.runs]
        time = grouping.common_time(runs)
        every = [measures(run, time) for run in runs]
        #: Names of the measures.
        self.names = list(dict.fromkeys(name for each in every for name in each))
        #: Measures, and last values of the columns of the tables of rounds, by the id of the run.
        self.of = {
            id(run): {name: run.column(name)[-1][1] for name in run.columns} | each
            for run, each in zip(runs, every, strict=True)
        }
        alarms = {id(run): list(summary.alarms(run)) for run in runs}
        self.alarms = [text for run in runs for text in alarms[id(run)]]
        #: The groups without the runs that have an alarm.
        self.sound = [
            replace(each, runs=[run for run in each.runs if not alarms[id(run)]])
            for each in self.groups
        ]
        self._modes = dict.fromkeys((metric, f"final {metric}", f"best {metric}"), mode)

    def mode(self, name: str) -> str | None:
        """Return whether the best value of a measure is the highest or the lowest, if known."""
        return self._modes.get(name) or summary.direction(name)

    def values(self, group: Group, name: str) -> list[float]:
        """Return a measure, or the last value of a column, of the runs of a group that have it."""
        return [each[name] for run in group.runs if name in (each := self.of[id(run)])]

    def differences(self, base: Group, other: Group, name: str) -> dict[int, float]:
        """Return the differences of a measure from another group, by common seed."""
        theirs, ours = self._by_seed(base, name), self._by_seed(other, name)
        return {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}

    def _by_seed(self, group: Group, name: str) -> dict[int, float]:
        """Return the finite values by seed, without seeds that several runs have."""
        counts = Counter(run.seed for run in group.runs)
        found = {run.seed: self.of[id(run)].get(name, math.nan) for run in group.runs}
        return {
            seed: value
            for seed, value in found.items()
            if seed is not None and counts[seed] == 1 and math.isfinite(value)
        }

    def best(self, name: str) -> tuple[int, list[str]] | None:
        """Return the place of the best group, and those that the seeds do not separate from it.

        Runs with an alarm are left out. The seeds separate two groups if the 95 % interval of
        their paired differences does not contain 0. None if fewer than two groups have a mean, or
        it is not known whether more or less is better.
        """
        means = {at: t_interval(self.values(g, name))[0] for at, g in enumerate(self.sound)}
        means = {at: mean for at, mean in means.items() if math.isfinite(mean)}
        if self.mode(name) is None or len(means) < 2:
            return None
        best = (max if self.mode(name) == "max" else min)(means, key=means.__getitem__)
        close = []
        for at in means.keys() - {best}:
            differences = self.differences(self.sound[best], self.sound[at], name)
            mean, half = t_interval(list(differences.values()))
            if not abs(mean) > half:  # NaN for fewer than two seeds
                close.append(at)
        return best, [self.sound[at].name for at in sorted(close)]


# --- a table for a paper -------------------------------------------------------------------------


#: Characters with a meaning in LaTeX, and their replacements.
LATEX = {character: f"\\{character}" for character in "&%$#_{}"}
LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", words.NBSP: "~"}
LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {"[": "{[}", "]": "{]}"}  # after a line break, it would be an optional argument


def latex(compared: Comparison, columns: Sequence[str] = (), percent: bool = False) -> str:
    r"""Return a table of groups in LaTeX, which needs the package booktabs.

    A cell is the mean over the seeds, and their sample standard deviation with two digits. The best
    mean of a column is bold if the seeds separate it from all other groups, and its name tells
    whether more or less is better. Runs with an alarm are never the best.

    Args:
        compared: Measures of the groups.
        columns: Measures, or columns of the tables of rounds of which the last value counts. By
            default, the final value of the metric, and the metrics of the test.
        percent: Whether shares are in percent: values from 0 to 1 of which more is better.

    Raises:
        FederationError: If no run has a column.
    """
    if not columns:
        tested = {name for run in compared.runs for name in run.test.get("metrics", {})}
        columns = [name for name in compared.names if name.startswith("final ") or name in tested]
    known = dict.fromkeys([*compared.names, *(n for each in compared.of.values() for n in each)])
    head, cells = ["group"], [[_text(group.name)] for group in compared.groups]
    for name in columns:
        check_choice("each of columns", name, *known)
        every = [compared.values(group, name) for group in compared.groups]
        is_share = compared.mode(name) == "max" and all(0 <= v <= 1 for each in every for v in each)
        factor = 100 if percent and is_share else 1
        head.append(_text(name + " (%)" * (factor > 1)))
        best, close = compared.best(name) or (None, [""])
        for at, (group, values) in enumerate(zip(compared.groups, every, strict=True)):
            cell = _cell([factor * value for value in values], at == best and not close)
            cells[at].append(cell + _how_many(values, group))
    seeds = words.span([len(group.runs) for group in compared.groups])
    modes = {name: compared.mode(name) or "not known whether max or min" for name in columns}
    lines = [
        f"% Needs \\usepackage{{booktabs}}. Mean and sample standard deviation, seeds: {seeds}.",
        "% Bold: best, where the 95 % interval of the paired differences from each other group does"
        " not contain 0.",
        *(f"% {_text(name)}: {mode} is best." for name, mode in modes.items()),
        *(f"% {_text(alarm)}" for alarm in compared.alarms),
        f"\\begin{{tabular}}{{l{'r' * len(columns)}}}",
        *("\\toprule", _row(head), "\\midrule"),
        *(*map(_row, cells), "\\bottomrule"),
        "\\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    return rf"{' & '.join(cells)} \\"


def _cell(values: Sequence[float], is_bold: bool) -> str:
    r"""Return mean and standard deviation.

    Example:
        >>> print(_cell([0.5, 0.61, 0.7], is_bold=True), _cell([12345.0], is_bold=False))
        $\mathbf{0.60} \pm 0.10$ $12{,}345$
    """
    text = plus_minus(values).replace(words.NBSP, " ").replace(",", "{,}")
    if not any(map(str.isdigit, text)):  # unknown or not finite
        return text
    mean, _, std = text.partition(" ± ")
    mean = rf"\mathbf{{{mean}}}" if is_bold else mean
    return f"${mean}$" if not std else rf"${mean} \pm {std}$"


def _text(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in " ".join(text.splitlines()))
