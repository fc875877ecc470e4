"""Scores of a run: final and best metrics, accuracies of clients, totals."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Literal

from lightning_fl.callbacks.client_table import KINDS, summary
from lightning_fl.federation.dropped import CAUSES
from lightning_fl.report.run import Row, Run
from lightning_fl.report.words import counted, number

#: Columns that :func:`with_derived` adds.
UP, TOTAL, TIME = "MB up", "MB up and down", "virtual time (s)"
STEPS = "local steps per client"
#: Outcomes of updates in words, in the order of their colors.
OTHER = "other causes"
OUTCOMES = ("arrived", *CAUSES.values(), OTHER)


#: Names of measures and columns of which less is better, and of which more is better.
LESS = (
    r"loss|err|mse|mae|mape|nll|perplexity"
    r"|^(updates )?dropped|^upload|^bytes|^virtual.time|^epsilon|^backdoor"
)
MORE = r"acc|au.?c|f1|precision|recall|sensitivity|specificity|score|r2|iou|dice|^worst tenth"


def direction(name: str) -> Literal["max", "min"] | None:
    """Return whether the best value of a measure or a column is the highest or the lowest.

    None, if its name does not tell.

    Example:
        >>> direction("val_acc"), direction("final val_rmse"), direction("val_x")
        ('max', 'min', None)
    """
    if re.search(LESS, name.lower()):
        return "min"
    return "max" if re.search(MORE, name.lower()) else None


def with_derived(run: Run, metric: str | None, mode: str) -> Run:
    """Return a run with the metric of its page and the derived columns."""
    rows, up, both = [], 0.0, 0.0
    for row in map(dict, run.rows):
        if row.get("clients") and "num_steps" in row:
            row[STEPS] = row["num_steps"] / row["clients"]
        if "bytes_up" in row:
            up, both = up + row["bytes_up"], both + row["bytes_up"] + row["bytes_down"]
            row |= {UP: up / 1e6, TOTAL: both / 1e6}
        if "virtual_time" in row:
            row[TIME] = row["virtual_time"]
        rows.append(row)
    return replace(run, rows=rows, metric=metric, mode=mode)


def finite(values: Iterable[float]) -> list[float]:
    """Return the finite values."""
    return [value for value in values if math.isfinite(value)]


def total(run: Run, name: str) -> float:
    """Return the sum of the finite values of a column over all rounds."""
    return sum(finite(value for _, value in run.column(name)))


def drops(run: Run) -> dict[str, dict[float, float]]:
    """Return the numbers of dropped updates by cause in words and by round."""
    by_cause = {words: dict(run.column(cause)) for cause, words in CAUSES.items()}
    by_cause[OTHER] = {
        at: count - sum(counts.get(at, 0) for counts in by_cause.values())
        for at, count in run.column("dropped")
    }
    return {cause: counts for cause, counts in by_cause.items() if sum(counts.values()) > 0}


def headline(runs: Sequence[Run]) -> tuple[str | None, str]:
    """Return the column of the main metric, and ``max`` or ``min`` for its best value."""
    if runs[0].metric is not None:
        return runs[0].metric, runs[0].mode
    names = list(dict.fromkeys(name for run in runs for name in run.columns))
    # Those of the validation first: in training, clients are measured on their own samples.
    for is_validation in (True, False):
        for part, mode in (("acc", "max"), ("loss", "min")):
            found = [n for n in names if part in n and n.startswith("val") == is_validation]
            if found := [n for n in found if n != "backdoor_acc"]:
                return min(found, key=lambda n: n != f"val_{part}"), mode  # the first of equals
    for name in names:
        if name.startswith("val") and (best := direction(name)):
            return name, best
    return None, "max"


def final_and_best(run: Run) -> tuple[float, float, int] | None:
    """Return the last and best values of the metric and the best round; None without values."""
    column = run.column(run.metric or "")
    points = [(at, value) for at, value in column if math.isfinite(value)]
    if not points:
        return None
    best = max if run.mode == "max" else min
    at, value = best(points, key=itemgetter(1))
    return column[-1][1], value, int(at)


def client_scores(run: Run) -> tuple[str, dict[str, list[Row]]]:
    """Return the name of the evaluation samples, and the rows of clients by kind."""
    table, samples = [row for row in run.clients if "unseen" not in row], "own test samples"
    if not table:
        table = [{**r, "server": r["train_acc"]} for r in run.participation if "train_acc" in r]
        samples = "own training samples"
    rows = [{"test_samples": row.get("train_samples", 1.0), **row} for row in table]
    scores = {kind: [r for r in rows if math.isfinite(r.get(kind, math.nan))] for kind in KINDS}
    return samples, {kind: rows for kind, rows in scores.items() if rows}


def client_metric(run: Run) -> str:
    """Return the name of the metric of clients."""
    return str(run.environment.get("client_metric") or "accuracy")


def unseen_clients(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the scores of clients that never train, before and after fine-tuning."""
    rows = [row for row in run.clients if "unseen" in row]
    for kind in KINDS:
        if found := summary(rows, kind):
            of = f"{counted(len(rows), 'unseen client')}, {kind}"
            yield f"{of} (worst tenth {number(found['worst'])})", number(found["mean"])
        if "hurt" in found:
            yield "unseen clients that fine-tuning made worse", f"{100 * found['hurt']:.0f} %"


def worst_decile(run: Run) -> float:
    """Return the mean score of the global model for the worst tenth of clients."""
    _, scores = client_scores(run)
    return summary(scores["server"], "server")["worst"] if "server" in scores else math.nan
