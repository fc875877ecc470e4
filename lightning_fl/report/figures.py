"""Figures of a report, in a common style with a color-blind safe palette."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

#: Okabe and Ito (2008).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
#: Dash patterns, for more lines than colors.
DASHES = ("-", "--", ":", "-.")
#: Maximum number of lines per panel, and of panels per figure.
MOST_LINES, MOST_PANELS = 12, 12


@dataclass(frozen=True)
class Line:
    """Line of a panel, with a band if it is a mean.

    Args:
        label: Label in the legend.
        x: Positions on the horizontal axis.
        y: Values; NaN is drawn as a gap.
        band: Half the height of the band at each position.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    band: Sequence[float] = ()


def plain(text: str) -> str:
    """Shorten a text, and escape dollar signs, which matplotlib would read as formulas."""
    return (text if len(text) <= 48 else text[:47] + "…").replace("$", r"\$")


def png(figure: Figure) -> bytes:
    """Return a figure as a PNG file; the same figure gives the same bytes."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        # Names may have characters that the font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(file, dpi=110, metadata={"Software": None})
    return file.getvalue()


def _canvas(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(count, 3) if count != 4 else 2
    rows = -(-count // columns)
    width = {1: 6.4, 2: 9.6}.get(columns, 11.5)
    figure = Figure(figsize=(width, 3.3 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    for each in axes[:count]:
        each.grid(alpha=0.25)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes[:count]


def lines(
    panels: Mapping[str, Sequence[Line]],
    xlabel: Mapping[str, str] | str = "round",
    order: Sequence[str] = (),
) -> Figure:
    """Draw panels of lines.

    Args:
        panels: Lines of each panel, by the label of its vertical axis.
        xlabel: Label of the horizontal axis, one for all panels or one per panel.
        order: Labels with fixed colors in all panels, in the order of the colors.

    Example:
        >>> figure = lines({"accuracy": [Line("val_acc", [1, 2], [0.5, 0.75])]})
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['accuracy']
    """
    figure, every = _canvas(len(panels))
    legend: dict[str, Line2D] = {}
    for axes, (label, drawn) in zip(every, panels.items(), strict=True):
        for at, line in enumerate(drawn[:MOST_LINES]):
            if line.label in order:
                at = order.index(line.label)
            color, dash = COLORS[at % len(COLORS)], DASHES[at // len(COLORS) % len(DASHES)]
            marker = "." if len(line.x) < 40 else ""
            name = plain(line.label)
            (shown,) = axes.plot(line.x, line.y, dash, color=color, marker=marker, label=name)
            legend.setdefault(name, shown)
            if any(line.band):
                low = [y - b for y, b in zip(line.y, line.band, strict=True)]
                high = [y + b for y, b in zip(line.y, line.band, strict=True)]
                axes.fill_between(line.x, low, high, color=color, alpha=0.18, linewidth=0)
        across = xlabel if isinstance(xlabel, str) else xlabel[label]
        axes.set(xlabel=plain(across), ylabel=plain(label))
        values = [y for line in drawn for y in line.y if math.isfinite(y)]
        if values and min(values) > 0 and max(values) > 50 * median(values):
            axes.set_yscale("log")  # otherwise a spike would hide all other values
        if across == "round":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if not order and (len(drawn) > 1 or drawn[0].label != label):
            axes.legend(frameon=False, fontsize="small")
    if legend and order:  # one legend for all panels
        columns = max(1, min(len(legend), 100 // (1 + max(map(len, legend)))))
        figure.legend(
            handles=list(legend.values()), loc="outside upper left", ncols=columns, frameon=False
        )
    return figure


def stacked(
    panels: Mapping[str, Mapping[str, Mapping[int, int]]], xlabels: Sequence[str]
) -> Figure:
    """Draw panels of stacked bars.

    Args:
        panels: Counts by panel, kind and x position.
        xlabels: Label of the horizontal axis of each panel.

    Example:
        >>> figure = stacked({"updates": {"lost": {1: 2}, "late": {1: 1}}}, ["round"])
        >>> [int(patch.get_y()) for patch in figure.axes[0].patches]
        [0, 2]
    """
    figure, every = _canvas(len(panels))
    for axes, (label, kinds), xlabel in zip(every, panels.items(), xlabels, strict=True):
        below: dict[int, int] = {}
        for at, (kind, counts) in enumerate(kinds.items()):
            axes.bar(
                list(counts),
                list(counts.values()),
                bottom=[below.get(x, 0) for x in counts],
                width=0.9,
                color=COLORS[at % len(COLORS)],
                label=plain(kind),
            )
            below |= {x: below.get(x, 0) + n for x, n in counts.items()}
        axes.set(xlabel=xlabel, ylabel=plain(label))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        if len(kinds) > 1:  # above the panel, because bars may fill its height
            axes.legend(
                frameon=False,
                fontsize="small",
                loc="lower left",
                bbox_to_anchor=(0, 1),
                ncols=len(kinds),
            )
    return figure


def spread(
    scores: Mapping[str, Sequence[float]], sizes: Mapping[str, Sequence[float]], where: str
) -> Figure:
    """Draw scores of clients in ascending order, and over the number of training samples.

    Args:
        scores: Scores of clients by kind.
        sizes: Number of training samples of the same clients by kind; empty draws one panel.
        where: Name of the samples on which the scores were measured.

    Example:
        >>> figure = spread({"server": [0.5, 0.25]}, {"server": [10, 20]}, "test samples")
        >>> figure.axes[0].lines[0].get_ydata().tolist()
        [0.25, 0.5]
    """
    figure, (left, *right) = _canvas(2 if sizes else 1)
    for at, (kind, values) in enumerate(scores.items()):
        color, marker = COLORS[at % len(COLORS)], "." if len(values) < 200 else ""
        ranked = sorted(values)
        left.plot(range(1, len(values) + 1), ranked, color=color, marker=marker, label=plain(kind))
        for axes in right:
            axes.scatter(sizes[kind], values, s=14, color=color, alpha=0.7, linewidths=0)
    most = max(map(len, scores.values()))
    left.axvspan(0.5, max(1, most // 10) + 0.5, color="0.5", alpha=0.15, linewidth=0)
    left.set(xlabel="clients, worst first (gray: worst tenth)", ylabel=f"accuracy on {where}")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (left, *right):
        low, high = axes.get_ylim()
        if all(0 <= value <= 1 for values in scores.values() for value in values):
            axes.set_ylim(max(low, -0.02), min(high, 1.02))
    for axes in right:
        axes.set(xlabel="training samples of the client", ylabel=f"accuracy on {where}")
    if len(scores) > 1:
        left.legend(frameon=False, fontsize="small")
    return figure
