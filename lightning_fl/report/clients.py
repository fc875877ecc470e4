"""Sections on the clients of a run: partition, participation and accuracies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from lightning_fl.callbacks.client_table import summary
from lightning_fl.federation.dropped import CAUSES
from lightning_fl.report.figures import spread, stacked
from lightning_fl.report.lead import dropped, sampled, split_rule
from lightning_fl.report.page import Picture, Section, Table
from lightning_fl.report.run import Row, Run
from lightning_fl.report.scores import client_scores, finite, total
from lightning_fl.report.words import counted, number

#: Counts by kind and x position, the input of :func:`stacked`.
Counts = dict[str, dict[int, int]]
#: Descriptions of the kinds of :class:`PersonalizedEvaluation`.
MEANINGS = {
    "global": "the global model without local tensors of the client",
    "server": "the global model",
    "personal": "the global model after local fine-tuning",
    "kept": "the personal model of the method",
    "local": "a model trained by the client alone",
}
#: Maximum number of clients that are drawn as one bar each.
MOST_CLIENTS = 60


def partition(run: Run) -> Section | None:
    """Describe the partition of the data; None if it is unknown."""
    if not (sizes := run.partition.get("sizes")):
        return None
    ordered, classes = sorted(sizes), run.partition["classes"]
    text = (
        f"{split_rule(run)}, seed {run.partition.get('seed')}: {counted(len(sizes), 'client')} with"
        f" {number(ordered[0])} to {number(ordered[-1])} samples (median"
        f" {number(median(ordered))})"
    )
    if classes:
        few, many = min(classes), max(classes)
        text += f" of {few if few == many else f'{few} to {many}'} classes each"
        text = text.replace("of 1 classes each", "of one class each")
    caption = (
        "Top: number of samples per client. Bottom: number of samples per client and class; larger"
        " dots or darker colors are more samples."
    )
    content = run.pictures.get("partition.png")
    pictures = [Picture("partition", content, caption)] if content else []
    return Section("Partition", [text + "."], pictures)


def participation(run: Run) -> Section:
    """Show which clients were sampled, and which updates were dropped."""
    lost = {int(row["round"]): row["dropped"] for row in run.rows if row.get("dropped", 0) > 0}
    count = sum(finite(lost.values()))
    text = f"In each round {sampled(run)}."
    text += f" {dropped(run)}" if count else ""
    text += " No update was dropped." if total(run, "clients") and not count else ""
    by_panel: dict[str, Counts] = {}
    across = []
    faults = _faults_by_round(run)
    if faults or lost:
        by_panel["clients with a fault" if faults else "updates dropped"] = (
            faults or _drops_by_cause(run)
        )
        across.append("round")
    rows = [row for row in run.participation if "rounds" in row and math.isfinite(row["rounds"])]
    times = {int(row["client"]): int(row["rounds"]) for row in rows}
    if times and (len(set(times.values())) > 1 or count):
        label, xlabel, counts = _rounds_of_clients(rows, times)
        by_panel[label] = counts
        across.append(xlabel)
        text += _range_of_rounds(sorted(times.values()))
    more = (
        []
        if run.faults is not None
        else ["To simulate failing clients, add --trainer.callbacks+=ClientFaults."]
    )
    title = "Participation and faults"
    if not by_panel:
        return Section(title, [text, *more])
    caption = "Number of rounds of each client."
    if across[0] == "round":
        caption = "Faults or dropped updates per round, and number of rounds of each client."
    if faults:
        caption += (
            " Updates with dropout, crash, nan or late are dropped; blowup scales an update by a"
            " large factor."
        )
    picture = Picture.of("participation", stacked(by_panel, across), caption)
    return Section(title, [text, *more], [picture], _fault_table(run))


def _faults_by_round(run: Run) -> Counts:
    """Return the number of clients per fault and round, with faults in order of occurrence."""
    counts: dict[str, Counter[int]] = {}
    for at, _, fault in run.faults or ():
        counts.setdefault(fault, Counter())[at] += 1
    return {fault: dict(sorted(rounds.items())) for fault, rounds in counts.items()}


def _fault_table(run: Run) -> list[Table]:
    kinds = Counter(fault for _, _, fault in run.faults or ()).most_common()
    return [Table(["fault", "times"], [[kind, number(n)] for kind, n in kinds])] if kinds else []


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


def _rounds_of_clients(rows: Sequence[Row], times: Mapping[int, int]) -> tuple[str, str, Counts]:
    """Return the labels and counts of a panel: one bar per client, or a histogram if many."""
    if len(times) > MOST_CLIENTS:
        histogram = dict(sorted(Counter(times.values()).items()))
        return "clients", "rounds in which a client was sampled", {"clients": histogram}
    gone = {c: int(row.get("dropped", 0)) for c, row in zip(times, rows, strict=True)}
    came = {client: count - gone[client] for client, count in times.items()}
    return "rounds of the client", "client", {"update arrived": came, "update dropped": gone}


def _range_of_rounds(ranked: Sequence[int]) -> str:
    if ranked[0] == ranked[-1]:
        return f" Each client was sampled in {counted(ranked[0], 'round')}."
    return (
        f" Each client was sampled in {ranked[0]} to {ranked[-1]} rounds (median"
        f" {number(median(ranked))})."
    )


def accuracies(run: Run) -> Section:
    """Show the accuracy of the last round's models for each client."""
    title, (samples, scores) = "Clients", client_scores(run)
    if not scores:
        why = run.environment.get("no train_acc")
        reason = f" ({why})" if isinstance(why, str) else ""
        return Section(
            title,
            [
                f"The accuracy of each client was not measured{reason}. To measure it on local test"
                " samples, add --trainer.callbacks+=PersonalizedEvaluation and"
                " --data.init_args.local_test_size=0.2."
            ],
        )
    text = []
    if "server" in scores:
        server = summary(scores["server"], "server")
        text.append(
            f"The mean accuracy of clients on their {samples} is {number(server['mean'])}, with a"
            f" standard deviation of {number(server['std'])}. The mean of the worst tenth is"
            f" {number(server['worst'])}."
        )
    if samples == "own training samples":
        text.append(
            "Accuracy on training samples is optimistic. PersonalizedEvaluation uses local test"
            " samples (--data.init_args.local_test_size=0.2)."
        )
    tables = [_spread_table(scores), _worst_clients(run, scores)]
    return Section(title, text, [_spread_picture(samples, scores)], tables)


def _spread_picture(samples: str, scores: Mapping[str, Sequence[Row]]) -> Picture:
    sizes = {kind: [row.get("train_samples", 0) for row in rows] for kind, rows in scores.items()}
    differ = len({size for column in sizes.values() for size in column}) > 1
    values = {kind: [row[kind] for row in rows] for kind, rows in scores.items()}
    caption = f"Accuracy of the last round's models on each client's {samples}"
    caption += ", in ascending order" + ", and by number of training samples" * differ
    meanings = "; ".join(f"{kind}: {MEANINGS[kind]}" for kind in scores)
    figure = spread(values, sizes if differ else {}, samples)
    return Picture.of("clients", figure, f"{caption}. {meanings}.")


def _spread_table(scores: Mapping[str, Sequence[Row]]) -> Table:
    rows = []
    for kind, clients in scores.items():
        found, values = summary(clients, kind), [row[kind] for row in clients]
        shown = [found["mean"], found["weighted"], found["std"], median(values), min(values)]
        rows.append([kind, *map(number, [*shown, found["worst"]])])
    head = ["", "mean", "weighted mean", "std", "median", "worst", "worst tenth"]
    return Table(head, rows)


def _worst_clients(run: Run, scores: Mapping[str, Sequence[Row]]) -> Table:
    first = next(iter(scores))
    by_client = {row["client"]: row for row in run.participation}
    worst = sorted(scores[first], key=lambda row: (row[first], row["client"]))[:20]
    head = ["client", "training samples", "rounds", "updates dropped", *scores]
    if run.names:
        head.insert(1, "name")
    rows = []
    for row in worst:
        more = by_client.get(row["client"], {})
        shown = [row["client"], row.get("train_samples"), more.get("rounds"), more.get("dropped")]
        cells = [*map(number, [*shown, *(row.get(kind) for kind in scores)])]
        if run.names:
            cells.insert(1, run.names.get(int(row["client"]), ""))
        rows.append(cells)
    return Table(head, rows, f"The {len(rows)} clients with the lowest accuracy", folded=True)
