"""Group runs that differ only in the seed, and name groups by their differences."""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from lightning_fl.report.run import PLACES, Run, differences
from lightning_fl.report.summary import split_rule
from lightning_fl.report.words import listed

#: Options that may differ within a group: seeds, paths and display options.
SEEDS_AND_PLACES = {"seed_everything", "federation.seed", "data.seed"} | PLACES
#: Entries of ``environment.json`` that may differ within a group.
NOT_COMPARED = {"seed", "state", "no train_acc", "machine", "versions"}
#: What options stand for that are null in a config.
DEFAULTS = {
    "federation.aggregator": "FedAvg",
    "federation.policy": "Schedule",
    "federation.sampler": "UniformSampler",
}


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed, or that the user has put together.

    Args:
        name: Name of the group, made of its differences from the other groups.
        runs: One or more runs.
    """

    name: str
    runs: list[Run]

    def values(self, name: str, across: str = "round") -> list[tuple[float, list[float]]]:
        """Return the value of one column, and that of another at it in each run.

        Over rounds, the points are those that all runs have. Runs reach the same traffic or virtual
        time in different rounds: the points are then those of the first run, as far as all runs
        have them, and the last point before counts of the others.

        Args:
            name: The column.
            across: A column that increases over rounds.
        """
        curves = [curve(run, name, across) for run in self.runs]
        if not all(curves):
            return []
        if across == "round":
            common = set.intersection(*({x for x, _ in curve} for curve in curves))
        else:
            first, last = max(c[0][0] for c in curves), min(c[-1][0] for c in curves)
            common = {x for x, _ in curves[0] if first <= x <= last}
        return [(x, [value_at(curve, x) for curve in curves]) for x in sorted(common)]


def curve(run: Run, name: str, across: str) -> list[tuple[float, float]]:
    """Return a column of a run over another column, without points that have no place on it."""
    places = dict(run.column(across))
    points = [(places[r], value) for r, value in run.column(name) if r in places]
    return [point for point in points if math.isfinite(point[0])]


def value_at(curve: Sequence[tuple[float, float]], x: float) -> float:
    """Return the last value of a curve up to a place; NaN before its first point.

    Example:
        >>> value_at([(1.0, 0.5), (4.0, 0.75)], 3.9)
        0.5
    """
    at = bisect(curve, x, key=itemgetter(0))
    return curve[at - 1][1] if at else math.nan


def common_time(runs: Sequence[Run]) -> float | None:
    """Return the virtual time that all runs have reached; None if a run has none."""
    ends = [times[-1][1] if (times := run.column("virtual_time")) else math.nan for run in runs]
    return min(ends) if all(map(math.isfinite, ends)) else None


def group(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ only in the seed, and name groups by their differences.

    Runs without a config, of a script, are named after their folder. If two of a group have the
    same seed, they differ in something that is not recorded, and each is a group of its own.
    """
    groups: list[list[Run]] = []
    for each in alike(runs):
        seeds = {run.seed for run in each} - {None}
        is_one = each[0].config or len(seeds) == len(each)
        groups += [each] if is_one else [[run] for run in each]
    if len(groups) == 1:
        return [Group(_parent(groups[0][0]), groups[0])]
    names = [
        name if runs[0].config else _parent(runs[0])
        for name, runs in zip(_names([identity(g[0]) for g in groups]), groups, strict=True)
    ]
    # Groups without a name, or with that of another group, are named after their folders.
    return [
        Group(name if name and names.count(name) == 1 else listed([r.name for r in runs], 1), runs)
        for name, runs in zip(names, groups, strict=True)
    ]


def alike(runs: Sequence[Run]) -> list[list[Run]]:
    """Split runs into those that differ only in the seed, in the order of their first runs."""
    by_options: dict[str, list[Run]] = {}
    for run in runs:
        by_options.setdefault(repr(sorted(identity(run).items())), []).append(run)
    return list(by_options.values())


def _parent(run: Run) -> str:
    return run.name.partition("/")[0]


def identity(run: Run) -> dict[str, Any]:
    """Return the options that are set in a run, without seeds and paths.

    Without a config, they are what the environment says of the federation, its partition and the
    folder.
    """
    if not run.config:
        known = {n: value for n, value in run.environment.items() if n not in NOT_COMPARED}
        if (split := run.partition) is not None:
            known |= {"partition": split_rule(split), "clients": len(split.clients)}
        return {"folder": _parent(run)} | known
    is_set = {name: value for name, value in run.config.items() if value not in (None, [], {})}
    return {n: value for n, value in (DEFAULTS | is_set).items() if n not in SEEDS_AND_PLACES}


def top_level(names: Iterable[str]) -> list[str]:
    """Return the options that do not belong to another one of them.

    Example:
        >>> top_level(["aggregator", "aggregator.f", "lr"])
        ['aggregator', 'lr']
    """
    names = list(names)
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _names(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name configs by their differences from the majority: classes first, options if needed.

    The name is empty if it would be too long.
    """
    differing = differences(configs)
    for options in (top_level(differing), list(differing)):
        some = {option: differing[option] for option in options}
        labels = [_name(some, at) for at in range(len(configs))]
        if len(set(labels)) == len(labels):
            break
    return [label if len(label) <= 60 else "" for label in labels]


def _name(differing: Mapping[str, Sequence[Any]], at: int) -> str:
    last_parts = Counter(map(_last, differing))
    parts = []
    for option, values in differing.items():
        common, count = Counter(map(repr, values)).most_common(1)[0]
        is_common = repr(values[at]) == common and count > len(values) / 2
        if not is_common and values[at] is not None:
            name = option if last_parts[_last(option)] > 1 else _last(option)
            parts.append(f"{name}={values[at]}")
    return ", ".join(parts) or "base"


def _last(option: str) -> str:
    """Return the last part of a dotted name, with the name of the list if it is a position.

    Example:
        >>> _last("model.terms.0"), _last("federation.policy.lr")
        ('terms.0', 'lr')
    """
    parts = option.split(".")
    return ".".join(parts[-2:] if parts[-1].isdecimal() else parts[-1:])
