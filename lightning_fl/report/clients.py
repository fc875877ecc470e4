"""Sections on the clients of a run: partition, participation and accuracies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from lightning_fl.callbacks.client_table import summary
from lightning_fl.federation.dropped import CAUSES
from lightning_fl.partition import label_drift
from lightning_fl.report.figures import COLORS, Bars, Grid, Line, Lines, Panel, needs_log
from lightning_fl.report.lead import client_label, dropped, sampled, split_rule
from lightning_fl.report.page import Curve, Picture, Section, Table
from lightning_fl.report.run import Outcomes, Row, Run
from lightning_fl.report.scores import client_metric, client_scores, drops, finite, total
from lightning_fl.report.words import counted, listed, number, span

#: Values by client, by name of the column of the table of clients.
Columns = dict[str, dict[int, float]]
#: Rounds and values of each client, ``[n, 2]``.
Curves = dict[int, np.ndarray[Any, Any]]
#: Descriptions of the kinds of :class:`PersonalizedEvaluation`.
MEANINGS = {
    "global": "the global model without local tensors of the client",
    "server": "the global model",
    "personal": "the global model after local fine-tuning",
    "kept": "the personal model of the method",
    "local": "a model trained by the client alone",
}
#: Maximum number of clients, and of rounds, that are drawn as one bar each.
MOST_CLIENTS, MOST_BARS = 60, 120
#: Maximum number of rows and columns of a picture of cells. More are drawn in groups.
MOST_CELLS = (100, 200)
#: Maximum number of classes of a picture, of points of a client each, and of rows of a table.
MOST_CLASSES, MOST_POINTS, MOST_ROWS = 60, 1000, 400
#: Maximum number of outcomes in the histories of clients, clients times rounds, and of points of a
#: small curve.
MOST_OUTCOMES, MOST_OF_CURVE = 400_000, 40
#: Places of the colors of outcomes; that of other causes is 5.
PLACES = dict(zip(("not sampled", "arrived", *CAUSES.values()), (6, 0, 1, 2, 3, 4), strict=True))


def _color(outcome: str) -> int:
    return PLACES.get(outcome, 5)


def partition(run: Run) -> Section | None:
    """Describe the partition of the data; None if it is unknown."""
    if run.partition is None:
        return None
    counts, sizes = run.partition.class_counts, run.sizes
    text = (
        f"{split_rule(run.partition)}, seed {run.partition.seed}:"
        f" {counted(len(sizes), 'client')} with {span(sizes)} samples"
    )
    if any(counts):
        text += f"; classes per client: {span([len(row) for row in counts if row])}"
    panels = [_per_client("samples", sizes)]
    caption = "Number of samples of each client"
    classes = sorted({label for row in counts for label in row})
    if 0 < len(classes) <= MOST_CLASSES:
        table = np.array([[row.get(label, 0) for label in classes] for row in counts])
        drift = label_drift(torch.from_numpy(table)).tolist()
        panels += [_per_client("drift of the classes", drift), _classes(table, classes, run)]
        caption += (
            "; distance of its class proportions from those of all clients (total variation);"
            " samples by client and class (opacity: square root of the share of the largest cell)"
        )
    return Section("Partition", [text + "."], [Picture("partition", caption + ".", panels)])


def _per_client(label: str, values: Sequence[float]) -> Panel:
    """Return a panel with one bar per client, or with the values in ascending order if many."""
    if len(values) <= MOST_CLIENTS:
        bars = {at: value for at, value in enumerate(values) if math.isfinite(value)}
        return Bars(label, "client", {label: bars})
    ranked = sorted(finite(values))
    line = Line(label, range(1, len(ranked) + 1), ranked)
    return Lines(label, [line.thinned(MOST_POINTS)], "clients in ascending order")


def _classes(table: np.ndarray[Any, Any], classes: Sequence[int], run: Run) -> Panel:
    """Return a panel of the number of samples per class (rows) and client (columns)."""
    width = -(-len(table) // MOST_CELLS[1])
    starts = range(0, len(table), width)
    cells = np.add.reduceat(table, list(starts), axis=0).T
    colors = np.empty((*cells.shape, 4))
    colors[..., :3], colors[..., 3] = _rgb(0), np.sqrt(cells / max(1, cells.max()))
    columns = [_client_label(at, width, len(table), run) for at in starts]
    return Grid(
        "class",
        "client",
        colors,
        [f"class {label}" for label in classes],
        columns,
        {"samples": cells},
        widths=(1, width),
        ticks=list(map(str, classes)),
    )


def _client_label(first: int, width: int, count: int, run: Run) -> str:
    last = min(first + width, count) - 1
    return f"clients {first} to {last}" if last > first else client_label(first, run)


def _rgb(color: int) -> list[float]:
    return [int(COLORS[color][at : at + 2], 16) / 255 for at in (1, 3, 5)]


def participation(run: Run) -> Section:
    """Show which clients were sampled, and which updates were dropped."""
    text = f"{sampled(run)} were sampled per round. {dropped(run)}"
    panels: list[Panel] = []
    captions = []
    if by_cause := drops(run):
        panels.append(_drops_by_round(by_cause))
        captions.append("dropped updates per round")
    if run.outcomes is not None:
        text += f" Rounds per client: {span((run.outcomes.codes > 0).sum(0).tolist() or [0])}."
        panels.append(_who_when(run.outcomes, run))
        captions.append("what happened to each client in each round")
        if max(_widths(run.outcomes)) > 1:
            captions[-1] += (
                " (cells of several clients and rounds; opacity: share that was sampled)"
            )
    caption = "; ".join(captions).capitalize() + "."
    pictures = [Picture("participation", caption, panels)] if panels else []
    tables = [_causes(by_cause, total(run, "clients"))] if by_cause else []
    return Section("Participation and faults", [text], pictures, tables)


def _drops_by_round(by_cause: Mapping[str, Mapping[int, float]]) -> Panel:
    """Return a panel of dropped updates, in stretches of rounds if there are many rounds."""
    rounds = [at for by_round in by_cause.values() for at in by_round]
    width = -(-(max(rounds) - min(rounds) + 1) // MOST_BARS)
    sums: dict[str, Counter[int]] = {cause: Counter() for cause in by_cause}
    for cause, by_round in by_cause.items():
        for at, count in by_round.items():
            sums[cause][(at - 1) // width * width + 1] += int(count)
    xlabel = "round" if width == 1 else f"{width} rounds from round"
    return Bars("updates dropped", xlabel, sums, width, {cause: _color(cause) for cause in sums})


def _widths(outcomes: Outcomes) -> tuple[int, int]:
    """Return the number of clients and of rounds of a cell."""
    rounds, clients = outcomes.codes.shape
    return -(-clients // MOST_CELLS[0]), -(-rounds // MOST_CELLS[1])


def _who_when(outcomes: Outcomes, run: Run) -> Panel:
    """Return a panel of what happened to each client (rows) in each round (columns)."""
    codes, (height, width) = outcomes.codes.T, _widths(outcomes)
    clients, rounds = codes.shape
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
    columns = [f"round {at + 1}" for at in across]
    if (height, width) != (1, 1):
        layers = {"% sampled": np.round(100 * sampled, 1)}
        layers |= {f"% {name}": np.round(100 * s, 1) for name, s in list(shares.items())[:6]}
        words = {}
    if width > 1:
        columns = [f"rounds {at + 1} to {min(at + width, rounds)}" for at in across]
    return Grid(
        "client",
        "round",
        np.clip(colors, 0, 1),
        [_client_label(at, height, clients, run) for at in down],
        columns,
        layers,
        words,
        [(name, _color(name)) for name in shares],
        first=1,
        widths=(height, width),
    )


def _causes(by_cause: Mapping[str, Mapping[int, float]], asked: float) -> Table:
    """Return the number of dropped updates by cause."""
    counts = {cause: sum(by_round.values()) for cause, by_round in by_cause.items()}
    rows = [[cause, number(n), f"{100 * n / asked:.1f} %"] for cause, n in counts.items()]
    return Table(["cause", "updates", "of all updates"], rows)


def clients(run: Run) -> Section:
    """Show the accuracy of the last round's models for each client, and what happened to it."""
    samples, scores = client_scores(run)
    curves = {} if run.outcomes is None else {n: run.outcomes.curves(n) for n in ("loss", "score")}
    text = []
    if not scores:
        why = run.environment.get("no train_acc")
        text = [f"The accuracy of each client was not measured{f' ({why})' if why else ''}."]
    elif samples == "own training samples":
        text = ["Accuracy on training samples is optimistic."]
    if text:
        text[0] += (
            " For local test samples, add --trainer.callbacks+=PersonalizedEvaluation and"
            " --data.init_args.local_test_size=0.2."
        )
    if stuck := _stuck(curves.get("loss", {})):
        text.append(
            f"The loss of {counted(len(stuck), 'client')} did not fall, on average over the last"
            " quarter of their rounds against the first quarter: "
            f"{listed([client_label(client, run) for client in stuck], 10)}. The page"
            ' "When a client does not learn" of the documentation says what to check.'
        )
    columns = _columns(run, scores, curves)
    ranked = _ranked(columns, next(iter(scores), ""))
    half = MOST_ROWS // 2
    shown, caption = ranked, "All clients, worst first."
    if len(ranked) > MOST_ROWS:
        shown = ranked[:half] + ranked[-half:]
        caption = (
            f"The {half} worst and the {half} best of {number(len(ranked))} clients;"
            " participation.csv and clients.csv have all."
        )
    pictures = [_spread_picture(samples, scores, run)] if scores else []
    tables = [_spread_table(scores)] if scores else []
    tables += [_table(run, columns, curves, shown, caption)] if shown else []
    return Section("Clients", text, pictures, tables, (), _history(run, shown))


def _stuck(losses: Curves) -> list[int]:
    """Return the clients whose loss did not fall, those with the largest increase first."""
    rises = {}
    for client, curve in losses.items():
        few = -(-len(curve) // 4)
        rises[client] = curve[-few:, 1].mean() - curve[:few, 1].mean() if len(curve) > 1 else -1.0
    return sorted((c for c, rise in rises.items() if not rise < 0), key=lambda c: -rises[c])


def _spread_picture(samples: str, scores: Mapping[str, Sequence[Row]], run: Run) -> Picture:
    metric = client_metric(run)
    most = max(map(len, scores.values()))
    ranked = [
        Line(kind, range(1, len(rows) + 1), sorted(row[kind] for row in rows)).thinned(MOST_POINTS)
        for kind, rows in scores.items()
    ]
    shade = (0.5, max(1, most // 10) + 0.5)
    ylabel, across = f"{metric} on {samples}", "clients, worst first (gray: worst tenth)"
    panels: list[Panel] = [Lines(ylabel, ranked, across, shade=shade)]
    caption = f"The {metric} of the last round's models on each client's {samples}, ascending"
    points = [_points(kind, rows, run) for kind, rows in scores.items()]
    if len({x for line in points for x in line.x}) > 1:
        panels.append(Lines(ylabel, points, "training samples of the client", joined=False))
        caption += ", and by number of training samples"
        if most > MOST_POINTS:
            caption += f" ({number(len(points[0].x))} of {number(most)} clients)"
    meanings = "; ".join(f"{kind}: {MEANINGS[kind]}" for kind in scores)
    return Picture("clients", f"{caption}. {meanings}.", panels)


def _points(kind: str, rows: Sequence[Row], run: Run) -> Line:
    """Return one point per client: its score over its number of training samples."""
    some = rows[:: -(-len(rows) // MOST_POINTS)]
    names = [client_label(int(row["client"]), run) for row in some]
    return Line(kind, [r.get("train_samples", 0) for r in some], [r[kind] for r in some], (), names)


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
    if run.outcomes is not None:
        codes = run.outcomes.codes
        counts = {"rounds": codes > 0, "dropped": codes > 1}
        counts |= {name: codes == code for code, name in run.outcomes.occurring() if code > 1}
        columns |= {name: dict(enumerate(c.sum(0).tolist())) for name, c in counts.items()}
    for at, name in ((0, "first loss"), (-1, "last loss")):
        columns[name] = {c: float(curve[at, 1]) for c, curve in curves.get("loss", {}).items()}
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
    drawn = {name: cells for name, each in curves.items() if (cells := _small(name, each, shown))}
    caption += " Click on the name of a column to sort by it."
    if drawn:
        caption += " Curves are over rounds, on one scale for all clients. The loss is that of the"
        caption += " model which the client received, in its first local step of the round."
    rows: list[list[Curve | str]] = [
        [
            client_label(client, run).removeprefix("client "),
            *(number(values.get(client)) for values in columns.values()),
            *(cells.get(client, "-") for cells in drawn.values()),
        ]
        for client in shown
    ]
    return Table(["client", *columns, *drawn], rows, caption, sortable=True)


def _small(name: str, curves: Curves, shown: Sequence[int]) -> dict[int, Curve]:
    """Return the small curves of clients; empty if none has two points."""
    some = {client: curves[client] for client in shown if client in curves}
    if max(map(len, some.values()), default=0) < 2:
        return {}
    every = np.concatenate(list(some.values()))
    values = finite(every[:, 1].tolist())
    scale = math.log10 if needs_log(name, values) else float
    low, high = (scale(end) for end in (min(values, default=0), max(values, default=0)))
    (first, last), cells = (every[:, 0].min(), every[:, 0].max()), {}
    for client, curve in some.items():
        line = Line(name, curve[:, 0].tolist(), curve[:, 1].tolist()).thinned(MOST_OF_CURVE)
        path, pen = "", "M"
        for x, y in zip(line.x, line.y, strict=True):
            if math.isfinite(y):
                across = 100 * (x - first) / max(1, last - first)
                down = 20 - 18 * (scale(y) - low) / (high - low or 1)
                path += f"{pen}{across:.0f} {down:.0f}h0"
            pen = "L" if math.isfinite(y) else "M"
        cells[client] = Curve(path, f"{number(line.y[0])} to {number(line.y[-1])}")
    return cells


def _history(run: Run, shown: Sequence[int]) -> dict[str, Any] | None:
    """Return the outcomes of clients by round, of as many clients as fit into a page."""
    if run.outcomes is None:
        return None
    names, codes = run.outcomes.names, run.outcomes.codes
    rounds, every = codes.shape
    some = shown[: max(1, MOST_OUTCOMES // rounds)]
    return {
        "outcomes": names,
        "colors": list(map(_color, names)),
        "clients": {client_label(client, run): _run_lengths(codes[:, client]) for client in some},
        "note": f"{len(some)} of {number(every)} clients" if len(some) < every else "",
    }


def _run_lengths(codes: np.ndarray[Any, Any]) -> str:
    """Return the outcomes of a client as run lengths: ``2ab`` is a, a, b."""
    starts = np.flatnonzero(np.diff(codes, prepend=255))
    lengths = np.diff([*starts, len(codes)]).tolist()
    runs = zip(lengths, codes[starts].tolist(), strict=True)
    return "".join(f"{length if length > 1 else ''}{chr(97 + code)}" for length, code in runs)
