"""What groups of runs are compared by, and what their seeds show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lightning_fl.functional.intervals import t_interval
from lightning_fl.report.groups import Group, at_time, common_time
from lightning_fl.report.lead import alarms
from lightning_fl.report.run import Run
from lightning_fl.report.scores import (
    client_scores,
    direction,
    final_and_best,
    headline,
    total,
    with_derived,
    worst_decile,
)
from lightning_fl.report.words import seconds


def measures(run: Run, time: float | None = None) -> dict[str, float]:
    """Return what runs are compared by.

    Args:
        run: The run.
        time: Virtual time at which runs are compared; None if a run has no virtual time.
    """
    values: dict[str, float] = {}
    if judged := final_and_best(run):
        values |= {f"final {run.metric}": judged[0], f"best {run.metric}": judged[1]}
    optional = dict(list(run.test.get("metrics", {}).items())[:6])
    if time is not None:
        by_then = f"{run.metric} after {seconds(time)} of virtual time"
        optional = {by_then: at_time(run, run.metric or "", time)} | optional
    optional[f"worst tenth of clients, {client_scores(run)[0]}"] = worst_decile(run)
    values |= {name: value for name, value in optional.items() if math.isfinite(value)}
    values["updates dropped"] = total(run, "dropped")
    values["upload and download (MB)"] = (total(run, "bytes_up") + total(run, "bytes_down")) / 1e6
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
        metric, mode = headline([run for each in groups for run in each.runs])
        #: The groups, of runs with the metric and the derived columns.
        self.groups = [
            replace(each, runs=[with_derived(run, metric, mode) for run in each.runs])
            for each in groups
        ]
        self.runs = runs = [run for group in self.groups for run in group.runs]
        time = common_time(runs)
        every = [measures(run, time) for run in runs]
        #: Names of the measures.
        self.names = list(dict.fromkeys(name for each in every for name in each))
        #: The groups without the runs that have an alarm.
        self.sound = [
            replace(each, runs=[run for run in each.runs if not any(alarms(run))])
            for each in self.groups
        ]
        self._measures = dict(zip(map(id, runs), every, strict=True))
        #: Names of the measures, and of the columns of the tables of rounds.
        self.known = list(dict.fromkeys([*self.names, *(n for run in runs for n in run.columns)]))
        self._modes = dict.fromkeys((metric, f"final {metric}", f"best {metric}"), mode)

    def mode(self, name: str) -> str | None:
        """Return whether the best value of a measure is the highest or the lowest, if known."""
        return self._modes.get(name) or direction(name)

    def of_run(self, run: Run) -> dict[str, float]:
        """Return the measures of a run, and the last values of its columns."""
        return {name: run.column(name)[-1][1] for name in run.columns} | self._measures[id(run)]

    def values(self, group: Group, name: str) -> list[float]:
        """Return a measure, or the last value of a column, of the runs of a group that have it."""
        return [each[name] for run in group.runs if name in (each := self.of_run(run))]

    def differences(self, base: Group, other: Group, name: str) -> dict[int, float]:
        """Return the differences of a measure from another group, by common seed."""
        theirs, ours = self._by_seed(base, name), self._by_seed(other, name)
        return {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}

    def _by_seed(self, group: Group, name: str) -> dict[int, float]:
        """Return the finite values by seed, without seeds that several runs have."""
        counts = Counter(run.seed for run in group.runs)
        found = {run.seed: self.of_run(run).get(name, math.nan) for run in group.runs}
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
        if self.mode(name) is None:
            return None
        means = {at: t_interval(self.values(g, name))[0] for at, g in enumerate(self.sound)}
        means = {at: mean for at, mean in means.items() if math.isfinite(mean)}
        if len(means) < 2:
            return None
        best = (max if self.mode(name) == "max" else min)(means, key=means.__getitem__)
        close = []
        for at in means.keys() - {best}:
            differences = self.differences(self.sound[best], self.sound[at], name)
            mean, half = t_interval(list(differences.values()))
            if not abs(mean) > half:  # NaN for fewer than two seeds
                close.append(at)
        return best, [self.sound[at].name for at in sorted(close)]
