"""Scores of a run: final and best metrics, accuracies of clients, totals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from lightning_fl.callbacks.client_table import KINDS, summary
from lightning_fl.federation.dropped import CAUSES
from lightning_fl.report.run import Row, Run

#: Columns that :func:`with_derived` adds.
UP, TOTAL, STEPS = "MB up", "MB up and down", "local steps per client"


def with_derived(run: Run) -> Run:
    """Return a run with added columns: mean local steps per client and cumulative traffic."""
    rows, up, both = [], 0.0, 0.0
    for row in run.rows:
        more = {}
        if row.get("clients", 0) > 0 and "num_steps" in row:
            more[STEPS] = row["num_steps"] / row["clients"]
        sent = sum(finite([row.get("bytes_up", 0.0)]))
        up, both = up + sent, both + sent + sum(finite([row.get("bytes_down", 0.0)]))
        if "bytes_up" in row:
            more |= {UP: up / 1e6, TOTAL: both / 1e6}
        rows.append(row | more)
    return replace(run, rows=rows)


def finite(values: Iterable[float]) -> list[float]:
    """Return the finite values."""
    return [value for value in values if math.isfinite(value)]


def total(run: Run, name: str) -> float:
    """Return the sum of the finite values of a column over all rounds."""
    return sum(finite(value for _, value in run.column(name)))


def drops(run: Run) -> dict[str, float]:
    """Return the numbers of dropped updates by cause in words, in the order of the causes."""
    counts = {words: total(run, cause) for cause, words in CAUSES.items()}
    counts["other causes"] = total(run, "dropped") - sum(counts.values())
    return {words: count for words, count in counts.items() if count > 0}


def headline(runs: Sequence[Run]) -> tuple[str | None, Callable[..., Any]]:
    """Return the column of the main metric, and ``max`` or ``min`` for its best value."""
    if runs and runs[0].metric is not None:
        return runs[0].metric, min if runs[0].mode == "min" else max
    names = list(dict.fromkeys(name for run in runs for name in run.columns))
    kinds: tuple[tuple[str, Callable[..., Any]], ...] = (("acc", max), ("loss", min))
    # Those of the validation first: in training, clients are measured on their own samples.
    for is_validation in (True, False):
        for part, best in kinds:
            found = [n for n in names if part in n and n.startswith("val") == is_validation]
            found = [n for n in found if n != "backdoor_acc"]
            if found:
                return min(found, key=lambda n: n != f"val_{part}"), best  # the first of equals
    return None, max


def final_and_best(
    run: Run, name: str | None, best: Callable[..., Any]
) -> tuple[float, float, int] | None:
    """Return the last and best values of a column and the best round; None without values."""
    column = run.column(name) if name else []
    points = [(at, value) for at, value in column if math.isfinite(value)]
    if not points:
        return None
    at, value = best(points, key=itemgetter(1))
    return column[-1][1], value, int(at)


def client_scores(run: Run) -> tuple[str, dict[str, list[Row]]]:
    """Return the name of the evaluation samples, and the rows of clients by kind."""
    table, samples = run.clients, "own test samples"
    if not table:
        table = [{**r, "server": r["train_acc"]} for r in run.participation if "train_acc" in r]
        samples = "own training samples"
    rows = [{"test_samples": row.get("train_samples", 1.0), **row} for row in table]
    scores = {kind: [r for r in rows if math.isfinite(r.get(kind, math.nan))] for kind in KINDS}
    return samples, {kind: rows for kind, rows in scores.items() if rows}


def client_metric(run: Run) -> str:
    """Return the name of the metric of clients."""
    return str(run.environment.get("client_metric") or "accuracy")[:40]


def worst_decile(run: Run) -> float:
    """Return the mean score of the global model for the worst tenth of clients."""
    _, scores = client_scores(run)
    return summary(scores["server"], "server")["worst"] if "server" in scores else math.nan
