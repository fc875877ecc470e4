"""What is said of a run: scores, totals, alarms, warnings and key figures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Literal

from lightning_fl.callbacks.client_table import KINDS, summary
from lightning_fl.federation.dropped import CAUSES
from lightning_fl.partition import Manifest
from lightning_fl.report.run import Row, Run
from lightning_fl.report.words import counted, listed, number, seconds, size, span

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


def total(run: Run, name: str) -> float:
    """Return the sum of the finite values of a column over all rounds."""
    return sum(filter(math.isfinite, dict(run.column(name)).values()))


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
    names = [name for name in names if name != "backdoor_acc"]
    # Those of the validation first: in training, clients are measured on their own samples.
    for is_validation in (True, False):
        for part, mode in (("acc", "max"), ("loss", "min")):
            if found := [n for n in names if part in n and n.startswith("val") == is_validation]:
                return min(found, key=lambda n: n != f"val_{part}"), mode  # the first of equals
    for name in names:
        if name.startswith("val") and (best := direction(name)):
            return name, best
    return None, "max"


def final_and_best(run: Run) -> tuple[float, float, int] | None:
    """Return the last and best values of the metric and the best round; None without values.

    The best value is NaN if none is finite.
    """
    if not (column := run.column(run.metric or "")):
        return None
    points = [(value, at) for at, value in column if math.isfinite(value)] or [(math.nan, 0.0)]
    value, at = (max if run.mode == "max" else min)(points, key=itemgetter(0))
    return column[-1][1], value, int(at)


def client_scores(run: Run) -> tuple[str, dict[str, list[Row]]]:
    """Return the name of the evaluation samples, and the rows of clients by kind."""
    table, samples = [row for row in run.clients if "unseen" not in row], "own test samples"
    if not table:
        table = [{**r, "server": r["train_acc"]} for r in run.participation if "train_acc" in r]
        samples = "own training samples"
    elif (at := table[0].get("round", run.rounds)) != run.rounds:  # the run has gone on
        samples += f" after round {number(at)}"
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


#: Share of its rounds in which a client may be dropped without an alarm.
MOST_LOST = 0.1
#: Remedy for a test that does not fit its run.
AGAIN = "To test it as it is now, run lightning-fl test with --config config.yaml of the run."


def alarms(run: Run) -> Iterator[str]:
    """Yield why the results of a run are doubtful: its rounds kept the model or lost a client."""
    if kept := [number(at) for at, _ in run.column("kept")]:
        rounds = f"{counted(len(kept), 'round')}: {listed(kept, 10)}"
        yield f"{run.name} kept the global model in {rounds}."
    if often := [each for each in run.outcomes.lost() if each[1] > MOST_LOST * each[2]]:
        named = [f"{client_label(c, run)} in {n} of {sampled}" for c, n, sampled in often]
        yield (
            f"{run.name} dropped clients in more than {MOST_LOST:.0%} of their rounds:"
            f" {listed(named, 10)}."
        )


def warnings(run: Run) -> Iterator[str]:
    """Yield warnings: an unfinished or resumed run, a test of other options or another round."""
    if not run.is_finished:
        yield (
            f"{run.name} is unfinished ({run.environment['state']}): {rounds_done(run)} rounds are"
            " done. To resume it, run fit with --ckpt_path=last."
        )
    if differing := run.test.get("differing options"):
        changes = [f"{name} is {now}, was {was}" for name, (was, now) in differing.items()]
        yield f"{run.name} was tested with other options: {listed(changes, 5, '; ')}. {AGAIN}"
    at, last = run.test.get("round"), f"{run.config.get('checkpoint.filename')}.ckpt"
    if at not in (None, run.rounds) and run.test["checkpoint"] == last:
        yield f"{run.name} was tested after round {at} of {run.rounds}. {AGAIN}"
    yield from (f"{run.name} was {resumed}." for resumed in run.resumed)


def setting(run: Run) -> Iterator[str]:
    """Yield phrases on the setting of a run that has the columns of ``with_derived``."""
    environment, config = run.environment, run.config
    if run.partition is not None:
        yield (
            f"{counted(len(run.sizes), 'client')}, {counted(sum(run.sizes), 'sample')},"
            f" split by {split_rule(run.partition)}"
        )
    if held := config.get("data.local_test_size"):
        yield f"{held:.0%} of each client's samples for its own test"
    yield f"{sampled(run)} per round"
    if len(steps := {value for _, value in run.column(STEPS)}) == 1:
        yield counted(steps.pop(), "local step")
    if batch := environment.get("batch_size"):
        yield f"batches of {batch}"
    if network := environment.get("network"):
        yield f"{network} with {counted(environment['parameters'], 'parameter')}"
    for part in ("aggregator", "policy"):
        if rule := environment.get(part):
            yield rule.partition("(")[0]
    if local := environment.get("local_parameters"):
        yield f"local parameters {listed(local, 3)}"
    yield from (config[key] for key in config if re.fullmatch(r"trainer\.callbacks\.\d+", key))


def sampled(run: Run) -> str:
    """Return the number of clients sampled per round, and of all clients."""
    counts = [value for _, value in run.column("clients")]
    return f"{span(counts or [0])} of {number(len(run.sizes)) if run.sizes else 'the'} clients"


def client_label(client: int, run: Run) -> str:
    """Return the id of a client, and its name if it has one."""
    name = run.names.get(client)
    return f"client {client}" + (f" ({name[:40]})" if name else "")


def split_rule(partition: Manifest) -> str:
    """Return the rule of a partition with its parameters."""
    inside = ", ".join(f"{name}={value}" for name, value in partition.parameters.items())
    return f"{partition.rule}({inside})"


def rounds_done(run: Run) -> str:
    """Return the number of completed rounds, and of planned ones if it is known."""
    return f"{run.rounds} of {run.planned}" if run.planned else f"{run.rounds}"


def key_figures(run: Run) -> Iterator[tuple[str, str]]:
    """Yield names and values of the key figures of a run."""
    yield "rounds", rounds_done(run)
    if judged := final_and_best(run):
        at = int(run.column(run.metric or "")[-1][0])
        where = "" if at == run.rounds else f" (round {at})"
        yield f"final {run.metric}{where}", number(judged[0])
        if judged[2]:
            yield f"best {run.metric} (round {judged[2]})", number(judged[1])
    for name, value in run.test.get("metrics", {}).items():
        yield f"{name} of {run.test['checkpoint']}", number(value)
    samples, scores = client_scores(run)
    if "server" in scores:
        yield f"worst tenth of clients, {samples}", number(worst_decile(run))
    yield from unseen_clients(run)
    if asked := total(run, "clients"):
        yield "updates dropped", f"{number(total(run, 'dropped'))} of {number(asked)}"
    up, down = total(run, "bytes_up"), total(run, "bytes_down")
    if up + down:
        yield f"upload {size(up)}, download {size(down)}", size(up + down)
    if times := run.column("virtual_time"):
        yield "virtual time", seconds(times[-1][1])
    if (epsilon := run.column("epsilon")) and (deltas := run.column("delta")):
        spent, delta = epsilon[-1][1], number(deltas[-1][1])
        text = number(spent) if math.isfinite(spent) else "no noise, no privacy"
        yield f"client-level epsilon with delta {delta}", text
    if hits := run.column("backdoor_acc"):
        yield "success of the backdoor", f"{number(100 * hits[-1][1])} %"
