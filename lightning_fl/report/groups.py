"""Group runs that differ only in the seed, and name groups by their differences."""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from lightning_fl.functional.intervals import t_interval
from lightning_fl.report.run import PLACES, Run

#: Options that may differ within a group: seeds, paths and display options.
SEEDS_AND_PLACES = {"seed_everything", "federation.seed", "data.seed"} | PLACES
#: Entries of ``environment.json`` that may differ within a group of runs without a config.
NOT_COMPARED = {"seed", "state", "no train_acc", "machine", "versions"}
#: Defaults of options that are null in a config.
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
        is_named: Whether the user has named the group.
    """

    name: str
    runs: list[Run]
    is_named: bool = False

    def band(self, name: str) -> list[tuple[float, float, float]]:
        """Return round, mean and half its 95 % interval of a column, for rounds of all runs."""
        columns = [dict(run.column(name)) for run in self.runs]
        rounds = [r for r in columns[0] if all(r in column for column in columns)]
        return [(r, *t_interval([column[r] for column in columns])) for r in rounds]

    def band_over(self, name: str, across: str) -> list[tuple[float, float, float]]:
        """Return the value of one column, and mean and half its 95 % interval of another at it.

        Runs reach the same traffic or virtual time in different rounds. The points are those of the
        first run, as far as all runs have them; of the others, the last point before counts.

        Args:
            name: The column.
            across: A column that increases over rounds.
        """
        curves = [_curve(run, name, across) for run in self.runs]
        if not all(curves):
            return []
        first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
        return [
            (x, *t_interval([value_at(curve, x) for curve in curves]))
            for x, _ in curves[0]
            if first <= x <= last
        ]


def _curve(run: Run, name: str, across: str) -> list[tuple[float, float]]:
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


def at_time(run: Run, name: str, time: float) -> float:
    """Return the last value of a column within a virtual time; NaN if there is none."""
    return value_at(_curve(run, name, "virtual_time"), time)


def group(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ only in the seed, and name groups by their differences.

    Runs without a config were made in Python. Those of one folder with the same environment are a
    group, named after the folder. If two of them have the same seed, they differ in something that
    is not recorded, and each is a group of its own.
    """
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        folder = "" if run.config else _parent(run)
        found.setdefault((folder, _without_seed(run)), []).append(run)
    groups: list[list[Run]] = []
    for each in found.values():
        seeds = {run.seed for run in each}
        is_one = each[0].config or (len(seeds) == len(each) and None not in seeds)
        groups += [each] if is_one else [[run] for run in each]
    if len(groups) == 1:
        return [Group(_parent(groups[0][0]), groups[0])]
    names = _names([identity(runs[0]) for runs in groups])
    names = [
        name if runs[0].config else _parent(runs[0]) if len(runs) > 1 else ""
        for name, runs in zip(names, groups, strict=True)
    ]
    counts = Counter(names)
    return [
        Group(name if name and counts[name] == 1 else _folders(runs), runs)
        for name, runs in zip(names, groups, strict=True)
    ]


def with_names(named: Mapping[str, Sequence[Run]]) -> list[Group]:
    """Return the groups that the user has named, and those of the other runs.

    Args:
        named: Runs by the name of their group. Runs with an empty name form groups as in
            :func:`group`.
    """
    groups = []
    for name, runs in named.items():
        made = [Group(name, list(runs), True)] if name else group(runs)
        groups += [
            Group(_folders(each.runs), each.runs) if not name and each.name in named else each
            for each in made
        ]
    return groups


def alike(runs: Sequence[Run]) -> list[list[Run]]:
    """Split the runs of a group into those that differ only in the seed."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(_without_seed(run), []).append(run)
    return list(found.values())


def _parent(run: Run) -> str:
    return run.name.partition("/")[0]


def _without_seed(run: Run) -> str:
    """Return what runs have in common if they differ only in the seed.

    Without a config, this is what the environment says of the federation.
    """
    environment = {n: value for n, value in run.environment.items() if n not in NOT_COMPARED}
    return repr(sorted((identity(run) if run.config else environment).items()))


def _folders(runs: Sequence[Run]) -> str:
    return runs[0].name + (f" and {len(runs) - 1} more" if len(runs) > 1 else "")


def identity(run: Run) -> dict[str, Any]:
    """Return the config of a run without seeds and paths."""
    return {
        name: DEFAULTS.get(name) if value is None else value
        for name, value in run.config.items()
        if name not in SEEDS_AND_PLACES
    }


def differences(configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the options that differ, with the value of each config; None if it has none.

    Example:
        >>> differences([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}])
        {'b': [2, 3], 'c': [None, 4]}
    """
    names = dict.fromkeys(name for config in configs for name in config)
    found = {name: [config.get(name) for config in configs] for name in names}
    return {name: values for name, values in found.items() if len(set(map(repr, values))) > 1}


def top_level(names: Collection[str]) -> list[str]:
    """Return the options that do not belong to another one of them.

    Example:
        >>> top_level(["aggregator", "aggregator.f", "lr"])
        ['aggregator', 'lr']
    """
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def describe_differences(base: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the differences of a config from another one in words.

    Args:
        base: Values of the config that it is compared with, by dotted name.
        other: Values of the config.

    Example:
        >>> describe_differences({"fit.lr": 1.0, "seed": 1}, {"fit.lr": 0.3, "seed": 1})
        'lr: 0.3 instead of 1.0'
        >>> base = {"aggregator": "FedAvg"}
        >>> describe_differences(base, {"aggregator": "Krum", "aggregator.f": 2})
        'aggregator: Krum instead of FedAvg; aggregator.f: 2'
        >>> one = {"model.terms.0": "Proximal", "model.terms.0.mu": 0.1}
        >>> describe_differences({"model.terms": []}, one)
        'terms.0: Proximal; terms.0.mu: 0.1'
    """
    changed = differences([dict(base), dict(other)])
    short = Counter(_last(name) for name in changed)
    parts = []
    for name, (was, now) in changed.items():
        if name not in other and _has_entries(name, was, changed):
            continue
        parent, _, last = name.rpartition(".")
        label = name if short[_last(name)] > 1 else _last(name)
        if parent in changed:  # an option of a class that differs
            label = f"{_last(parent)}.{last}"
        was, now = (_short(value) for value in (was, now))
        if name not in other:
            parts.append(f"no {label} (was {was})")
        else:
            parts.append(f"{label}: {now}" + (f" instead of {was}" if name in base else ""))
    return "; ".join(parts)


def _has_entries(name: str, value: Any, names: Collection[str]) -> bool:
    """Return whether an option is an empty list, or none, that has entries in another config."""
    return value in (None, [], {}) and any(each.startswith(f"{name}.") for each in names)


def _last(name: str) -> str:
    """Return the last part of a dotted name, with the name of the list if it is a position.

    Example:
        >>> _last("model.terms.0"), _last("federation.policy.lr")
        ('terms.0', 'lr')
    """
    parts = name.split(".")
    return ".".join(parts[-2:] if parts[-1].isdecimal() else parts[-1:])


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _names(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Name configs by their differences from the majority: classes first, options if needed.

    The name is empty if it would be too long.
    """
    found = differences(configs)
    found = {
        name: values
        for name, values in found.items()
        if not all(_has_entries(name, value, found) for value in values)
    }
    top = {name: found[name] for name in top_level(found)}
    labels: list[str] = []
    for kept in (top, found):
        labels = [_name(kept, at) for at in range(len(configs))]
        if len(set(labels)) == len(labels):
            break
    return [label if len(label) <= 60 else "" for label in labels]


def _name(found: dict[str, list[Any]], at: int) -> str:
    short = Counter(map(_last, found))
    parts = []
    for name, values in found.items():
        value, count = Counter(map(repr, values)).most_common(1)[0]
        if (repr(values[at]) == value and count > len(values) / 2) or values[at] is None:
            continue
        last = _last(name)
        parts.append(f"{name if short[last] > 1 else last}={values[at]}")
    return ", ".join(parts) or "base"
