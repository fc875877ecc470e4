"""Summary, warnings and key figures at the top of a page."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_fl import callbacks as known_callbacks
from lightning_fl.report.groups import identity
from lightning_fl.report.run import Run
from lightning_fl.report.scores import (
    STEPS,
    client_scores,
    final_and_best,
    finite,
    total,
    worst_decile,
)
from lightning_fl.report.words import counted, listed, number, seconds, size, span

#: Remedy for a test that does not fit its run.
AGAIN = "To test it as it is now, run lightning-fl test with --config config.yaml of the run."


def warnings(run: Run) -> Iterator[str]:
    """Yield warnings: an unfinished or resumed run, another test, unreadable files."""
    if not run.is_finished:
        state = run.environment.get("state", "started")
        why = "interrupted or still running" if state == "started" else f"ended with {state}"
        of = f" of {run.planned}" if run.planned else ""
        yield (
            f"{run.name} is unfinished, {why}: {run.rounds}{of} rounds are done. To resume it, run"
            " fit with --ckpt_path=last."
        )
    if differing := run.test.get("differing options"):
        changes = [f"{name} is {now}, was {was}" for name, (was, now) in differing.items()]
        yield f"{run.name} was tested with other options: {listed(changes, 5, '; ')}. {AGAIN}"
    at, last = run.test.get("round"), f"{run.config.get('checkpoint.filename')}.ckpt"
    if at not in (None, run.rounds) and run.test["checkpoint"] == last:
        yield f"{run.name} was tested after round {at} of {run.rounds}. {AGAIN}"
    yield from (f"{run.name} was {resumed}." for resumed in run.resumed)
    yield from (f"{run.name}: {note}" for note in run.notes)


def setting(run: Run) -> Iterator[str]:
    """Yield phrases on the setting of a run that has the columns of ``with_derived``."""
    environment, config = run.environment, run.config
    if sizes := run.partition.get("sizes"):
        yield (
            f"{counted(len(sizes), 'client')}, {counted(sum(sizes), 'sample')},"
            f" split by {split_rule(run)}"
        )
    if held := config.get("data.local_test_size"):
        yield f"{held:.0%} of each client's samples for its own test"
    yield f"{sampled(run)} per round"
    if len(steps := {value for _, value in run.column(STEPS)}) == 1:
        yield counted(steps.pop(), "local step")
    if batch := environment.get("batch_size", config.get("data.batch_size")):
        yield f"batches of {batch}"
    if network := environment.get("network") or config.get("model.net"):
        parameters = environment.get("parameters")
        yield network + (f" with {counted(parameters, 'parameter')}" if parameters else "")
    for part in ("aggregator", "policy"):
        if rule := environment.get(part) or identity(run).get(f"federation.{part}"):
            yield rule.partition("(")[0]
    yield from _callbacks(config)


def sampled(run: Run) -> str:
    """Return the number of clients sampled per round, and of all clients."""
    counts = finite(value for _, value in run.column("clients"))
    clients = len(run.partition.get("sizes", ()))
    return f"{span(counts or [0])} of {number(clients) if clients else 'the'} clients"


def _callbacks(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the callbacks of a config with their non-default options."""
    for key, name in config.items():
        if not re.fullmatch(r"trainer\.callbacks\.\d+", key):
            continue
        known = getattr(known_callbacks, name, None)
        defaults = inspect.signature(known).parameters if known else {}
        options = {k.removeprefix(f"{key}."): v for k, v in config.items() if f"{key}." in k}
        changed = [
            f"{option}={value}"
            for option, value in options.items()
            if value is not None and (option not in defaults or defaults[option].default != value)
        ]
        yield f"{name}({', '.join(changed)})" if changed else name


def dropped(run: Run) -> str:
    """Return sentences on the dropped updates: how many, and clients that were never used."""
    text = f"{number(total(run, 'dropped'))} of {counted(total(run, 'clients'), 'client update')}"
    never = [
        f"{client_label(int(row['client']), run)} in {number(row['rounds'])} rounds"
        for row in run.participation
        if row.get("rounds", 0) > 1 and row["dropped"] == row["rounds"]
    ]
    always = f" Each time dropped: {listed(never, 10)}." if never else ""
    return f"{text} were dropped.{always}"


def client_label(client: int, run: Run) -> str:
    """Return the id of a client, and its name if it has one."""
    name = run.names.get(client)
    return f"client {client}" + (f" ({name[:40]})" if name else "")


def split_rule(run: Run) -> str:
    """Return the partition rule with its parameters."""
    inside = ", ".join(f"{name}={value}" for name, value in run.partition["parameters"].items())
    return f"{run.partition['rule']}({inside})"


def key_figures(run: Run) -> Iterator[tuple[str, str]]:
    """Yield names and values of the key figures of a run."""
    yield "rounds", f"{run.rounds} of {run.planned}" if run.planned else f"{run.rounds}"
    if judged := final_and_best(run):
        at = int(run.column(run.metric or "")[-1][0])
        where = "" if at == run.rounds else f" (round {at})"
        yield f"final {run.metric}{where}", number(judged[0])
        yield f"best {run.metric} (round {judged[2]})", number(judged[1])
    samples, scores = client_scores(run)
    if "server" in scores:
        yield f"worst tenth of clients, {samples}", number(worst_decile(run))
    if asked := total(run, "clients"):
        yield "updates dropped", f"{number(total(run, 'dropped'))} of {number(asked)}"
    up, down = total(run, "bytes_up"), total(run, "bytes_down")
    if up + down:
        yield f"upload {size(up)}, download {size(down)}", size(up + down)
    if times := run.column("virtual_time"):
        yield "virtual time", seconds(times[-1][1])
    if epsilon := run.column("epsilon"):
        delta = "".join(f" with delta {number(value)}" for _, value in run.column("delta")[-1:])
        spent = epsilon[-1][1]
        none = "no noise, no privacy"
        yield f"client-level epsilon{delta}", number(spent) if math.isfinite(spent) else none
    if hits := run.column("backdoor_acc"):
        yield "success of the backdoor", f"{number(100 * hits[-1][1])} %"
