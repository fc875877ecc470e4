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
from lightning_fl.report.figures import COLORS, Bars, Grid, Line, Lines, Panel
from lightning_fl.report.lead import client_label, dropped, sampled, split_rule
from lightning_fl.report.page import Picture, Section, Table
from lightning_fl.report.run import Outcomes, Row, Run
from lightning_fl.report.scores import client_metric, client_scores, drops, finite, total
from lightning_fl.report.words import counted, number, span

#: Counts by kind and position, the input of :class:`Bars`.
Counts = dict[str, dict[int, int]]
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
    classes = run.partition["classes"]
    text = (
        f"{split_rule(run)}, seed {run.partition.get('seed')}: {counted(len(sizes), 'client')} with"
        f" {span(sizes)} samples{_median(sizes)}"
    )
    if classes:
        text += f" of {span(classes)} class{'es' * (max(classes) != 1)} each"
    panels = _per_client("samples", sizes)
    caption = "Number of samples of each client"
    counts = run.partition["counts"]
    names = sorted({name for row in counts for name in row}, key=_numeric)
    if 0 < len(names) <= MOST_CLASSES:
        table = np.array([[row.get(name, 0) for name in names] for row in counts])
        drift = label_drift(torch.from_numpy(table)).tolist()
        panels += _per_client("drift of the classes", drift)
        panels.append(_classes(table, names, run))
        caption += (
            "; distance of its class proportions from those of all clients (total variation, 0 to"
            " 1); number of samples by client and class, where the opacity is the square root of"
            " the share of the largest cell"
        )
    pictures = [Picture("partition", caption + ".", panels)]
    return Section("Partition", [text + "."], pictures)


def _numeric(name: str) -> tuple[bool, float, str]:
    return (False, int(name), "") if name.isdecimal() and len(name) < 9 else (True, 0, name)


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
    rows = [f"class {name[:40]}" for name in names]
    layers = {"samples": cells}
    ticks = [name[:40] for name in names]
    return Grid("class", "client", colors, rows, columns, layers, widths=(1, width), ticks=ticks)


def _client_label(first: int, width: int, count: int, run: Run) -> str:
    last = min(first + width, count) - 1
    if last > first:
        return f"clients {first} to {last}"
    return client_label(first, run)


def _rgb(color: int) -> list[float]:
    return [int(COLORS[color][at : at + 2], 16) / 255 for at in (1, 3, 5)]


def participation(run: Run) -> Section:
    """Show which clients were sampled, and which updates were dropped."""
    count = total(run, "dropped")
    text = f"In each round {sampled(run)}."
    text += f" {dropped(run)}" if count else ""
    text += " No update was dropped." if total(run, "clients") and not count else ""
    panels: list[Panel] = []
    faults = _faults_by_round(run)
    if faults or count:
        label = "clients with a fault" if faults else "updates dropped"
        panels.append(_bars_by_round(label, faults or _drops_by_cause(run)))
    times = _by_client(run, "rounds")
    if times and (len(set(times.values())) > 1 or count):
        panels.append(_rounds_of_clients(run, times))
        text += _range_of_rounds(list(times.values()))
    texts = [text]
    if run.faults is None:
        texts.append("To simulate failing clients, add --trainer.callbacks+=ClientFaults.")
    if run.outcomes is not None:
        panels.append(_who_when(run.outcomes, run))
    title = "Participation and faults"
    if not panels:
        return Section(title, texts)
    caption = "Faults or dropped updates per round; number of rounds of each client."
    if faults:
        caption += (
            " Updates with dropout, crash, nan or late are dropped; blowup scales an update by a"
            " large factor."
        )
    if run.outcomes is not None:
        caption += " Clients and rounds: who was sampled in which round, and what happened."
        if max(_widths(run.outcomes)) > 1:
            caption += (
                " Cells are groups of clients and rounds, because there are too many to draw each."
                " The opacity is the share of sampled clients, relative to the fullest cell."
            )
    return Section(title, texts, [Picture("participation", caption, panels)], _causes(run))


def _bars_by_round(label: str, counts: Counts) -> Panel:
    """Return a panel of bars, in stretches of rounds if there are many rounds."""
    rounds = [at for by_round in counts.values() for at in by_round]
    width = -(-(max(rounds) - min(rounds) + 1) // MOST_BARS)
    sums: dict[str, dict[int, float]] = {}
    for kind, by_round in counts.items():
        summed = sums.setdefault(kind, {})
        for at, count in by_round.items():
            first = (at - 1) // width * width + 1
            summed[first] = summed.get(first, 0) + count
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


def _faults_by_round(run: Run) -> Counts:
    """Return the number of clients per fault and round, with faults in order of occurrence."""
    counts: dict[str, Counter[int]] = {}
    for at, _, fault in run.faults or ():
        counts.setdefault(fault, Counter())[at] += 1
    return {fault: dict(sorted(rounds.items())) for fault, rounds in counts.items()}


def _causes(run: Run) -> list[Table]:
    """Return the number of dropped updates by cause, and of updates that a fault has changed."""
    asked = total(run, "clients")
    causes = drops(run)
    if blown := sum(fault == "blowup" for _, _, fault in run.faults or ()):
        causes["blowup, not dropped"] = blown
    rows = [
        [words, number(n), f"{100 * n / asked:.1f} %" if asked else "-"]
        for words, n in causes.items()
    ]
    return [Table(["cause", "updates", "of all updates"], rows)] if rows else []


def _drops_by_cause(run: Run) -> Counts:
    """Return the number of dropped updates per round, by cause if all causes are known."""
    counts = {
        words: {int(at): int(n) for at, n in run.column(cause) if math.isfinite(n) and n > 0}
        for cause, words in {**CAUSES, "dropped": "dropped"}.items()
    }
    every = counts.pop("dropped")
    by_cause = {words: rounds for words, rounds in counts.items() if rounds}
    known = sum(sum(rounds.values()) for rounds in by_cause.values())
    return by_cause if known == sum(every.values()) else {"dropped": every}


def _by_client(run: Run, name: str) -> dict[int, int]:
    """Return a column of the participation table by client, without values that are missing."""
    rows = [row for row in run.participation if math.isfinite(row.get(name, math.nan))]
    return {int(row["client"]): int(row[name]) for row in rows}


def _rounds_of_clients(run: Run, times: Mapping[int, int]) -> Panel:
    """Return a panel with one bar per client, or with a histogram if there are many clients."""
    if len(times) > MOST_CLIENTS:
        ranked = sorted(times.values())
        width = -(-(ranked[-1] - ranked[0] + 1) // MOST_BARS)
        histogram = Counter((n - ranked[0]) // width * width + ranked[0] for n in ranked)
        label = "rounds in which a client was sampled"
        return Bars("clients", label, {"clients": dict(sorted(histogram.items()))}, width)
    kinds: Counts
    if run.outcomes is not None:
        counts = [(run.outcomes.codes == code).sum(0) for code in range(len(run.outcomes.names))]
        named = zip(run.outcomes.names[1:], counts[1:], strict=True)
        kinds = {name: dict(enumerate(each.tolist())) for name, each in named if each.any()}
    else:
        gone = dict.fromkeys(times, 0) | _by_client(run, "dropped")
        kinds = {"arrived": {c: n - gone[c] for c, n in times.items()}, "dropped": gone}
    places = [PLACES.get(kind, 5) for kind in kinds]
    return Bars("rounds of the client", "client", kinds, 1, places)


def _range_of_rounds(times: Sequence[int]) -> str:
    noun = "round" if max(times) == 1 == min(times) else "rounds"
    return f" Each client was sampled in {span(times)} {noun}{_median(times)}."


def _median(values: Sequence[float]) -> str:
    """Return the median in parentheses; empty if all values are equal."""
    return f" (median {number(median(values))})" if len(set(values)) > 1 else ""


def clients(run: Run) -> Section:
    """Show the accuracy of the last round's models for each client, and what happened to it."""
    title, (samples, scores), metric = "Clients", client_scores(run), client_metric(run)
    text = []
    if not scores:
        why = run.environment.get("no train_acc")
        reason = f" ({why})" if isinstance(why, str) else ""
        text.append(
            f"The accuracy of each client was not measured{reason}. To measure it on local test"
            " samples, give the module a forward that returns one score per class, and add"
            " --trainer.callbacks+=PersonalizedEvaluation and --data.init_args.local_test_size=0.2."
        )
    if "server" in scores:
        server = summary(scores["server"], "server")
        text.append(
            f"The mean {metric} of clients on their {samples} is {number(server['mean'])}, with a"
            f" standard deviation of {number(server['std'])}. The mean of the worst tenth is"
            f" {number(server['worst'])}."
        )
    if scores and samples == "own training samples":
        text.append(
            "Accuracy on training samples is optimistic. PersonalizedEvaluation uses local test"
            " samples (--data.init_args.local_test_size=0.2)."
        )
    pictures = [_spread_picture(samples, scores, run)] if scores else []
    table, shown = _table(run, scores)
    tables = ([_spread_table(scores)] if scores else []) + ([table] if table.rows else [])
    return Section(title, text, pictures, tables, (), _history(run, shown, scores))


def _spread_picture(samples: str, scores: Mapping[str, Sequence[Row]], run: Run) -> Picture:
    metric = client_metric(run)
    most = max(map(len, scores.values()))
    ranked = [
        Line(kind, range(1, len(rows) + 1), sorted(row[kind] for row in rows)).thinned(MOST_POINTS)
        for kind, rows in scores.items()
    ]
    shade = (0.5, max(1, most // 10) + 0.5)
    panels: list[Panel] = [
        Lines(
            f"{metric} on {samples}",
            ranked,
            "clients, worst first (gray: worst tenth)",
            shade=shade,
        )
    ]
    caption = f"The {metric} of the last round's models on each client's {samples}, ascending"
    points = [_points(kind, rows, run) for kind, rows in scores.items()]
    if len({x for line in points for x in line.x}) > 1:
        panels.append(
            Lines(f"{metric} on {samples}", points, "training samples of the client", joined=False)
        )
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


def _table(run: Run, scores: Mapping[str, Sequence[Row]]) -> tuple[Table, list[int]]:
    """Return the table of clients, worst first, and the ids of the clients in it."""
    by_client: dict[int, dict[str, Any]] = {}
    for at, size in enumerate(run.partition.get("sizes", ())):
        by_client[at] = {"training samples": size}
    for row in run.participation:
        cells = by_client.setdefault(int(row["client"]), {})
        cells["training samples"] = row.get("train_samples", cells.get("training samples"))
        cells |= {"rounds": row.get("rounds"), "dropped": row.get("dropped")}
    if run.outcomes is not None:
        names, codes = run.outcomes.names, run.outcomes.codes
        for code in range(2, len(names)):
            if (counts := (codes == code).sum(0)).any():
                for at, count in enumerate(counts.tolist()):
                    by_client.setdefault(at, {})[names[code]] = count
    for kind, rows in scores.items():
        for row in rows:
            cells = by_client.setdefault(int(row["client"]), {})
            cells.setdefault("training samples", row.get("train_samples"))
            cells[kind] = row[kind]
    first = next(iter(scores), None)

    def rank(client: int) -> tuple[float, float, int]:
        cells = by_client[client]
        score = cells.get(first, math.inf) if first else 0
        return score, -finite([cells.get("dropped") or 0, 0])[0], client

    ranked = sorted(by_client, key=rank)
    caption = "All clients, worst first. Click on the name of a column to sort by it."
    if len(ranked) > MOST_ROWS:
        half = MOST_ROWS // 2
        caption = (
            f"The {half} worst and the {half} best of {number(len(ranked))} clients. Click on the"
            " name of a column to sort by it. participation.csv and clients.csv have all clients."
        )
        ranked = ranked[:half] + ranked[-half:]
    columns = list(
        dict.fromkeys(n for c in ranked for n, v in by_client[c].items() if v is not None)
    )
    columns.sort(key=lambda name: name in scores)
    lines = []
    for client in ranked:
        line = [str(client), *(number(by_client[client].get(name)) for name in columns)]
        if run.names:
            line.insert(1, run.names.get(client, "-"))
        lines.append(line)
    head = ["client", *(["name"] if run.names else []), *columns]
    return Table(head, lines, caption, sortable=True), ranked


def _history(
    run: Run, shown: Sequence[int], scores: Mapping[str, Sequence[Row]]
) -> dict[str, Any] | None:
    """Return the outcomes of clients by round, of as many clients as fit into a page."""
    if run.outcomes is None:
        return None
    names, codes = run.outcomes.names, run.outcomes.codes
    metric = client_metric(run)
    by_kind = {
        kind: {int(row["client"]): row[kind] for row in rows} for kind, rows in scores.items()
    }
    # Of the partition, some may be held out as test samples of the client.
    sizes = dict(enumerate(run.partition.get("sizes", ()))) | _by_client(run, "train_samples")
    clients: dict[str, str] = {}
    facts: dict[str, dict[str, str]] = {}
    room = MOST_HISTORY
    for client in shown:
        if client >= codes.shape[1]:
            continue
        text = _run_lengths(codes[:, client])
        if (room := room - len(text)) < 0:
            break
        words = [
            f"{kind} {metric} {number(by_client[client])}"
            for kind, by_client in by_kind.items()
            if client in by_client
        ]
        if (size := sizes.get(client)) is not None:
            words.insert(0, counted(size, "training sample"))
        clients[str(client)] = text
        facts[str(client)] = {
            "name": client_label(client, run),
            "text": f"{', '.join(words)}." if words else "",
        }
    if not clients:
        return None
    return {
        "outcomes": names,
        "colors": [_color(code) for code in range(len(names))],
        "clients": clients,
        "facts": facts,
        "note": f"{number(len(clients))} of {number(codes.shape[1])} clients"
        if len(clients) < codes.shape[1]
        else "",
    }


def _run_lengths(codes: np.ndarray[Any, Any]) -> str:
    """Return the outcomes of a client as run lengths: ``2ab`` is a, a, b."""
    starts = np.flatnonzero(np.diff(codes, prepend=255))
    lengths = np.diff([*starts, len(codes)]).tolist()
    runs = zip(lengths, codes[starts].tolist(), strict=True)
    return "".join(f"{length if length > 1 else ''}{chr(97 + code)}" for length, code in runs)
