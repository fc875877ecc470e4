"""Sections on the clients of a run: partition, participation and accuracies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from lightning_fl.callbacks.client_table import KINDS, summary
from lightning_fl.federation.dropped import CAUSES
from lightning_fl.partition import label_drift
from lightning_fl.report.figures import COLORS, Bars, Grid, Line, Lines, Panel
from lightning_fl.report.lead import client_label, dropped, sampled, split_rule
from lightning_fl.report.page import Picture, Section, Table
from lightning_fl.report.run import Outcomes, Row, Run
from lightning_fl.report.scores import client_metric, client_scores, drops, finite, total
from lightning_fl.report.words import counted, number, span

#: Values by client, by name of the column of the table of clients.
Columns = dict[str, dict[int, float]]
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
#: Maximum size of the histories of clients in characters.
MOST_HISTORY = 300_000
#: Places of the colors of outcomes: not sampled (no color), arrived, and causes in their order.
OUTCOME_COLORS = (6, 0, 1, 2, 3, 4, 5)
#: Places of the colors of faults and of causes in words, the same as those of outcomes.
PLACES = dict(zip(("dropout", "crash", "late", "nan", "blowup"), OUTCOME_COLORS[2:], strict=True))
PLACES |= dict(zip(CAUSES.values(), OUTCOME_COLORS[2:], strict=False))
PLACES |= {"arrived": 0, "dropped": 1}


def partition(run: Run) -> Section | None:
    """Describe the partition of the data; None if it is unknown."""
    if not (sizes := run.partition.get("sizes")):
        return None
    counts = run.partition["counts"]
    text = (
        f"{split_rule(run)}, seed {run.partition['seed']}: {counted(len(sizes), 'client')} with"
        f" {span(sizes)} samples{_median(sizes)}"
    )
    if any(counts):
        text += f"; classes per client: {span([len(row) for row in counts if row])}"
    panels = _per_client("samples", sizes)
    caption = "Number of samples of each client"
    # Classes are numbers: shorter ones are smaller.
    names = sorted({name for row in counts for name in row}, key=lambda name: (len(name), name))
    if 0 < len(names) <= MOST_CLASSES:
        table = np.array([[row.get(name, 0) for name in names] for row in counts])
        drift = label_drift(torch.from_numpy(table)).tolist()
        panels += _per_client("drift of the classes", drift)
        panels.append(_classes(table, names, run))
        caption += (
            "; distance of its class proportions from those of all clients (total variation);"
            " samples by client and class (opacity: square root of the share of the largest cell)"
        )
    return Section("Partition", [text + "."], [Picture("partition", caption + ".", panels)])


def _per_client(label: str, values: Sequence[float]) -> list[Panel]:
    """Return a panel with one bar per client, or with the values in ascending order if many."""
    if len(values) <= MOST_CLIENTS:
        bars = {at: value for at, value in enumerate(values) if math.isfinite(value)}
        return [Bars(label, "client", {label: bars})]
    ranked = sorted(finite(values))
    line = Line(label, range(1, len(ranked) + 1), ranked)
    return [Lines(label, [line.thinned(MOST_POINTS)], "clients in ascending order")]


def _classes(table: np.ndarray[Any, Any], names: Sequence[str], run: Run) -> Panel:
    """Return a panel of the number of samples per class (rows) and client (columns)."""
    width = -(-len(table) // MOST_CELLS[1])
    starts = range(0, len(table), width)
    cells = np.add.reduceat(table, list(starts), axis=0).T
    colors = np.empty((*cells.shape, 4))
    colors[..., :3], colors[..., 3] = _rgb(0), np.sqrt(cells / max(1, cells.max()))
    columns = [_client_label(at, width, len(table), run) for at in starts]
    rows = [f"class {name}" for name in names]
    layers = {"samples": cells}
    return Grid("class", "client", colors, rows, columns, layers, widths=(1, width), ticks=names)


def _client_label(first: int, width: int, count: int, run: Run) -> str:
    last = min(first + width, count) - 1
    return f"clients {first} to {last}" if last > first else client_label(first, run)


def _rgb(color: int) -> list[float]:
    return [int(COLORS[color][at : at + 2], 16) / 255 for at in (1, 3, 5)]


def participation(run: Run) -> Section:
    """Show which clients were sampled, and which updates were dropped."""
    text = [f"{sampled(run)} were sampled per round. {dropped(run)}"]
    panels: list[Panel] = []
    by_cause = drops(run)
    if faults := _faults_by_round(run):
        panels.append(_bars_by_round("clients with a fault", faults))
    elif by_cause:
        panels.append(_bars_by_round("updates dropped", by_cause))
    if run.faults is None:
        text.append("To simulate failing clients, add --trainer.callbacks+=ClientFaults.")
    caption = "Faults or dropped updates per round; number of rounds of each client"
    if run.outcomes is not None:
        times = (run.outcomes.codes > 0).sum(0).tolist()
        text[0] += f" Rounds per client: {span(times)}{_median(times)}."
        if len(set(times)) > 1 or by_cause:
            panels.append(_rounds_of_clients(run.outcomes, times))
        panels.append(_who_when(run.outcomes, run))
        caption += "; what happened to each client in each round"
        if max(_widths(run.outcomes)) > 1:
            caption += " (cells of several clients and rounds; opacity: share of sampled clients)"
    pictures = [Picture("participation", f"{caption}.", panels)] if panels else []
    return Section("Participation and faults", text, pictures, _causes(run, by_cause))


def _bars_by_round(label: str, counts: Mapping[str, Mapping[int, float]]) -> Panel:
    """Return a panel of bars, in stretches of rounds if there are many rounds."""
    rounds = [at for by_round in counts.values() for at in by_round]
    width = -(-(max(rounds) - min(rounds) + 1) // MOST_BARS)
    sums: dict[str, Counter[int]] = {kind: Counter() for kind in counts}
    for kind, by_round in counts.items():
        for at, count in by_round.items():
            sums[kind][(at - 1) // width * width + 1] += int(count)
    xlabel = "round" if width == 1 else f"{width} rounds from round"
    return Bars(label, xlabel, sums, width, [PLACES.get(kind, 5) for kind in sums])


def _widths(outcomes: Outcomes) -> tuple[int, int]:
    """Return the number of clients and of rounds of a cell."""
    rounds, clients = outcomes.codes.shape
    return -(-clients // MOST_CELLS[0]), -(-rounds // MOST_CELLS[1])


def _color(outcome: int) -> int:
    return OUTCOME_COLORS[min(outcome, len(OUTCOME_COLORS) - 1)]


def _who_when(outcomes: Outcomes, run: Run) -> Panel:
    """Return a panel of what happened to each client (rows) in each round (columns)."""
    codes, names = outcomes.codes.T, outcomes.names
    (clients, rounds), (height, width) = codes.shape, _widths(outcomes)
    down, across = range(0, clients, height), range(0, rounds, width)
    sizes = np.outer(np.diff([*down, clients]), np.diff([*across, rounds]))

    def share(wanted: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        by_row = np.add.reduceat(wanted, list(down), axis=0, dtype=np.int64)
        shares: np.ndarray[Any, Any] = np.add.reduceat(by_row, list(across), axis=1) / sizes
        return shares

    # Cells of several clients have the mean color of those that were sampled.
    sampled = share(codes > 0)
    kinds = [code for code in range(1, len(names)) if (codes == code).any()]
    shares = {code: share(codes == code) for code in kinds}
    colors = np.zeros((*sampled.shape, 4))
    for code, part in shares.items():
        colors[..., :3] += part[..., None] * np.array(_rgb(_color(code)))
    colors[..., :3] /= np.maximum(sampled, 1e-12)[..., None]
    colors[..., 3] = sampled / max(1e-12, sampled.max())
    if (height, width) == (1, 1):
        layers, words = {"": codes}, {"": names}
    else:
        layers = {"% sampled": np.round(100 * sampled, 1)}
        layers |= {f"% {names[code]}": np.round(100 * shares[code], 1) for code in kinds[:6]}
        words = {}
    columns = [f"round {at + 1}" for at in across]
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
        [(names[code], _color(code)) for code in kinds],
        first=1,
        widths=(height, width),
    )


def _faults_by_round(run: Run) -> dict[str, Counter[int]]:
    """Return the number of clients per fault and round, with faults in order of occurrence."""
    counts: dict[str, Counter[int]] = {}
    for at, _, fault in run.faults or ():
        counts.setdefault(fault, Counter())[at] += 1
    return counts


def _causes(run: Run, by_cause: Mapping[str, Mapping[int, float]]) -> list[Table]:
    """Return the number of dropped updates by cause, and of updates that a fault has changed."""
    asked = total(run, "clients")
    counts = {cause: sum(by_round.values()) for cause, by_round in by_cause.items()}
    if blown := sum(fault == "blowup" for _, _, fault in run.faults or ()):
        counts["blowup, not dropped"] = blown
    rows = [
        [cause, number(count), f"{100 * count / asked:.1f} %"] for cause, count in counts.items()
    ]
    return [Table(["cause", "updates", "of all updates"], rows)] if rows else []


def _rounds_of_clients(outcomes: Outcomes, times: Sequence[int]) -> Panel:
    """Return a panel with one bar per client, or with a histogram if there are many clients."""
    if len(times) > MOST_CLIENTS:
        first = min(times)
        width = -(-(max(times) - first + 1) // MOST_BARS)
        histogram = Counter((n - first) // width * width + first for n in sorted(times))
        label = "rounds in which a client was sampled"
        return Bars("clients", label, {"clients": histogram}, width)
    counts = {
        name: dict(enumerate((outcomes.codes == code).sum(0).tolist()))
        for code, name in enumerate(outcomes.names)
        if code > 0 and (outcomes.codes == code).any()
    }
    return Bars("rounds of the client", "client", counts, 1, [PLACES.get(c, 5) for c in counts])


def _median(values: Sequence[float]) -> str:
    """Return the median in parentheses; empty if all values are equal."""
    return f" (median {number(median(values))})" if len(set(values)) > 1 else ""


def clients(run: Run) -> Section:
    """Show the accuracy of the last round's models for each client, and what happened to it."""
    samples, scores = client_scores(run)
    remedy = (
        "add --trainer.callbacks+=PersonalizedEvaluation and --data.init_args.local_test_size=0.2"
    )
    text = []
    if not scores:
        why = run.environment.get("no train_acc")
        text.append(
            f"The accuracy of each client was not measured{f' ({why})' if why else ''}. For local"
            f" test samples, {remedy}."
        )
    elif samples == "own training samples":
        text.append(
            f"Accuracy on training samples is optimistic. For local test samples, {remedy}."
        )
    columns = _columns(run, scores)
    ranked = _ranked(columns, next(iter(scores), None))
    half = MOST_ROWS // 2
    shown = ranked if len(ranked) <= MOST_ROWS else ranked[:half] + ranked[-half:]
    caption = "All clients, worst first."
    if len(shown) < len(ranked):
        caption = (
            f"The {half} worst and the {half} best of {number(len(ranked))} clients;"
            " participation.csv and clients.csv have all."
        )
    table = _table(run, columns, shown, f"{caption} Click on the name of a column to sort by it.")
    pictures = [_spread_picture(samples, scores, run)] if scores else []
    tables = [*([_spread_table(scores)] if scores else []), *([table] if shown else [])]
    return Section("Clients", text, pictures, tables, (), _history(run, columns, shown))


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


def _columns(run: Run, scores: Mapping[str, Sequence[Row]]) -> Columns:
    """Return the columns of the table of clients."""
    columns: Columns = {"training samples": dict(enumerate(run.partition.get("sizes", ())))}
    for name in ("train_samples", "rounds", "dropped"):
        if run.participation and name in run.participation[0]:
            values = {int(row["client"]): row[name] for row in run.participation}
            columns[name.replace("train_", "training ")] = values
    if run.outcomes is not None:
        for code, name in enumerate(run.outcomes.names):
            counts = (run.outcomes.codes == code).sum(0)
            if code > 1 and counts.any():
                columns[name] = dict(enumerate(counts.tolist()))
    for kind, rows in scores.items():
        columns[kind] = {int(row["client"]): row[kind] for row in rows}
    return {name: values for name, values in columns.items() if values}


def _ranked(columns: Columns, kind: str | None) -> list[int]:
    """Return the ids of the clients, from the lowest score and the most drops."""
    scores, drops = columns.get(kind or "", {}), columns.get("dropped", {})
    every = {client for values in columns.values() for client in values}
    return sorted(every, key=lambda c: (scores.get(c, math.inf), -drops.get(c, 0), c))


def _table(run: Run, columns: Columns, shown: Sequence[int], caption: str) -> Table:
    """Return the table of clients."""
    head = ["client", *(["name"] if run.names else []), *columns]
    rows = [
        [
            str(client),
            *([run.names.get(client, "-")] if run.names else []),
            *(number(values.get(client)) for values in columns.values()),
        ]
        for client in shown
    ]
    return Table(head, rows, caption, sortable=True)


def _history(run: Run, columns: Columns, shown: Sequence[int]) -> dict[str, Any] | None:
    """Return the outcomes of clients by round, of as many clients as fit into a page."""
    if run.outcomes is None:
        return None
    names, codes = run.outcomes.names, run.outcomes.codes
    metric = client_metric(run)
    clients: dict[str, str] = {}
    facts: dict[str, dict[str, str]] = {}
    room = MOST_HISTORY
    for client in shown:
        text = _run_lengths(codes[:, client])
        if (room := room - len(text)) < 0:
            break
        words = [counted(columns["training samples"][client], "training sample")]
        words += [
            f"{kind} {metric} {number(columns[kind][client])}"
            for kind in KINDS
            if client in columns.get(kind, {})
        ]
        clients[str(client)] = text
        facts[str(client)] = {"name": client_label(client, run), "text": f"{', '.join(words)}."}
    every = codes.shape[1]
    return {
        "outcomes": names,
        "colors": [_color(code) for code in range(len(names))],
        "clients": clients,
        "facts": facts,
        "note": f"{len(clients)} of {number(every)} clients" if len(clients) < every else "",
    }


def _run_lengths(codes: np.ndarray[Any, Any]) -> str:
    """Return the outcomes of a client as run lengths: ``2ab`` is a, a, b."""
    starts = np.flatnonzero(np.diff(codes, prepend=255))
    lengths = np.diff([*starts, len(codes)]).tolist()
    runs = zip(lengths, codes[starts].tolist(), strict=True)
    return "".join(f"{length if length > 1 else ''}{chr(97 + code)}" for length, code in runs)
