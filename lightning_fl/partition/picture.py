"""Plot a split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fl.extras import imported
from lightning_fl.partition.base import classes_of
from lightning_fl.partition.summary import label_drift

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(parts: Sequence[Tensor], labels: Tensor) -> Figure:
    """Plot the samples per client and class, below the total and the drift of each client.

    Colors of the heat map are proportional to the square root of the counts. For the drift see
    :func:`label_drift`.

    Args:
        parts: Sample indices of each client.
        labels: Integer class of each sample, ``[N]``.

    Returns:
        A figure without a window; ``figure.savefig("split.png")`` writes it.

    Raises:
        FederationError: If matplotlib is not installed.

    Example:
        >>> from lightning_fl.partition import ByLabel
        >>> labels = torch.arange(10).repeat(6)
        >>> parts = ByLabel()(labels, 10, torch.Generator())
        >>> plot(parts, labels).axes[0].get_title(loc="left")
        '10 clients, 60 samples'
    """
    imported("matplotlib", "partition.plot", "report")
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    classes, codes, _ = classes_of(labels)
    names = [str(label) for label in classes.tolist()]
    num_clients, num_classes = len(parts), len(classes)
    sizes = [len(part) for part in parts]
    owner = torch.arange(num_clients).repeat_interleave(torch.tensor(sizes))
    cells = codes[torch.cat(list(parts))] * num_clients + owner
    table = cells.bincount(minlength=num_classes * num_clients).view(num_classes, -1)

    cell, height = min(0.34, 12 / num_clients), min(0.34 * num_classes, 6.8)
    figure = Figure((max(3.5, 1.5 + cell * num_clients), 3.0 + height), layout="constrained")
    top, drift, grid = figure.subplots(3, 1, sharex=True, height_ratios=[1, 0.6, height])
    top.set_title(f"{num_clients} clients, {len(owner)} samples", loc="left", fontsize="medium")
    top.bar(range(num_clients), sizes, color="#3b75af")
    top.set_ylabel("samples")
    drift.bar(range(num_clients), label_drift(table.T).tolist(), color="#b35c44")
    drift.set(ylabel="drift", ylim=(0, 1))
    shade = PowerNorm(0.5, vmin=0)
    image = grid.imshow(table.numpy(), "Blues", shade, aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=grid, label="samples", pad=0.01, aspect=30)
    grid.set(xlabel="client", ylabel="class")
    step = 1 + num_classes // 32
    grid.set_yticks(range(0, num_classes, step), names[::step])
    ticks = MaxNLocator(min(num_clients + 1, 24), steps=[1, 2, 5, 10], integer=True)
    grid.xaxis.set_major_locator(ticks)
    for axes in (top, drift, grid):
        axes.spines[["top", "right"]].set_visible(False)
    return figure
