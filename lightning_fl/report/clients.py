"""Sections about the clients of one run: their samples, their rounds, their accuracies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from lightning_fl.callbacks.personalized import summary
from lightning_fl.federation.dropped import CAUSES
from lightning_fl.report.figures import spread, stacked
from lightning_fl.report.lead import dropped, sampled, split_rule
from lightning_fl.report.page import Picture, Section, Table
from lightning_fl.report.run import Row, Run
from lightning_fl.report.scores import client_scores, finite, total
from lightning_fl.report.words import counted, number

#: Counts by kind and place, as :func:`stacked` draws them.
Counts = dict[str, dict[int, int]]
#: What each kind of :class:`PersonalizedEvaluation` is, for the reader.
MEANINGS = {
    "server": "the server's model as it is",
    "personal": "after some local steps",
    "kept": "the personal model that the optimizer keeps",
    "local": "training alone",
}
#: More clients than these are not drawn one by one.
MOST_CLIENTS = 60


def partition(run: Run) -> Section | None:
    """Say who holds what; None where that is not known."""
    if not (sizes := run.partition.get("sizes")):
        return None
    ordered, classes = sorted(sizes), run.partition["classes"]
    text = (
        f"{split_rule(run)}, seed {run.partition.get('seed')}: {counted(len(sizes), 'client')} with"
        f" {number(ordered[0])} to {number(ordered[-1])} samples, {number(median(ordered))} at the"
        " median"
    )
    if classes:
        few, many = min(classes), max(classes)
        text += f", of {few if few == many else f'{few} to {many}'} classes each"
        text = text.replace("of 1 classes each", "of one class each")
    caption = (
        "Above, how many samples each client holds; below, of which classes, the larger or darker"
        " the more."
    )
    content = run.pictures.get("partition.png")
    pictures = [Picture("partition", content, caption)] if content else []
    return Section("Partition", [text + "."], pictures)


def participation(run: Run) -> Section:
    """Draw which clients were sampled, and which updates were dropped."""
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
    more = [] if run.faults is not None else ["--trainer.callbacks+=ClientFaults lets some fail."]
    title = "Participation and faults"
    if not by_panel:
        return Section(title, [text, *more])
    caption = "How often each client was sampled."
    if across[0] == "round":
        caption = "In which rounds it happened, and how often each client was sampled."
    if faults:
        caption += (
            " An update with dropout, crash, nan or late is dropped; blowup sends one that is far"
            " too large."
        )
    picture = Picture.of("participation", stacked(by_panel, across), caption)
    return Section(title, [text, *more], [picture], _fault_table(run))


def _faults_by_round(run: Run) -> Counts:
    """Return how many clients had each fault, by round; the kinds as they first occurred."""
    counts: dict[str, Counter[int]] = {}
    for at, _, fault in run.faults or ():
        counts.setdefault(fault, Counter())[at] += 1
    return {fault: dict(sorted(rounds.items())) for fault, rounds in counts.items()}


def _fault_table(run: Run) -> list[Table]:
    kinds = Counter(fault for _, _, fault in run.faults or ()).most_common()
    return [Table(["fault", "times"], [[kind, number(n)] for kind, n in kinds])] if kinds else []


def _drops_by_cause(run: Run) -> Counts:
    """Return how many updates were dropped in each round, by cause where all causes are known."""
    counts = {
        words: {int(at): int(n) for at, n in run.column(cause) if math.isfinite(n) and n > 0}
        for cause, words in {**CAUSES, "dropped": "dropped"}.items()
    }
    every = counts.pop("dropped")
    by_cause = {words: rounds for words, rounds in counts.items() if rounds}
    known = sum(sum(rounds.values()) for rounds in by_cause.values())
    return by_cause if known == sum(every.values()) else {"dropped": every}


def _rounds_of_clients(rows: Sequence[Row], times: Mapping[int, int]) -> tuple[str, str, Counts]:
    """Return both labels of a panel and its counts: a bar per client, or a histogram of many."""
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
        f" A client was sampled in {ranked[0]} to {ranked[-1]} rounds, {number(median(ranked))}"
        " at the median."
    )


def accuracies(run: Run) -> Section:
    """Draw how well the models of the last round do for each client."""
    title, (samples, scores) = "Clients", client_scores(run)
    if not scores:
        why = run.environment.get("no train_acc")
        reason = f" ({why})" if isinstance(why, str) else ""
        return Section(
            title,
            [
                f"Models were not measured on each client's samples{reason}."
                " --trainer.callbacks+=PersonalizedEvaluation with"
                " --data.init_args.local_test_size=0.2 does, on test samples."
            ],
        )
    text = []
    if "server" in scores:
        server = summary(scores["server"], "server")
        text.append(
            f"On their {samples}, clients have an accuracy of {number(server['mean'])} on average,"
            f" with a standard deviation of {number(server['std'])} between them; the worst tenth"
            f" has {number(server['worst'])}."
        )
    if samples == "own training samples":
        text.append(
            "Training samples flatter a model; PersonalizedEvaluation measures on test samples"
            " (--data.init_args.local_test_size=0.2)."
        )
    tables = [_spread_table(scores), _worst_clients(run, scores)]
    return Section(title, text, [_spread_picture(samples, scores)], tables)


def _spread_picture(samples: str, scores: Mapping[str, Sequence[Row]]) -> Picture:
    sizes = {kind: [row.get("train_samples", 0) for row in rows] for kind, rows in scores.items()}
    differ = len({size for column in sizes.values() for size in column}) > 1
    values = {kind: [row[kind] for row in rows] for kind, rows in scores.items()}
    caption = f"The accuracy of the last round's models on each client's {samples}"
    caption += ", the worst client first" + "; against its training samples" * differ
    meanings = "; ".join(f"{kind}: {MEANINGS[kind]}" for kind in scores)
    figure = spread(values, sizes if differ else {}, samples)
    return Picture.of("clients", figure, f"{caption}. {meanings}.")


def _spread_table(scores: Mapping[str, Sequence[Row]]) -> Table:
    rows = []
    for kind, clients in scores.items():
        found, values = summary(clients, kind), [row[kind] for row in clients]
        shown = [found["mean"], found["weighted"], found["std"], median(values), min(values)]
        rows.append([kind, *map(number, [*shown, found["worst"]])])
    head = ["", "mean", "mean by samples", "std", "median", "worst", "worst tenth"]
    return Table(head, rows)


def _worst_clients(run: Run, scores: Mapping[str, Sequence[Row]]) -> Table:
    first = next(iter(scores))
    by_client = {row["client"]: row for row in run.participation}
    worst = sorted(scores[first], key=lambda row: (row[first], row["client"]))[:20]
    head = ["client", "training samples", "rounds", "updates dropped", *scores]
    rows = []
    for row in worst:
        more = by_client.get(row["client"], {})
        shown = [row["client"], row.get("train_samples"), more.get("rounds"), more.get("dropped")]
        rows.append([*map(number, [*shown, *(row.get(kind) for kind in scores)])])
    return Table(head, rows, f"The {len(rows)} clients with the lowest accuracy", folded=True)
