"""Figures of a report, drawn by matplotlib as SVG."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, TypeAlias

import matplotlib as mpl
import numpy as np
from markupsafe import escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_fl.functional.intervals import t_interval

#: Okabe and Ito (2008), safe for color-blind readers. The page has a second set for dark ground.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
#: Dash patterns, for more lines than colors.
DASHES = ("-", "--", ":")
#: Maximum number of lines per panel, of panels per figure, and of points per figure.
MOST_LINES, MOST_PANELS, MOST_POINTS = 12, 12, 6000
#: Number of seeds from which a line has a band.
FEW_SEEDS = 5
STYLE: Any = mpl.rc_params_from_file(
    Path(__file__).with_name("figures.mplstyle"), use_default_template=False
)
#: Colors of text, axes and grid lines. In the page, they follow its color scheme.
INK, SOFT, GRID = (STYLE[name] for name in ("text.color", "axes.edgecolor", "grid.color"))
#: Width and height of a panel in inches.
PANEL = (4.4, 3.2)
#: Names of the colors in the style sheet of the page.
VARIABLES = {color: f"var(--c{at})" for at, color in enumerate(COLORS)}
VARIABLES |= {INK: "var(--ink)", SOFT: "var(--soft)", GRID: "var(--grid)"}
_NUMBER = re.compile(r"-?\d+\.\d+")


@dataclass(frozen=True)
class Line:
    """Line of a panel, with a band or with the lines of single seeds if it is a mean.

    Args:
        label: Label in the legend.
        x: Positions on the horizontal axis.
        y: Values; NaN is drawn as a gap.
        band: Half the height of the band at each position; NaN draws none.
        names: Names of the points, if they are not joined.
        seeds: Values of each seed.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    band: Sequence[float] = ()
    names: Sequence[str] = ()
    seeds: Sequence[Sequence[float]] = ()

    def thinned(self, most: int) -> Line:
        """Return the line with fewer points.

        The first and the last point remain, and the lowest and the highest of each stretch.

        Args:
            most: Maximum number of points.

        Example:
            >>> Line("a", range(8), [0, 5, 1, 2, 9, 3, 4, 6]).thinned(6).y
            [0, 5, 9, 3, 6]
        """
        if len(self.x) <= most:
            return self
        kept = {0, len(self.x) - 1}
        for stretch in np.array_split(np.arange(len(self.x)), max(1, most // 2 - 1)):
            finite = [int(i) for i in stretch if math.isfinite(self.y[i])] or [int(stretch[0])]
            kept |= {min(finite, key=self.y.__getitem__), max(finite, key=self.y.__getitem__)}

        def some(values: Sequence[Any]) -> list[Any]:
            return [values[i] for i in sorted(kept)] if values else []

        x, y, band, names = map(some, (self.x, self.y, self.band, self.names))
        return Line(self.label, x, y, band, names, [some(seed) for seed in self.seeds])


def mean_line(label: str, points: Sequence[tuple[float, Sequence[float]]]) -> Line:
    """Return the line of means over seeds.

    From five seeds, it has a band, the 95 % confidence interval of the mean. That of fewer seeds
    would be wider than the figure, so the line has their lines.

    Args:
        label: Label in the legend.
        points: Position on the horizontal axis, and the value of each seed.

    Example:
        >>> mean_line("a", [(1, [0.25, 0.75]), (2, [0.5, 1.0])]).seeds
        [(0.25, 0.5), (0.75, 1.0)]
    """
    x, values = zip(*points, strict=True)
    means, halves = zip(*map(t_interval, values), strict=True)
    if 1 < len(values[0]) < FEW_SEEDS:
        return Line(label, x, means, seeds=list(zip(*values, strict=True)))
    return Line(label, x, means, halves if len(values[0]) > 1 else ())


def needs_log(label: str, values: Sequence[float]) -> bool:
    """Return whether values need a logarithmic axis.

    They are a loss over more than three decades, or a spike would hide all other values.

    Example:
        >>> needs_log("loss", [0.002, 1.0, 2.5]), needs_log("accuracy", [0.0002, 0.9, 0.9])
        (True, False)
    """
    if not values or min(values) <= 0:
        return False
    decades = 1000 * min(values) if "loss" in label else math.inf
    return max(values) > min(50 * median(values), decades)


@dataclass(frozen=True)
class Lines:
    """Panel of a figure with lines.

    Args:
        ylabel: Label of the vertical axis.
        lines: The lines; those after :data:`MOST_LINES` are not drawn.
        xlabel: Label of the horizontal axis.
        order: Labels with fixed colors in all panels, in the order of the colors.
        shade: Part of the horizontal axis with a gray ground.
        joined: Whether points are joined by lines.
    """

    ylabel: str
    lines: Sequence[Line]
    xlabel: str = "round"
    order: Sequence[str] = ()
    shade: tuple[float, float] | None = None
    joined: bool = True
    #: Whether colors are those of a raster image, the same on light and on dark ground.
    is_raster: ClassVar[bool] = False

    def _drawn(self) -> list[tuple[int, Line]]:
        """Return lines with the places of their colors."""
        return [
            (self.order.index(line.label) if line.label in self.order else at, line)
            for at, line in enumerate(self.lines[:MOST_LINES])
        ]

    def draw(self, axes: Axes) -> None:
        """Draw the lines, and their bands or seeds."""
        drawn = [y for line in self.lines for y in line.y if math.isfinite(y)]
        if is_log := needs_log(self.ylabel, drawn):
            axes.set_yscale("log")
        for at, line in self._drawn():
            color, dash = COLORS[at % len(COLORS)], DASHES[at // len(COLORS) % len(DASHES)]
            for seed in line.seeds:
                axes.plot(line.x, seed, color=color, linewidth=0.8, alpha=0.45)
            if line.band:
                y, half = np.array(line.y, float), np.array(line.band, float)
                axes.fill_between(line.x, y - half, y + half, color=color, alpha=0.18, linewidth=0)
            marker = "." if len(line.x) < 40 or not self.joined else ""
            dash = dash if self.joined else ""
            axes.plot(line.x, line.y, marker=marker, color=color, linestyle=dash)
        if drawn and all(0 <= y <= 1 for y in drawn) and not is_log:
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, -0.02), min(high, 1.02))
        if self.shade:
            axes.axvspan(*self.shade, color=COLORS[-1], alpha=0.15, linewidth=0)
        is_whole = all(x == int(x) for line in self.lines for x in line.x if math.isfinite(x))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=is_whole))
        if not is_log and all(y == int(y) for y in drawn):
            axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))

    def values(self) -> dict[str, Any]:
        """Return what the script of the page shows under the pointer."""
        lines = []
        for at, line in self._drawn():
            known = {"n": line.label, "c": at % len(COLORS), "x": _json(line.x), "y": _json(line.y)}
            more = {"b": _json(line.band), "s": [*map(_json, line.seeds)], "names": [*line.names]}
            lines.append(known | {name: value for name, value in more.items() if value})
        return {"lines": lines}

    def legend(self) -> list[tuple[str, int]]:
        """Return the labels, if they differ from that of the axis."""
        drawn = [(line.label, at) for at, line in self._drawn()]
        return [] if len(drawn) == 1 and drawn[0][0] == self.ylabel else drawn


@dataclass(frozen=True)
class Grid:
    """Panel of a figure with colored cells.

    Args:
        ylabel: Label of the vertical axis.
        xlabel: Label of the horizontal axis.
        colors: Red, green, blue and opacity of each cell, ``[rows, columns, 4]``, from 0 to 1.
        rows: Names of the rows.
        columns: Names of the columns.
        layers: Values of each cell by name, ``[rows, columns]``.
        names: Words for the values of a layer: entry ``i`` is the word for ``i``.
        kinds: Labels of the legend with the places of their colors.
        first: Number of the first column.
        widths: Number of positions that a cell covers, vertically and horizontally.
        ticks: Labels of the rows on the axis; empty labels them by number.
        order: See :class:`Lines`.
    """

    ylabel: str
    xlabel: str
    colors: np.ndarray[Any, Any]
    rows: Sequence[str]
    columns: Sequence[str]
    layers: Mapping[str, np.ndarray[Any, Any]]
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    kinds: Sequence[tuple[str, int]] = ()
    first: int = 0
    widths: tuple[float, float] = (1, 1)
    ticks: Sequence[str] = ()
    order: Sequence[str] = ()
    is_raster: ClassVar[bool] = True

    def draw(self, axes: Axes) -> None:
        """Draw the cells."""
        (height, width), first = self.colors.shape[:2], self.first - 0.5
        extent = (first, first + width * self.widths[1], height * self.widths[0] - 0.5, -0.5)
        axes.imshow(self.colors, aspect="auto", interpolation="none", extent=extent)
        axes.grid(visible=False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, integer=True))
        if self.ticks:
            step = 1 + len(self.ticks) // 16
            labels = [plain(name[:12]) for name in self.ticks[::step]]
            axes.set_yticks(range(0, len(self.ticks), step), labels)

    def values(self) -> dict[str, Any]:
        """Return the values of the cells, with the names of rows and columns."""
        layers: list[dict[str, Any]] = []
        for name, cells in self.layers.items():
            words = {"names": list(self.names[name])} if name in self.names else {}
            layers.append({"n": name, "v": list(map(_json, cells.tolist())), **words})
        return {"rows": list(self.rows), "columns": list(self.columns), "layers": layers}

    def legend(self) -> list[tuple[str, int]]:
        """Return the labels of the colors."""
        return list(self.kinds)


#: Panel of a figure: axes with labels, and the values that the page shows under the pointer.
Panel: TypeAlias = Lines | Grid


def plain(text: str) -> str:
    r"""Shorten a text, without characters that XML forbids or that matplotlib reads as formulas.

    Example:
        >>> print(plain("5 $ a\tb"))
        5 \$ a?b
    """
    text = text if len(text) <= 48 else text[:47] + "…"
    return "".join(c if c.isprintable() else "?" for c in text).replace("$", r"\$")


def _json(values: Sequence[float]) -> list[float | int | None]:
    """Return values with six significant digits, or all digits before the decimal point.

    Values that are not finite are None.
    """
    return [_short(value) if math.isfinite(value) else None for value in values]


def _short(value: float) -> float | int:
    is_whole = value == int(value) or abs(value) >= 1e5
    return round(value) if is_whole and abs(value) < 1e15 else float(f"{value:.6g}")


def svg(panel: Panel, name: str = "") -> tuple[str, dict[str, Any]]:
    """Return a panel as an SVG element, and what the script needs to show values under a pointer.

    The element has no colors of its own for text, axes and lines, but those of the page.

    Args:
        panel: The panel.
        name: Name of the panel, different for each panel of a page, from which ids are derived.

    Example:
        >>> element, chart = svg(Lines("loss", [Line("loss", [1, 2], [0.5, 0.25])]))
        >>> element.startswith("<svg "), chart["lines"][0]["y"]
        (True, [0.5, 0.25])
    """
    file = io.BytesIO()
    salt = {"svg.hashsalt": f"panel {name}"}  # ids of elements depend on it
    with mpl.rc_context(STYLE | salt), warnings.catch_warnings():
        # Names may have characters that the font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure = Figure(figsize=PANEL)
        axes = figure.subplots()
        panel.draw(axes)
        axes.set(xlabel=plain(panel.xlabel), ylabel=plain(panel.ylabel))
        figure.draw_without_rendering()  # places the axes
        figure.set_layout_engine("none")
        left, bottom, right, top = map(float, axes.get_position().extents)
        figure.savefig(file, format="svg", transparent=True)
    chart = {
        "box": _json([left, 1 - top, right, 1 - bottom]),
        "xlim": _json(axes.get_xlim()),
        "ylim": _json(axes.get_ylim()),
        "log": axes.get_yscale() == "log",
        "xlabel": panel.xlabel,
    }
    element = _inline(file.getvalue().decode(), f"{panel.ylabel} by {panel.xlabel}")
    return element, chart | panel.values()


def _inline(content: str, label: str) -> str:
    """Return an SVG file of matplotlib as an element of an HTML page."""
    # Metadata has the date, and a style sheet would hold for the whole page.
    content = re.sub(r"<(metadata|style)\b.*?</\1>", "", content, flags=re.DOTALL)
    used = set(re.findall(r"#([\w-]+)", content))
    content = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", content)
    content = re.sub(r' (d|x|y)="[^"]*"', lambda m: _NUMBER.sub(_tenths, m[0]), content)
    content = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", content)
    for old, new in {**VARIABLES, "xlink:href": "href"}.items():
        content = content.replace(old, new)
    width, height = (f"{72 * inches:g}" for inches in PANEL)
    body = content.partition("<svg")[2].partition(">")[2]
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{body}'


def _tenths(match: re.Match[str]) -> str:
    """Return a coordinate in tenths of a point; smaller differences are invisible."""
    return f"{float(match[0]):.1f}".removesuffix(".0")
