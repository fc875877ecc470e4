"""Summary, warnings and key figures at the top of a page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from lightning_fl.partition import Manifest
from lightning_fl.report.run import Run
from lightning_fl.report.scores import (
    STEPS,
    client_scores,
    final_and_best,
    finite,
    total,
    unseen_clients,
    worst_decile,
)
from lightning_fl.report.words import counted, listed, number, seconds, size, span

#: Share of its rounds in which a client may be dropped without an alarm.
MOST_LOST = 0.1
#: Remedy for a test that does not fit its run.
AGAIN = "To test it as it is now, run lightning-fl test with --config config.yaml of the run."


def alarms(run: Run) -> Iterator[str]:
    """Yield why the results of a run are doubtful: its rounds kept the model or lost a client."""
    if kept := [number(at) for at, _ in run.column("kept")]:
        rounds = f"{counted(len(kept), 'round')}: {listed(kept, 10)}"
        yield f"{run.name} kept the global model in {rounds}."
    lost = [] if run.outcomes is None else run.outcomes.lost()
    if often := [each for each in lost if each[1] > MOST_LOST * each[2]]:
        named = [f"{client_label(c, run)} in {n} of {sampled}" for c, n, sampled in often]
        yield (
            f"{run.name} dropped clients in more than {MOST_LOST:.0%} of their rounds:"
            f" {listed(named, 10)}."
        )


def warnings(run: Run) -> Iterator[str]:
    """Yield warnings: an unfinished or resumed run, a test of other options or another round."""
    if not run.is_finished:
        of = f" of {run.planned}" if run.planned else ""
        yield (
            f"{run.name} is unfinished ({run.environment['state']}): {run.rounds}{of} rounds are"
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
    yield from (config[key] for key in config if re.fullmatch(r"trainer\.callbacks\.\d+", key))


def sampled(run: Run) -> str:
    """Return the number of clients sampled per round, and of all clients."""
    counts = finite(value for _, value in run.column("clients"))
    return f"{span(counts or [0])} of {number(len(run.sizes)) if run.sizes else 'the'} clients"


def client_label(client: int, run: Run) -> str:
    """Return the id of a client, and its name if it has one."""
    name = run.names.get(client)
    return f"client {client}" + (f" ({name[:40]})" if name else "")


def split_rule(partition: Manifest) -> str:
    """Return the rule of a partition with its parameters."""
    inside = ", ".join(f"{name}={value}" for name, value in partition.parameters.items())
    return f"{partition.rule}({inside})"


def key_figures(run: Run) -> Iterator[tuple[str, str]]:
    """Yield names and values of the key figures of a run."""
    yield "rounds", f"{run.rounds} of {run.planned}" if run.planned else f"{run.rounds}"
    if judged := final_and_best(run):
        at = int(run.column(run.metric or "")[-1][0])
        where = "" if at == run.rounds else f" (round {at})"
        yield f"final {run.metric}{where}", number(judged[0])
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
    if epsilon := run.column("epsilon"):
        spent, delta = epsilon[-1][1], number(run.column("delta")[-1][1])
        text = number(spent) if math.isfinite(spent) else "no noise, no privacy"
        yield f"client-level epsilon with delta {delta}", text
    if hits := run.column("backdoor_acc"):
        yield "success of the backdoor", f"{number(100 * hits[-1][1])} %"
