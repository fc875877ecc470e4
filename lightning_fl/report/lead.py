"""Summary and key figures at the top of a page."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_fl import callbacks as known_callbacks
from lightning_fl.report.groups import identity
from lightning_fl.report.run import Run
from lightning_fl.report.scores import (
    STEPS,
    client_scores,
    drops,
    final_and_best,
    headline,
    total,
    worst_decile,
)
from lightning_fl.report.words import counted, listed, number, seconds, size, span


def warnings(runs: Sequence[Run]) -> list[str]:
    """Return warnings: unfinished or resumed runs, other tests, unreadable files."""
    texts = []
    for run in runs:
        if not run.is_finished:
            of = f" of {run.planned}" if run.planned else ""
            state = run.environment.get("state", "started")
            why = (
                "it was interrupted or is still running"
                if state == "started"
                else f"it ended with {state}"
            )
            texts.append(
                f"{run.name} is unfinished: {counted(run.rounds, 'round')}{of} done; {why}. To"
                " resume it, run fit with --ckpt_path=last."
            )
        if differing := run.test.get("differing"):
            texts.append(
                f"{run.name} was tested with other options than those of the fit:"
                f" {listed(differing, 5, '; ')}. To use the same options, run test with"
                " --config config.yaml of the run."
            )
        last = f"{run.config.get('checkpoint.filename')}.ckpt"
        at = run.test.get("round")
        if at not in (None, run.rounds) and run.test["checkpoint"] == last:
            texts.append(
                f"{run.name} was tested after round {at} of {run.rounds}. To test the last round,"
                " run test with --config config.yaml of the run."
            )
        texts += [f"{run.name} was {resumed}." for resumed in run.resumed]
        texts += [f"{run.name}: {note}" for note in run.notes]
    return texts


def sampled(run: Run) -> str:
    """Return a clause on the number of clients sampled per round."""
    counts = sorted({int(v) for _, v in run.column("clients") if math.isfinite(v)})
    clients = len(run.partition.get("sizes", run.participation))
    if not counts:
        return "an unknown number of clients was sampled"
    if counts == [clients]:
        return f"all {clients} were sampled" if clients > 1 else "its client was sampled"
    return f"{span(counts)} of {number(clients) if clients else 'the'} clients were sampled"


def setting(run: Run) -> Iterable[str]:
    """Yield sentences on the setting of a run that has the columns of ``with_derived``."""
    environment, config = run.environment, run.config
    if sizes := run.partition.get("sizes"):
        held = config.get("data.local_test_size")
        is_held = isinstance(held, float) and held > 0
        tests = f", {held:.0%} of each client's for its own test" if is_held else ""
        yield (
            f"{counted(len(sizes), 'client')} hold {counted(sum(sizes), 'sample')}{tests}, split by"
            f" {split_rule(run)}."
        )
    steps = _constant(run.column(STEPS))
    work = f", each with {counted(steps, 'local step')}" if steps else ""
    batch = environment.get("batch_size", config.get("data.batch_size"))
    if isinstance(batch, int):
        work += f"{' on' if steps else ', with'} batches of {batch}"
    yield f"In each of {counted(run.rounds, 'round')} {sampled(run)}{work}."
    network = environment.get("network") or config.get("model.net") or environment.get("module")
    rule = _class(environment.get("aggregator")) or identity(run).get("federation.aggregator")
    parameters = environment.get("parameters")
    if network:
        of = f" with {counted(parameters, 'parameter')}" if isinstance(parameters, int) else ""
        yield f"The model is {network}{of}."
    if rule:
        policy = _class(environment.get("policy")) or identity(run).get("federation.policy")
        yield f"{rule} aggregates the client updates" + (
            f"; {policy} sets the hyperparameters." if policy else "."
        )
    if callbacks := list(_callbacks(config)):
        yield f"Callbacks: {', '.join(callbacks)}."
    if run.is_finished and run.planned is not None and run.rounds < run.planned:
        yield f"The run was stopped before the maximum of {number(run.planned)} rounds."


def _callbacks(config: Mapping[str, Any]) -> Iterable[str]:
    """Yield the callbacks of a config with their non-default options."""
    for key, name in config.items():
        if not re.fullmatch(r"trainer\.callbacks\.\d+", key):
            continue
        known = getattr(known_callbacks, str(name), None)
        defaults = inspect.signature(known).parameters if isinstance(known, type) else {}
        options = {k.removeprefix(f"{key}."): v for k, v in config.items() if f"{key}." in k}
        changed = [
            f"{option}={value}"
            for option, value in options.items()
            if value is not None and (option not in defaults or defaults[option].default != value)
        ]
        yield f"{name}({', '.join(changed)})" if changed else str(name)


def outcome(run: Run) -> Iterable[str]:
    """Yield sentences on the results of a run."""
    name, best = headline([run])
    if judged := final_and_best(run, name, best):
        last, top, at = judged
        final, _ = run.column(name or "")[-1]
        where = "the last round" if final == run.rounds else f"round {number(final)}"
        yield f"{name} was {number(last)} in {where}, best in round {at} ({number(top)})."
    if up := total(run, "bytes_up"):
        yield f"Clients uploaded {size(up)} and downloaded {size(total(run, 'bytes_down'))}."
    if total(run, "dropped"):
        yield dropped(run)
    if epsilon := run.column("epsilon"):
        spent, delta = epsilon[-1][1], run.column("delta")
        also = f" with delta {number(delta[-1][1])}" if delta else ""
        yield (
            f"Client-level privacy over all rounds: epsilon {number(spent)}{also}."
            if math.isfinite(spent)
            else "There is no client-level privacy, because no noise was added."
        )
    if hits := run.column("backdoor_acc"):
        yield (
            f"The backdoor was successful on {number(100 * hits[-1][1])} % of the validation"
            " samples of other classes."
        )


def dropped(run: Run) -> str:
    """Return sentences on the dropped updates: how many, why, and clients that were never used."""
    by_cause = ", ".join(f"{number(count)} {words}" for words, count in drops(run).items())
    text = (
        f"{number(total(run, 'dropped'))} of {counted(total(run, 'clients'), 'client update')} were"
        f" dropped{f' ({by_cause})' if by_cause else ''}."
    )
    never = [
        f"{client_label(int(row['client']), run)} in {number(row['rounds'])} rounds"
        for row in run.participation
        if row.get("rounds", 0) > 1 and row.get("dropped") == row["rounds"]
    ]
    return text + (f" Each time dropped: {listed(never, 10)}." if never else "")


def client_label(client: int, run: Run) -> str:
    """Return the id of a client, and its name if it has one."""
    name = run.names.get(client)
    return f"client {client}" + (f" ({name[:40]})" if name else "")


def split_rule(run: Run) -> str:
    """Return the partition rule with its parameters."""
    parameters = run.partition.get("parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    inside = ", ".join(f"{name}={value}" for name, value in parameters.items())
    return f"{run.partition.get('rule')}({inside})"


def _class(described: Any) -> str:
    return described.partition("(")[0] if isinstance(described, str) else ""


def _constant(points: Sequence[tuple[float, float]]) -> float | None:
    values = {value for _, value in points}
    return values.pop() if len(values) == 1 and all(map(math.isfinite, values)) else None


def key_figures(run: Run) -> Iterable[tuple[str, str]]:
    """Yield names and values of the key figures of a run."""
    yield "rounds", f"{run.rounds} of {run.planned}" if run.planned else f"{run.rounds}"
    name, best = headline([run])
    if judged := final_and_best(run, name, best):
        yield f"final {name}", number(judged[0])
        yield f"best {name} (round {judged[2]})", number(judged[1])
    samples, scores = client_scores(run)
    if "server" in scores:
        yield f"worst tenth of clients, {samples}", number(worst_decile(run))
    if asked := total(run, "clients"):
        yield "updates dropped", f"{number(total(run, 'dropped'))} of {number(asked)}"
    if moved := total(run, "bytes_up") + total(run, "bytes_down"):
        yield "upload and download", size(moved)
    if times := run.column("virtual_time"):
        yield "virtual time", seconds(times[-1][1])
    if epsilon := run.column("epsilon"):
        yield "epsilon", number(epsilon[-1][1])
