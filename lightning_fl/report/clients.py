"""Sections on the clients of a run: partition, participation and accuracies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from lightning_fl.callbacks.client_table import summary
from lightning_fl.partition import label_drift
from lightning_fl.report.figures import COLORS, Grid, Line, Lines, Panel, needs_log
from lightning_fl.report.page import Curve, Picture, Section, Table
from lightning_fl.report.run import Outcomes, Row, Run
from lightning_fl.report.summary import OUTCOMES, client_label, client_metric, client_scores, drops
from lightning_fl.report.words import counted, listed, number, span

#: Values by client, by name of the column of the table of clients.
Columns = dict[str, dict[int, float]]
#: Rounds and values of each client, ``[n, 2]``.
Curves = dict[int, np.ndarray[Any, Any]]
#: Descriptions of the kinds of :class:`PersonalizedEvaluation`.
MEANINGS = {
    "global": "the global model without local tensors of the client",
    "server": "the global model with the local tensors of the client",
    "personal": "the global model after local fine-tuning",
    "kept": "the personal model of the method",
    "local": "a model trained by the client alone",
}
#: Maximum number of rows and columns of a picture of cells. More are drawn in groups.
MOST_CELLS = (100, 200)
#: Maximum number of classes of a picture, of points of a client each, and of rows of a table.
MOST_CLASSES, MOST_POINTS, MOST_ROWS = 60, 1000, 400
#: Maximum number of points of a small curve.
MOST_OF_CURVE = 40


def partition(run: Run) -> Section | None:
    """Describe the partition of the data; None if it is unknown."""
    if run.partition is None:
        return None
    sizes = run.sizes
    counts = run.partition.class_counts[: len(sizes)]
    text = f"Seed {run.partition.seed}; samples per client: {span(sizes)}"
    if any(counts):
        text += f"; classes per client: {span([len(row) for row in counts if row])}"
    panels: list[Panel] = [_per_client("samples", sizes, run)]
    caption = "Number of samples of each client"
    classes = sorted({label for row in counts for label in row})
    if 0 < len(classes) <= MOST_CLASSES:
        table = np.array([[row.get(label, 0) for label in classes] for row in counts])
        drift = label_drift(torch.from_numpy(table)).tolist()
        panels += [_per_client("drift of the classes", drift, run), _classes(table, classes, run)]
        caption += (
            "; distance of its class proportions from those of all clients (total variation);"
            " samples by client and class (opacity: square root of the share of the largest cell)"
        )
    return Section("Partition", [text + "."], [Picture("partition", caption + ".", panels)])


def _per_client(label: str, values: Sequence[float], run: Run) -> Panel:
    """Return a panel of the values of clients."""
    line = _ascending(label, zip(values, range(len(values)), strict=True), run)
    return Lines(label, [line], "clients in ascending order", joined=False)


def _ascending(label: str, values: Iterable[tuple[float, int]], run: Run) -> Line:
    """Return a line of the values of clients in ascending order."""
    ranked = sorted(each for each in values if math.isfinite(each[0]))
    return _dots(label, [(at, *each) for at, each in enumerate(ranked, 1)], run)


def _dots(label: str, points: Sequence[tuple[float, float, int]], run: Run) -> Line:
    """Return a line of points, each with its client."""
    x, y, clients = zip(*points, strict=True) if points else ((), (), ())
    return Line(label, x, y, (), [client_label(c, run) for c in clients]).thinned(MOST_POINTS)


def _classes(table: np.ndarray[Any, Any], classes: Sequence[int], run: Run) -> Panel:
    """Return a panel of the number of samples per class (rows) and client (columns)."""
    width = -(-len(table) // MOST_CELLS[1])
    starts = range(0, len(table), width)
    cells = np.add.reduceat(table, list(starts), axis=0).T
    colors = np.empty((*cells.shape, 4))
    colors[..., :3], colors[..., 3] = _rgb(0), np.sqrt(cells / max(1, cells.max()))
    return Grid(
        "class",
        "client",
        colors,
        [f"class {label}" for label in classes],
        [_client_label(at, width, len(table), run) for at in starts],
        {"samples": cells},
        widths=(1, width),
        ticks=list(map(str, classes)),
    )


def _rgb(color: int) -> list[float]:
    return [int(COLORS[color][at : at + 2], 16) / 255 for at in (1, 3, 5)]


def participation(run: Run) -> Section:
    """Show which clients were sampled, and which updates were dropped."""
    panels: list[Panel] = []
    captions, text, by_cause = [], "No update was dropped.", drops(run)
    if by_cause:
        causes = [f"{cause} {number(sum(n.values()))}" for cause, n in by_cause.items()]
        text = f"Dropped updates by cause: {', '.join(causes)}."
        lines = [Line(c, [*n], [*n.values()]).thinned(MOST_POINTS) for c, n in by_cause.items()]
        panels.append(Lines("updates dropped", lines, order=OUTCOMES))
        captions.append("dropped updates per round")
    if run.outcomes.codes.size:
        text += f" Rounds per client: {span((run.outcomes.codes > 0).sum(0).tolist())}."
        panels.append(panel := _who_when(run.outcomes, run))
        captions.append("what happened to each client in each round")
        if max(panel.widths) > 1:
            captions.append("cells of several clients and rounds (opacity: share sampled)")
    caption = "; ".join(captions).capitalize() + "."
    pictures = [Picture("participation", caption, panels)] if panels else []
    return Section("Participation and faults", [text], pictures)


def _who_when(outcomes: Outcomes, run: Run) -> Grid:
    """Return a panel of what happened to each client (rows) in each round (columns)."""
    codes = outcomes.codes.T
    clients, rounds = codes.shape
    height, width = -(-clients // MOST_CELLS[0]), -(-rounds // MOST_CELLS[1])
    down, across = range(0, clients, height), range(0, rounds, width)
    sizes = np.outer(np.diff([*down, clients]), np.diff([*across, rounds]))
    shares = {}
    for code, name in outcomes.occurring():
        by_row = np.add.reduceat(codes == code, list(down), axis=0, dtype=np.int64)
        shares[name] = np.add.reduceat(by_row, list(across), axis=1) / sizes
    # Cells of several clients have the mean color of those that were sampled.
    sampled = sum(shares.values(), np.zeros(sizes.shape))
    colors = np.zeros((*sampled.shape, 4))
    for name, share in shares.items():
        colors[..., :3] += share[..., None] * np.array(_rgb(_color(name)))
    colors[..., :3] /= np.maximum(sampled, 1e-12)[..., None]
    colors[..., 3] = sampled / max(1e-12, sampled.max())
    layers, words = {"": codes}, {"": outcomes.names}
    if (height, width) != (1, 1):
        layers, words = {"% sampled": np.round(100 * sampled, 1)}, {}
        layers |= {f"% {name}": np.round(100 * s, 1) for name, s in list(shares.items())[:6]}
    return Grid(
        "client",
        "round",
        np.clip(colors, 0, 1),
        [_client_label(at, height, clients, run) for at in down],
        [_span("round", at + 1, width, rounds) for at in across],
        layers,
        words,
        [(name, _color(name)) for name in shares],
        first=1,
        widths=(height, width),
        order=OUTCOMES,
    )


def _client_label(first: int, width: int, count: int, run: Run) -> str:
    return _span("client", first, width, count - 1) if width > 1 else client_label(first, run)


def _span(noun: str, first: int, width: int, last: int) -> str:
    """Return the name of the clients or rounds of a cell."""
    last = min(first + width - 1, last)
    return f"{noun}s {first} to {last}" if last > first else f"{noun} {first}"


def _color(outcome: str) -> int:
    """Return the place of the color of an outcome; that of other causes is the last."""
    return OUTCOMES.index(outcome) if outcome in OUTCOMES else len(OUTCOMES) - 1


def clients(run: Run) -> Section:
    """Show the accuracy of the models for each client, and what happened to it."""
    samples, scores = client_scores(run)
    curves = {name: run.outcomes.curves(name) for name in ("loss", "score")}
    text = []
    if samples == "own training samples":
        why = run.environment.get("no train_acc") or "unknown reason"
        measured = "is optimistic on training samples" if scores else f"was not measured ({why})"
        text.append(
            f"The accuracy {measured}. For local test samples, add"
            " --trainer.callbacks+=PersonalizedEvaluation and --data.init_args.local_test_size=0.2."
        )
    if stuck := _stuck(curves["loss"]):
        text.append(
            f"The loss of {counted(len(stuck), 'client')} did not fall (mean of the last quarter of"
            f" their rounds against the first): "
            f"{listed([client_label(client, run) for client in stuck], 10)}."
            ' See "When a client does not learn" in the documentation.'
        )
    columns = _columns(run, scores, curves)
    shown = _ranked(columns, next(iter(scores), ""))
    half, caption = MOST_ROWS // 2, "All clients, worst first."
    if len(shown) > MOST_ROWS:
        caption = (
            f"The {half} worst and the {half} best of {number(len(shown))} clients;"
            " participation.csv and clients.csv have all."
        )
        shown = shown[:half] + shown[-half:]
    pictures = [_spread_picture(samples, scores, run)] if scores else []
    tables = [_spread_table(scores)] if scores else []
    tables += [_table(run, columns, curves, shown, caption)] if shown else []
    return Section("Clients", text, pictures, tables)


def _stuck(losses: Curves) -> list[int]:
    """Return the clients whose loss did not fall, those with the largest increase first."""
    rises = {}
    for client, curve in losses.items():
        few = -(-len(curve) // 4)
        first, last = curve[:few, 1].mean(), curve[-few:, 1].mean()
        rises[client] = math.inf if last == math.inf else last - first
    stuck = [c for c, rise in rises.items() if rise >= 0 and len(losses[c]) > 1]
    return sorted(stuck, key=lambda client: -rises[client])


def _spread_picture(samples: str, scores: Mapping[str, Sequence[Row]], run: Run) -> Picture:
    ranked, by_size = [], []
    for kind, rows in scores.items():
        clients = [(row.get("train_samples", 0), row[kind], int(row["client"])) for row in rows]
        ranked.append(_ascending(kind, [each[1:] for each in clients], run))
        by_size.append(_dots(kind, sorted(clients), run))
    shade = (0.5, max(1, max(map(len, scores.values())) // 10) + 0.5)
    ylabel, caption = f"{client_metric(run)} on {samples}", "worst first (gray: worst tenth)"
    panels: list[Panel] = [Lines(ylabel, ranked, f"clients, {caption}", shade=shade)]
    caption = f"The {client_metric(run)} of the models on each client's {samples}"
    if len({x for line in by_size for x in line.x}) > 1:
        panels.append(Lines(ylabel, by_size, "training samples of the client", joined=False))
        caption += ", ascending and by number of training samples"
    caption += "".join(f"; {kind}: {MEANINGS[kind]}" for kind in scores)
    return Picture("clients", f"{caption}.", panels)


def _spread_table(scores: Mapping[str, Sequence[Row]]) -> Table:
    rows = []
    for kind, clients in scores.items():
        found, values = summary(clients, kind), [row[kind] for row in clients]
        shown = [found["mean"], found["weighted"], found["std"], median(values), min(values)]
        rows.append([kind, *map(number, [*shown, found["worst"]])])
    head = ["", "mean", "weighted mean", "std", "median", "worst", "worst tenth"]
    return Table(head, rows)


def _columns(
    run: Run, scores: Mapping[str, Sequence[Row]], curves: Mapping[str, Curves]
) -> Columns:
    """Return the columns of the table of clients."""
    train = {int(row["client"]): row["train_samples"] for row in run.participation}
    columns: Columns = {"training samples": train or dict(enumerate(run.sizes))}
    codes = run.outcomes.codes
    counts = {"rounds": codes > 0, "dropped": codes > 1}
    counts |= {name: codes == code for code, name in run.outcomes.occurring() if code > 1}
    columns |= {name: dict(enumerate(c.sum(0).tolist())) for name, c in counts.items()}
    for at, name in ((0, "first loss"), (-1, "last loss")):
        columns[name] = {c: float(curve[at, 1]) for c, curve in curves["loss"].items()}
    for kind, rows in scores.items():
        columns[kind] = {int(row["client"]): row[kind] for row in rows}
    return {name: values for name, values in columns.items() if values}


def _ranked(columns: Columns, kind: str) -> list[int]:
    """Return the ids of the clients, from the lowest score, the most drops and the highest loss."""
    scores, drops, losses = (columns.get(name, {}) for name in (kind, "dropped", "last loss"))
    every = {client for values in columns.values() for client in values}
    return sorted(
        every, key=lambda c: (scores.get(c, math.inf), -drops.get(c, 0), -losses.get(c, 0), c)
    )


def _table(
    run: Run, columns: Columns, curves: Mapping[str, Curves], shown: Sequence[int], caption: str
) -> Table:
    """Return the table of clients."""
    drawn = {
        name: _small(name, {c: each[c] for c in shown if c in each}, run.outcomes.dropped())
        for name, each in curves.items()
        if max(map(len, each.values()), default=0) > 1
    }
    caption += " Click on the name of a column to sort by it."
    if drawn:
        caption += " Curves are over rounds, on one scale for all clients; marks: dropped updates."
        caption += " Loss: of the model that the client received, in its first local step."
    rows: list[list[Curve | str]] = [
        [
            client_label(client, run).removeprefix("client "),
            *(cells.get(client, "-") for cells in drawn.values()),
            *(number(values.get(client)) for values in columns.values()),
        ]
        for client in shown
    ]
    return Table(["client", *drawn, *columns], rows, caption, sortable=True)


def _small(name: str, curves: Curves, dropped: Mapping[int, Sequence[float]]) -> dict[int, Curve]:
    """Return the small curves of clients."""
    every = np.concatenate(list(curves.values()))
    values = every[np.isfinite(every[:, 1]), 1].tolist() or [0.0]
    scale = math.log10 if needs_log(name, values) else float
    low, high = scale(min(values)), scale(max(values))
    last, cells = max(2.0, every[:, 0].max()), {}

    def across(round: float) -> str:
        return f"{100 * (round - 1) / (last - 1):.0f}"

    for client, curve in curves.items():
        line = Line(name, curve[:, 0].tolist(), curve[:, 1].tolist()).thinned(MOST_OF_CURVE)
        path, pen = "", "M"
        for x, y in zip(line.x, line.y, strict=True):
            if math.isfinite(y):
                path += f"{pen}{across(x)} {20 - 18 * (scale(y) - low) / (high - low or 1):.0f}h0"
            pen = "L" if math.isfinite(y) else "M"
        rounds = dropped.get(client, [])
        marks = "".join(f"M{x} 22v-4" for x in dict.fromkeys(map(across, rounds)))
        title = f"{number(line.y[0])} to {number(line.y[-1])}"
        if rounds:
            title += f", dropped in round {listed(list(map(number, rounds)), 10)}"
        cells[client] = Curve(path, marks, title)
    return cells
