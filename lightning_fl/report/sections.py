"""What a report says, section by section."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from lightning_fl import callbacks as callbacks_there
from lightning_fl.callbacks.personalized import KINDS, summary
from lightning_fl.federation.dropped import CAUSES
from lightning_fl.report.figures import MOST_LINES, MOST_PANELS, Line, lines, png, spread, stacked
from lightning_fl.report.groups import Group, differences, identity, mean_and_std
from lightning_fl.report.run import Row, Run

#: Columns of the table of rounds that have a place of their own in a report.
KNOWN = {"round", "clients", "dropped", "num_samples", "num_steps", "bytes_up", "bytes_down"}
KNOWN |= {"virtual_time", *CAUSES}
UP, TOTAL = "MB up", "MB up and down"
SENT, TIME = "MB so far", "virtual time (s)"
STEPS = "local steps a client"
#: A space at which no line breaks.
NBSP = "\u00a0"
#: What each kind of :class:`PersonalizedEvaluation` is, for the reader.
MEANINGS = {
    "server": "the server's model as it is",
    "personal": "after some local steps",
    "kept": "the personal model that the optimiser keeps",
    "local": "training alone",
}


@dataclass(frozen=True)
class Picture:
    """A picture with its caption, and the name of its file."""

    name: str
    content: bytes
    caption: str


@dataclass(frozen=True)
class Table:
    """A table; a long one is folded."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """A part of a report."""

    title: str
    text: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    #: Title and text of what is shown word by word, folded.
    verbatim: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Report:
    """What a page shows."""

    title: str
    lead: Sequence[str]
    figures: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    warnings: Sequence[str] = field(default=())


# --- numbers and words ----------------------------------------------------------------------------


def number(value: Any) -> str:
    """Return a number for a reader.

    Example:
        >>> number(0.123456), number(1234567.0), number(float("nan")), number(None)
        ('0.1235', '1,234,567', 'not finite', '-')
    """
    if value is None:
        return "-"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if not math.isfinite(value):
        return "not finite"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def megabytes(value: float) -> str:
    """Return bytes for a reader.

    Example:
        >>> megabytes(999), megabytes(18_024_000), megabytes(3.2e9)
        ('999 B', '18.0 MB', '3.2 GB')
    """
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{number(value)} B"


def seconds(value: float) -> str:
    """Return a time for a reader.

    Example:
        >>> seconds(7.25), seconds(150), seconds(7500)
        ('7.25 s', '2 min 30 s', '2 h 5 min')
    """
    if not value >= 60:
        return f"{number(value)} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def counted(count: float, name: str) -> str:
    """Return a count with its noun.

    Example:
        >>> counted(1, "round"), counted(3, "update")
        ('1 round', '3 updates')
    """
    return f"{number(count)} {name}{'s' * (count != 1)}"


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _sum(run: Run, name: str) -> float:
    return sum(_finite(value for _, value in run.column(name)))


def headline(runs: Sequence[Run]) -> tuple[str | None, Callable[..., Any]]:
    """Return the figure that runs are judged by, and which of its values is the best."""
    names = list(dict.fromkeys(name for run in runs for name in run.columns))
    accuracies = [name for name in names if "acc" in name]
    for name in ("val_acc", *(n for n in accuracies if n.startswith("val")), *accuracies):
        if name in names:
            return name, max
    losses = [name for name in names if "loss" in name]
    for name in ("val_loss", *losses):
        if name in names:
            return name, min
    return None, max


def final_and_best(
    run: Run, name: str | None, best: Callable[..., Any]
) -> tuple[float, float, int] | None:
    """Return the last value of a column, the best one, and its first round; None without values."""
    values = [(r, v) for r, v in run.column(name or "") if math.isfinite(v)]
    if not values:
        return None
    found = best(v for _, v in values)
    last = run.column(name or "")[-1][1]
    return last, found, next(int(r) for r, v in values if v == found)


def scores_of(run: Run) -> tuple[str, dict[str, list[Row]]]:
    """Return on what models were measured for each client, and by kind a row a client."""
    table, where = run.clients, "own test samples"
    if not table:
        table, where = run.participation, "own training samples"
        table = [{**row, "server": row["train_acc"]} for row in table if "train_acc" in row]
    rows = [
        {**row, "test_samples": row.get("test_samples", row.get("train_samples", 1.0))}
        for row in table
    ]
    found = {kind: [r for r in rows if math.isfinite(r.get(kind, math.nan))] for kind in KINDS}
    return where, {kind: rows for kind, rows in found.items() if rows}


def worst_decile(run: Run) -> float:
    """Return the mean accuracy of the worst tenth of clients, with the server's model."""
    _, scores = scores_of(run)
    return summary(scores["server"], "server")["worst"] if "server" in scores else math.nan


# --- one run --------------------------------------------------------------------------------------


def about_run(run: Run, title: str | None = None) -> Report:
    """Return the report of one run."""
    alone = [Group(run.name, [run])]
    sections = [
        progress(alone),
        tested(run),
        cost(alone),
        hyper_parameters(alone),
        partition(run),
        participation(run),
        clients(run),
        own_picture(run, "aggregator.png"),
        own_picture(run, "policy.png"),
        rounds_table(run),
        settings([run], {run.name: run}),
    ]
    return Report(
        title or run.name.partition("/")[0] + ": a run",
        [" ".join([*_setting(run), *_outcome(run)])],
        list(_key_figures(run)),
        [section for section in sections if section is not None],
        _warnings([run]),
    )


def _warnings(runs: Sequence[Run]) -> list[str]:
    found = []
    for run in runs:
        if not run.is_finished:
            of = f" of {run.planned}" if run.planned else ""
            state = run.environment.get("state", "started")
            why = (
                "it was killed, or is still going"
                if state == "started"
                else f"it was ended by {state}"
            )
            found.append(
                f"{run.name} is unfinished: {counted(run.rounds, 'round')}{of} done; {why}. Go on"
                " with fit --ckpt_path=last."
            )
        if differing := run.test.get("differing"):
            more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
            found.append(
                f"{run.name} was tested with other options than it was fitted with:"
                f" {'; '.join(differing[:5])}{more}. test --config config.yaml of the run has the"
                " same."
            )
        found += [f"{run.name} was {resumed}." for resumed in run.resumed]
        found += [f"{run.name}: {note}" for note in run.notes]
    return found


def _who(run: Run) -> str:
    """Say how many clients are sampled in a round."""
    cohorts = sorted({int(v) for _, v in run.column("clients") if math.isfinite(v)})
    count = len(run.partition.get("sizes", run.participation))
    if not cohorts:
        return "an unknown number of clients was sampled"
    if cohorts == [count]:
        return f"all {count} were sampled" if count > 1 else "its client was sampled"
    several = f"{number(cohorts[0])} to {number(cohorts[-1])}" if len(cohorts) > 1 else ""
    return (
        f"{several or number(cohorts[0])} of {number(count) if count else 'the'} clients were"
        " sampled"
    )


def _setting(run: Run) -> Iterable[str]:
    """Say what was run."""
    told, config = run.environment, run.config
    if sizes := run.partition.get("sizes"):
        yield (
            f"{counted(len(sizes), 'client')} hold {counted(sum(sizes), 'sample')}, split by"
            f" {_rule(run)}."
        )
    steps = _constant(with_steps(run).column(STEPS))
    work = f", each with {counted(steps, 'local step')}" if steps else ""
    batch = told.get("batch_size", config.get("data.batch_size"))
    if isinstance(batch, int):
        work += f"{' on' if steps else ', with'} batches of {batch}"
    yield f"In each of {counted(run.rounds, 'round')} {_who(run)}{work}."
    network = told.get("network") or config.get("model.net") or told.get("module")
    rule = _class(told.get("aggregator")) or identity(run).get("federation.aggregator")
    size = told.get("parameters")
    if network:
        of = f" with {counted(size, 'parameter')}" if isinstance(size, int) else ""
        yield f"The model is {network}{of}."
    if rule:
        policy = _class(told.get("policy")) or identity(run).get("federation.policy")
        yield f"{rule} makes the server's model of their updates" + (
            f"; hyper-parameters are those of {policy}." if policy else "."
        )
    if also := list(_callbacks(run.config)):
        yield f"With {', '.join(also)}."
    if run.is_finished and run.planned is not None and run.rounds < run.planned:
        yield f"It was told to stop before the {number(run.planned)} rounds it might have had."


def _callbacks(config: Mapping[str, Any]) -> Iterable[str]:
    """Say which callbacks the config names, with the options that are not their defaults."""
    for key, name in config.items():
        if not re.fullmatch(r"trainer\.callbacks\.\d+", key):
            continue
        known = getattr(callbacks_there, str(name), None)
        usual = inspect.signature(known).parameters if isinstance(known, type) else {}
        options = {k.removeprefix(f"{key}."): v for k, v in config.items() if f"{key}." in k}
        said = [
            f"{option}={value}"
            for option, value in options.items()
            if value is not None and (option not in usual or usual[option].default != value)
        ]
        yield f"{name}({', '.join(said)})" if said else str(name)


def _outcome(run: Run) -> Iterable[str]:
    """Say how it went."""
    name, best = headline([run])
    if found := final_and_best(run, name, best):
        last, top, at = found
        yield f"{name} was {number(last)} in the last round, best in round {at} ({number(top)})."
    if up := _sum(run, "bytes_up"):
        yield f"{megabytes(up)} went up, {megabytes(_sum(run, 'bytes_down'))} down."
    if _sum(run, "dropped"):
        yield _dropped(run)
    if epsilon := run.column("epsilon"):
        spent, delta = epsilon[-1][1], run.column("delta")
        also = f" with delta {number(delta[-1][1])}" if delta else ""
        yield (
            f"Privacy of a client, of the models of all rounds: epsilon {number(spent)}{also}."
            if math.isfinite(spent)
            else "No client has privacy: there was no noise."
        )
    if hits := run.column("backdoor_acc"):
        yield (
            f"The backdoor worked with {number(100 * hits[-1][1])} % of the validation samples of"
            " other classes."
        )


def _dropped(run: Run) -> str:
    """Say how many updates were dropped, and why."""
    causes = {words: _sum(run, cause) for cause, words in CAUSES.items()}
    by_cause = ", ".join(f"{number(count)} {words}" for words, count in causes.items() if count)
    return (
        f"{number(_sum(run, 'dropped'))} of {counted(_sum(run, 'clients'), 'client update')} were"
        f" dropped{f' ({by_cause})' if by_cause else ''}."
    )


def _rule(run: Run) -> str:
    options = run.partition.get("parameters")
    options = options if isinstance(options, dict) else {}
    inside = ", ".join(f"{name}={value}" for name, value in options.items())
    return f"{run.partition.get('rule')}({inside})"


def _class(described: Any) -> str:
    return described.partition("(")[0] if isinstance(described, str) else ""


def _constant(points: Sequence[tuple[float, float]]) -> float | None:
    values = {value for _, value in points}
    return values.pop() if len(values) == 1 and all(map(math.isfinite, values)) else None


def with_steps(run: Run) -> Run:
    """Return a run whose rows say the mean number of local steps of a client."""
    rows = [
        {**row, STEPS: row["num_steps"] / row["clients"]}
        if row.get("clients", 0) > 0 and "num_steps" in row
        else row
        for row in run.rows
    ]
    return replace(run, rows=rows)


def _key_figures(run: Run) -> Iterable[tuple[str, str]]:
    yield "rounds", f"{run.rounds} of {run.planned}" if run.planned else f"{run.rounds}"
    name, best = headline([run])
    if found := final_and_best(run, name, best):
        yield f"final {name}", number(found[0])
        yield f"best {name} (round {found[2]})", number(found[1])
    where, scores = scores_of(run)
    if "server" in scores:
        yield f"worst tenth of clients, {where}", number(worst_decile(run))
    if asked := _sum(run, "clients"):
        yield "updates dropped", f"{number(_sum(run, 'dropped'))} of {number(asked)}"
    if moved := _sum(run, "bytes_up") + _sum(run, "bytes_down"):
        yield "up and down", megabytes(moved)
    if times := run.column("virtual_time"):
        yield "virtual time", seconds(times[-1][1])
    if epsilon := run.column("epsilon"):
        yield "epsilon", number(epsilon[-1][1])


# --- sections of one run or several ---------------------------------------------------------------


def _lines(groups: Sequence[Group], names: Sequence[str], label: str) -> dict[str, list[Line]]:
    """Return the lines of columns: of one group in one panel, of several in a panel each."""
    found: dict[str, list[Line]] = {}
    for name in names:
        for each in groups:
            if not (points := each.band(name)):
                continue
            x, y, band = (list(part) for part in zip(*points, strict=True))
            shown, panel = (name, label) if len(groups) == 1 else (each.name, name)
            found.setdefault(panel, []).append(Line(shown, x, y, band))
    return found


def _columns(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(n for g in groups for run in g.runs for n in run.columns))


def _order(groups: Sequence[Group]) -> list[str]:
    """Return what has the same colour in all panels: groups, if there are some."""
    return [each.name for each in groups] if len(groups) > 1 else []


def _band(groups: Sequence[Group]) -> str:
    if all(len(each.runs) == 1 for each in groups):
        return ""
    return (
        " Lines are means over seeds, bands one standard deviation (of a sample, n - 1) to each"
        " side, as far as all runs of a group went."
    )


def progress(groups: Sequence[Group]) -> Section | None:
    """Accuracy and loss over rounds."""
    names = [name for name in _columns(groups) if "/" not in name]
    panels = _lines(groups, [n for n in names if "acc" in n][:6], "accuracy")
    panels |= _lines(groups, [n for n in names if "loss" in n and "acc" not in n][:6], "loss")
    if not panels:
        return Section("Accuracy and loss", ["The module logged neither accuracy nor loss."])
    panels = dict(list(panels.items())[:6])
    caption = (
        "After each round, as the module logged it: val_ is the server's model on the samples that"
        " were held out, train_ what clients saw while they trained. A gap is a value that was not"
        " finite." + _band(groups)
    )
    return Section(
        "Accuracy and loss",
        (),
        [Picture("accuracy", png(lines(panels, order=_order(groups))), caption)],
    )


def with_totals(run: Run) -> Run:
    """Return a run whose rows say what went over the network so far, and the virtual time."""
    rows, up, total = [], 0.0, 0.0
    for row in run.rows:
        sent, got = _finite([row.get("bytes_up", 0.0)]), _finite([row.get("bytes_down", 0.0)])
        up, total = up + sum(sent), total + sum(sent) + sum(got)
        rows.append({**row, UP: up / 1e6, TOTAL: total / 1e6} if "bytes_up" in row else row)
    return replace(run, rows=rows)


def cost(groups: Sequence[Group]) -> Section | None:
    """Bytes and virtual time, and what was had for them."""
    groups = [Group(each.name, [with_totals(run) for run in each.runs]) for each in groups]
    names = _columns(groups)
    name, _ = headline([run for each in groups for run in each.runs])
    panels = _lines(groups, [UP, TOTAL] if len(groups) == 1 else [TOTAL], SENT)
    across = dict.fromkeys(panels, "round")
    times = _lines(groups, ["virtual_time"], TIME)
    for drawn in times.values():
        panels[TIME], across[TIME] = drawn, "round"
    for against, axis in ((TOTAL, TOTAL), ("virtual_time", TIME)):
        if against not in names or name is None:
            continue
        panel = f"{name}, by {'traffic' if axis == TOTAL else 'virtual time'}"
        for each in groups:
            at = {r: mean for r, mean, _ in each.band(against)}
            points = [(at[r], mean, std) for r, mean, std in each.band(name) if r in at]
            if points:
                x, y, band = (list(part) for part in zip(*points, strict=True))
                panels.setdefault(panel, []).append(
                    Line(panel if len(groups) == 1 else each.name, x, y, band)
                )
                across[panel] = axis
    if not panels:
        return None
    caption = (
        "What went between server and clients, added up over rounds, and how good the model was"
        " for it." + _band(groups)
    )
    if times:
        caption += (
            " Virtual time is how long rounds would take with the speeds and stragglers that"
            " ClientFaults simulates."
        )
        text = []
    else:
        text = ["No virtual time was simulated; --trainer.callbacks+=ClientFaults does."]
    picture = Picture("cost", png(lines(panels, across, _order(groups))), caption)
    return Section("Traffic and time", text, [picture])


def hyper_parameters(groups: Sequence[Group]) -> Section | None:
    """Whatever else the table of rounds holds: rates, steps, what rules and policies log."""
    groups = [Group(each.name, [with_steps(run) for run in each.runs]) for each in groups]
    rest = [n for n in _columns(groups) if n not in KNOWN and "acc" not in n and "loss" not in n]
    # The policy's own first; how sure it is of pairs of them, last.
    rest.sort(key=lambda n: (n.startswith("precision"), n != "lr", n != STEPS))
    panels: dict[str, list[Line]] = {}
    constant = []
    for name in rest:
        found = _lines(groups, [name], name)
        values = {y for drawn in found.values() for line in drawn for y in line.y}
        # What is logged once, at the end, has a place of its own: scores of clients.
        if len(values) == 1 and any(len(line.x) > 1 for drawn in found.values() for line in drawn):
            some = [each.name for each in groups if any(run.column(name) for run in each.runs)]
            where = f" ({', '.join(some)})" if len(some) < len(groups) else ""
            constant.append(f"{name} {number(values.pop())}{where}")
        for drawn in found.values():
            if any(len(line.x) > 1 for line in drawn) and len(values) > 1:
                together = re.fullmatch(r"(.+)_\d+", name) if len(groups) == 1 else None
                panels.setdefault(together[1] if together else name, []).extend(drawn)
    text = [f"In all rounds: {', '.join(constant)}."] if constant else []
    if len(panels) > MOST_PANELS:
        left_out = list(panels)[MOST_PANELS:]
        text.append(f"Not drawn: {', '.join(left_out[:20])}{', ...' * (len(left_out) > 20)}.")
        panels = dict(list(panels.items())[:MOST_PANELS])
    if not text and not panels:
        return None
    caption = (
        "What the policy chose for each round, and what rules, transforms and callbacks logged; of"
        " values that differ from client to client, the mean over a round's clients."
        + _band(groups)
    )
    pictures = (
        [Picture("hyperparameters", png(lines(panels, order=_order(groups))), caption)]
        if panels
        else []
    )
    return Section("Hyper-parameters and other figures", text, pictures)


def tested(run: Run) -> Section | None:
    """Metrics of ``lightning-fl test``."""
    if not run.test:
        return None
    rows = [[name, number(value)] for name, value in run.test["metrics"].items()]
    used = f" with {run.test['checkpoint']}" if run.test["checkpoint"] else ""
    return Section("Test", [f"Measured by lightning-fl test{used}."], (), [Table(["", ""], rows)])


# --- sections of one run --------------------------------------------------------------------------


def partition(run: Run) -> Section | None:
    """Who holds what."""
    if not (sizes := run.partition.get("sizes")):
        return None
    ordered, classes = sorted(sizes), run.partition["classes"]
    text = (
        f"{_rule(run)}, seed {run.partition.get('seed')}: {counted(len(sizes), 'client')} with"
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


def participation(run: Run) -> Section | None:
    """Draw which clients were sampled, and which updates were dropped."""
    lost = {int(row["round"]): row["dropped"] for row in run.rows if row.get("dropped", 0) > 0}
    asked, count = _sum(run, "clients"), sum(_finite(lost.values()))
    text = f"In each round {_who(run)}."
    text += f" {_dropped(run)}" if count else ""
    text += " No update was dropped." if asked and not count else ""
    panels: dict[str, dict[str, dict[int, int]]] = {}
    across: list[str] = []
    tables = []
    kinds = Counter(fault for _, _, fault in run.faults or ())
    rounds = {
        kind: Counter(at for at, _, fault in run.faults or () if fault == kind) for kind in kinds
    }
    if rounds or lost:
        panels["clients with a fault" if rounds else "updates dropped"] = {
            kind: dict(sorted(found.items())) for kind, found in rounds.items()
        } or _drops_by_cause(run)
        across.append("round")
    if kinds:
        tables.append(Table(["fault", "times"], [[k, number(n)] for k, n in kinds.most_common()]))
    rows = [row for row in run.participation if "rounds" in row and math.isfinite(row["rounds"])]
    times = {int(row["client"]): int(row["rounds"]) for row in rows}
    if times and (len(set(times.values())) > 1 or count):
        gone = {c: int(row.get("dropped", 0)) for c, row in zip(times, rows, strict=True)}
        if len(times) <= 60:
            came = {client: number - gone[client] for client, number in times.items()}
            panels["rounds of the client"] = {"update arrived": came, "update dropped": gone}
            across.append("client")
        else:
            panels["clients"] = {"clients": dict(sorted(Counter(times.values()).items()))}
            across.append("rounds in which a client was sampled")
        ranked = sorted(times.values())
        text += (
            f" A client was sampled in {ranked[0]} to {ranked[-1]} rounds, {number(median(ranked))}"
            " at the median."
            if ranked[0] < ranked[-1]
            else f" Each client was sampled in {counted(ranked[0], 'round')}."
        )
    more = [] if run.faults is not None else ["--trainer.callbacks+=ClientFaults lets some fail."]
    if not panels:
        return Section("Participation and faults", [text, *more])
    caption = "How often each client was sampled."
    if across[0] == "round":
        caption = "In which rounds it happened, and how often each client was sampled."
    if rounds:
        caption += (
            " An update with dropout, crash, nan or late is dropped; explode sends one that is far"
            " too large."
        )
    picture = Picture("participation", png(stacked(panels, across)), caption)
    return Section("Participation and faults", [text, *more], [picture], tables)


def _drops_by_cause(run: Run) -> dict[str, dict[int, int]]:
    """Return how many updates were dropped in each round, by cause."""
    found = {
        words: {int(at): int(n) for at, n in run.column(cause) if math.isfinite(n) and n > 0}
        for cause, words in {**CAUSES, "dropped": "dropped"}.items()
    }
    total = found.pop("dropped")
    by_cause = {words: counts for words, counts in found.items() if counts}
    known = sum(sum(counts.values()) for counts in by_cause.values())
    return by_cause if known == sum(total.values()) else {"dropped": total}


def _spread_row(run: Run, kind: str, rows: Sequence[Row]) -> list[str]:
    found, values = summary(rows, kind), [row[kind] for row in rows]
    shown = [found["mean"], found["weighted"], found["std"], median(values), min(values)]
    return [*map(number, [*shown, found["worst"]])]


SPREAD = ["mean", "mean by samples", "std", "median", "worst", "worst tenth"]


def clients(run: Run) -> Section:
    """How well models do for each client."""
    title, (where, scores) = "Clients", scores_of(run)
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
    server, text = scores.get("server", []), []
    if server:
        found = summary(server, "server")
        text.append(
            f"On their {where}, clients have an accuracy of {number(found['mean'])} on average,"
            f" with a standard deviation of {number(found['std'])} between them; the worst tenth"
            f" has {number(found['worst'])}."
        )
    if where == "own training samples":
        text.append(
            "Training samples flatter a model; PersonalizedEvaluation measures on test samples"
            " (--data.init_args.local_test_size=0.2)."
        )
    sizes = {kind: [row.get("train_samples", 0) for row in rows] for kind, rows in scores.items()}
    differ = len({size for each in sizes.values() for size in each}) > 1
    figure = spread(
        {kind: [row[kind] for row in rows] for kind, rows in scores.items()},
        sizes if differ else {},
        where,
    )
    caption = f"The accuracy of the last round's models on each client's {where}"
    caption += ", the worst client first" + "; against its training samples." * differ
    meanings = "; ".join(f"{kind}: {MEANINGS[kind]}" for kind in scores)
    picture = Picture("clients", png(figure), f"{caption.rstrip('.')}. {meanings}.")
    kinds = Table(["", *SPREAD], [[kind, *_spread_row(run, kind, scores[kind])] for kind in scores])
    return Section(title, text, [picture], [kinds, _worst_clients(run, scores)])


def _worst_clients(run: Run, scores: Mapping[str, Sequence[Row]]) -> Table:
    first = next(iter(scores))
    who = {row["client"]: row for row in run.participation}
    worst = sorted(scores[first], key=lambda row: (row[first], row["client"]))[:20]
    head = ["client", "training samples", "rounds", "updates dropped", *scores]
    rows = []
    for row in worst:
        more = who.get(row["client"], {})
        shown = [row["client"], row.get("train_samples"), more.get("rounds"), more.get("dropped")]
        rows.append([*map(number, [*shown, *(row.get(kind) for kind in scores)])])
    return Table(head, rows, f"The {len(rows)} clients with the lowest accuracy", folded=True)


#: What a run's own pictures show.
OWN = {
    "aggregator.png": (
        "What the rule made of the clients",
        "Drawn by the server's rule: the tree of clusters, with the clients in each, or which"
        " neurons of the clients became one.",
    ),
    "policy.png": (
        "What the policy learnt",
        "Drawn by the policy: the probability of each candidate over rounds, and of each client.",
    ),
}


def own_picture(run: Run, name: str) -> Section | None:
    """What a rule or a policy has drawn itself."""
    if name not in run.pictures:
        return None
    title, caption = OWN[name]
    return Section(title, (), [Picture(name.removesuffix(".png"), run.pictures[name], caption)])


def rounds_table(run: Run) -> Section:
    """Some rounds in numbers: the first, the best, the last, and some between."""
    name, best = headline([run])
    found = final_and_best(run, name, best)
    count = len(run.rows)
    wanted = {round(i * (count - 1) / 9) for i in range(10)}
    names = run.columns[:16]
    rows = []
    for at, row in enumerate(run.rows):
        is_best = found is not None and row["round"] == found[2]
        if at in wanted or is_best:
            shown = [number(row.get(column)) for column in names]
            rows.append([f"{shown[0]} (best)" if is_best else shown[0], *shown[1:]])
    caption = f"{len(rows)} of {counted(count, 'round')}; all are in rounds.csv"
    return Section("Rounds", (), (), [Table(names, rows, caption, folded=True)])


# --- settings -------------------------------------------------------------------------------------


def settings(runs: Sequence[Run], shown_as: Mapping[str, Run]) -> Section:
    """What it takes to do it again: seeds, versions, machine, and one config a group."""
    told: dict[str, list[Any]] = {}
    used: dict[str, list[str]] = {}
    for run in runs:
        machine, versions = (
            found if isinstance(found := run.environment.get(name), dict) else {}
            for name in ("machine", "versions")
        )
        shown = {"seed": run.seed, **machine}
        for name in ("module", "aggregator", "policy", "sampler", "transforms"):
            value = run.environment.get(name)
            shown[name] = ", ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in versions.items():
            if str(value) not in (values := used.setdefault(str(name), [])):
                values.append(str(value)[:40])
        for name, value in shown.items():
            values = told.setdefault(str(name)[:40], [])
            if value not in (None, "") and value not in values:
                values.append(value)
    rows = [[name, ", ".join(str(v)[:300] for v in values)] for name, values in told.items()]
    rows.append(["versions", ", ".join(f"{n} {' or '.join(v)}" for n, v in used.items())])
    table = Table(["", ""], [row for row in rows if row[1]])
    text = (
        []
        if any(run.environment for run in runs)
        else ["Versions and machine are not known: the run has no environment.json."]
    )
    return Section(
        "Versions, seeds and config",
        text,
        (),
        [table] if table.rows else [],
        [
            (f"config.yaml of {name}", run.config_text)
            for name, run in list(shown_as.items())[:24]
            if run.config_text
        ],
    )


# --- several runs ---------------------------------------------------------------------------------


def about_groups(
    groups: Sequence[Group], title: str | None = None, left_out: Sequence[str] = ()
) -> Report:
    """Return the report of several runs."""
    runs = [run for each in groups for run in each.runs]
    found = differences([identity(each.runs[0]) for each in groups if each.runs[0].config])
    lead = f"{counted(len(runs), 'run')} in {counted(len(groups), 'group')}; runs of a group differ"
    lead += " in the seed alone."
    if found:
        shown = [name for name in found if not any(name.startswith(f"{o}.") for o in found)]
        lead += f" Groups differ in {', '.join(shown[:6])}{', ...' * (len(shown) > 6)}."
    if len(groups) > MOST_LINES:
        lead += f" Pictures show the first {MOST_LINES} groups."
    sections = [
        _comparison(groups, found),
        progress(groups),
        cost(groups),
        hyper_parameters(groups),
        _clients_of_groups(groups),
        _each_run(groups),
        settings(runs, {each.name: each.runs[0] for each in groups}),
    ]
    return Report(
        title or f"{counted(len(runs), 'run')} compared",
        [lead, " ".join([*_common(runs), *_ranking(groups)])],
        [],
        [section for section in sections if section is not None],
        [*left_out, *_warnings(runs)],
    )


def _plus_minus(values: Sequence[float], shown: Callable[[float], str] = number) -> str:
    """Return mean and standard deviation; the mean alone where all are the same.

    Example:
        >>> _plus_minus([0.5, 0.61, 0.7]).replace(NBSP, " "), _plus_minus([0.5]), _plus_minus([])
        ('0.60 ± 0.10', '0.5', '-')
    """
    if not values:
        return "-"
    mean, std = mean_and_std(values)
    if std == 0 or not math.isfinite(std):
        return shown(mean)
    if shown is not number:
        return f"{shown(mean)}{NBSP}±{NBSP}{shown(std)}"
    digits = max(0, 1 - math.floor(math.log10(std)))  # two of the deviation's
    return f"{mean:.{digits}f}{NBSP}±{NBSP}{std:.{digits}f}"


def _common(runs: Sequence[Run]) -> list[str]:
    """Say what was the same in all runs."""
    told = [list(_setting(run)) for run in runs]
    return [sentence for sentence in told[0] if all(sentence in each for each in told)]


def _ranking(groups: Sequence[Group]) -> list[str]:
    """Say which group came out best."""
    name, best = headline([run for each in groups for run in each.runs])
    finals = {
        each.name: [f[0] for run in each.runs if (f := final_and_best(run, name, best))]
        for each in groups
    }
    means = {n: mean_and_std(v)[0] for n, v in finals.items() if v}
    means = {n: mean for n, mean in means.items() if math.isfinite(mean)}
    if len(means) < 2:
        return []
    top = best(means, key=lambda n: means[n])
    return [f"After its last round {top} has the best {name}, {_plus_minus(finals[top])}."]


def _comparison(groups: Sequence[Group], found: Mapping[str, Sequence[Any]]) -> Section:
    name, best = headline([run for each in groups for run in each.runs])
    head = ["group", "seeds", "rounds", f"final {name}", f"best {name}", "worst tenth of clients"]
    head += ["updates dropped", "up and down", "virtual time", "epsilon", "backdoor_acc"]
    rows = []
    for each in groups:
        judged = [f for run in each.runs if (f := final_and_best(run, name, best))]
        rounds = sorted({run.rounds for run in each.runs})
        times = [run.column("virtual_time") for run in each.runs]
        rows.append(
            [
                each.name,
                ", ".join(number(run.seed) for run in each.runs),
                " to ".join(map(str, rounds[:: max(1, len(rounds) - 1)])),
                _plus_minus([f[0] for f in judged]),
                _plus_minus([f[1] for f in judged]),
                _plus_minus(_finite(worst_decile(run) for run in each.runs)),
                _plus_minus([_sum(run, "dropped") for run in each.runs]),
                _plus_minus(
                    [_sum(run, "bytes_up") + _sum(run, "bytes_down") for run in each.runs],
                    megabytes,
                ),
                _plus_minus([t[-1][1] for t in times if t], seconds),
                *(
                    _plus_minus([c[-1][1] for run in each.runs if (c := run.column(last))])
                    for last in head[-2:]
                ),
            ]
        )
    kept = [at for at in range(len(head)) if any(row[at] != "-" for row in rows)]
    caption = "Mean ± standard deviation (of a sample, n - 1) over the seeds of a group"
    tables = [Table([head[at] for at in kept], [[r[at] for at in kept] for r in rows], caption)]
    if found:
        named = [each.name for each in groups if each.runs[0].config]
        tables.append(
            Table(
                ["option", *named],
                [[key, *(number(v) for v in values)] for key, values in list(found.items())[:60]],
                "Where the configs differ; - is an option that the config does not have",
                folded=len(found) > 15,
            )
        )
    return Section("Groups", (), (), tables)


def _clients_of_groups(groups: Sequence[Group]) -> Section | None:
    """Draw how accuracies of clients are spread in each group."""
    panels: dict[str, list[Line]] = {}
    share = [at / 50 for at in range(51)]
    for each in groups:
        found: dict[str, list[list[float]]] = {}
        for run in each.runs:
            where, scores = scores_of(run)
            if values := [row["server"] for row in scores.get("server", [])]:
                found.setdefault(where, []).append(np.quantile(values, share).tolist())
        for where, curves in found.items():
            means, stds = zip(*map(mean_and_std, zip(*curves, strict=True)), strict=True)
            line = Line(each.name, [100 * at for at in share], means, stds)
            panels.setdefault(f"accuracy on {where}", []).append(line)
    if not panels:
        return None
    caption = (
        "The accuracy of the last round's model on each client's own samples, the worst clients on"
        " the left: a flat line treats all alike." + _band(groups)
    )
    figure = lines(panels, "clients, the worst first (%)", _order(groups))
    return Section("Clients", (), [Picture("clients", png(figure), caption)])


def _each_run(groups: Sequence[Group]) -> Section:
    """Every run in a line."""
    name, best = headline([run for each in groups for run in each.runs])
    rows = []
    for each in groups:
        for run in each.runs:
            judged = final_and_best(run, name, best) or (None, None, None)
            done = f"{run.rounds}{f' of {run.planned}' if run.planned else ''}"
            state = "" if run.is_finished else " (unfinished)"
            rows.append([run.name, each.name, number(run.seed), done + state, *map(number, judged)])
    head = ["run", "group", "seed", "rounds", f"final {name}", f"best {name}", "in round"]
    return Section("Runs", (), (), [Table(head, rows, "Every run", folded=len(rows) > 12)])
