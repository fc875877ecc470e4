"""Table of the scores of clients, and figures of lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_fl.files import csv_text, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Evaluated models of a client, in the order of logged metrics.
KINDS = ("global", "server", "personal", "kept", "local")
#: Points of a line.
Points: TypeAlias = Sequence[tuple[float, float]]


@rank_zero_only
def write_table(
    path: Path, rows: Sequence[Mapping[str, float]], names: Sequence[str] | None = None
) -> None:
    """Write the rows of clients as a table.

    Args:
        path: Path of the file.
        rows: One row per client.
        names: Names of all clients; None if they have none.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    named: Sequence[Mapping[str, float | str]] = rows
    if names is not None:
        columns.insert(1, "name")
        named = [{**row, "name": names[int(row["client"])]} for row in rows]
    cells = ([row.get(name, "") for name in columns] for row in named)
    write_atomically(path, csv_text(columns, cells))


def summary(rows: Sequence[Mapping[str, float]], kind: str) -> dict[str, float]:
    """Return the mean, weighted mean, standard deviation, variance and worst-decile mean.

    For ``personal``, ``hurt`` is the share of clients with a lower score than that of ``server``.

    Example:
        >>> rows = [{"test_samples": 1, "server": 0.5}, {"test_samples": 3, "server": 1.0}]
        >>> summary(rows, "server")
        {'mean': 0.75, 'weighted': 0.875, 'std': 0.25, 'variance': 0.0625, 'worst': 0.5}
    """
    scores = [(row[kind], row["test_samples"]) for row in rows if kind in row]
    if not scores:
        return {}
    values, sizes = torch.tensor(scores, dtype=torch.float64).unbind(1)
    worst = values.sort().values[: max(1, len(values) // 10)]
    is_hurt = [row[kind] < row["server"] for row in rows if kind == "personal" and kind in row]
    hurt = {"hurt": sum(is_hurt) / len(is_hurt)} if is_hurt else {}
    return {
        "mean": float(values.mean()),
        "weighted": float((values * sizes).sum() / sizes.sum()),
        "std": float(values.std(correction=0)),
        "variance": float(values.var(correction=0)),
        "worst": float(worst.mean()),
        **hurt,
    }


def line_figure(panels: Mapping[str, Mapping[str, Points]], xlabel: str) -> Figure:
    """Plot lines by label, in panels by the label of their vertical axis.

    Example:
        >>> line_figure({"loss": {"train": [(1, 0.5), (2, 0.25)]}}, "round").axes[0].get_xlabel()
        'round'
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(panels), 3.6), layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (ylabel, lines) in zip(every, panels.items(), strict=True):
        for label, points in lines.items():
            marker = "." if len(points) < 40 else ""
            axes.plot(*zip(*points, strict=True), marker=marker, label=label)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
