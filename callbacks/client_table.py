"""Table and figure of the scores of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
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
    """Write the rows of clients as a table and as a figure.

    Args:
        path: Path of the files, without ``.csv`` and ``.png``.
        rows: One row per client. The figure leaves out unseen clients.
        names: Names of all clients for the table; None if they have none.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    named: Sequence[Mapping[str, float | str]] = rows
    if names is not None:
        columns.insert(1, "name")
        named = [{**row, "name": names[int(row["client"])]} for row in rows]
    cells = ([row.get(name, "") for name in columns] for row in named)
    write_atomically(path.with_name(f"{path.name}.csv"), csv_text(columns, cells))
    seen = [row for row in rows if "unseen" not in row]
    picture = partial(client_figure(seen).savefig, format="png", dpi=120)
    write_atomically(path.with_name(f"{path.name}.png"), picture)


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


def client_figure(rows: Sequence[Mapping[str, float]]) -> Figure:
    """Plot the sorted scores of clients, one line per kind.

    Example:
        >>> figure = client_figure([{"server": 0.5, "personal": 0.9}, {"server": 0.6}])
        >>> len(figure.axes[0].lines)
        2
    """
    scores = {kind: sorted(row[kind] for row in rows if kind in row) for kind in KINDS}
    lines = {kind: list(enumerate(values, 1)) for kind, values in scores.items() if values}
    return line_figure({"score on local test samples": lines}, "clients, worst first")


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
