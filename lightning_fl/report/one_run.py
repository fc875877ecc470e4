"""Page on one run."""

from __future__ import annotations

from lightning_fl.report.clients import clients, participation, partition
from lightning_fl.report.curves import cost, hyper_parameters, progress
from lightning_fl.report.groups import Group
from lightning_fl.report.lead import key_figures, setting, warnings
from lightning_fl.report.page import Picture, Report, Section, Table
from lightning_fl.report.run import Run
from lightning_fl.report.scores import STEPS, TOTAL, UP, final_and_best, headline, with_derived
from lightning_fl.report.settings import settings
from lightning_fl.report.words import SEPARATOR, counted, number

#: Captions of the figures that aggregators and policies draw.
DRAWN_BY_RULES = {
    "aggregator": "Figure of the aggregator: the tree of clusters, or the matched neurons.",
    "policy": "Figure of the policy: the probability of each candidate, over rounds and by client.",
}


def about_run(run: Run, title: str | None = None) -> Report:
    """Return the page on one run.

    Args:
        run: The run.
        title: Title of the page; None derives it from the name of the run.
    """
    run = with_derived(run, *headline([run]))
    alone = [Group(run.name, [run])]
    sections = [
        progress(alone),
        tested(run),
        cost(alone),
        hyper_parameters(alone),
        partition(run),
        participation(run),
        clients(run),
        *(drawn_by_rule(run, name) for name in DRAWN_BY_RULES),
        rounds_table(run),
        settings(alone),
    ]
    return Report(
        title or "Run " + run.name.partition("/")[0],
        [SEPARATOR.join(setting(run))],
        list(key_figures(run)),
        [section for section in sections if section is not None],
        list(warnings(run)),
    )


def tested(run: Run) -> Section | None:
    """List the metrics of ``lightning-fl test``; None if it was not run."""
    if not run.test:
        return None
    rows = [[name, number(value)] for name, value in run.test["metrics"].items()]
    used = f" with {run.test['checkpoint']}" if run.test["checkpoint"] else ""
    used += f", round {run.test['round']}" if run.test.get("round") else ""
    return Section("Test", [f"Measured by lightning-fl test{used}."], (), [Table(["", ""], rows)])


def drawn_by_rule(run: Run, name: str) -> Section | None:
    """Show the figure of an aggregator or a policy; None if there is none."""
    if not (content := run.pictures.get(f"{name}.png")):
        return None
    picture = Picture(name, DRAWN_BY_RULES[name], (), content)
    return Section(name.capitalize(), (), [picture])


def rounds_table(run: Run) -> Section:
    """List ten rounds, from the first to the last, and the best round."""
    judged = final_and_best(run)
    count = len(run.rows)
    wanted = {round(i * (count - 1) / 9) for i in range(10)}
    names = [name for name in run.columns if name not in (UP, TOTAL, STEPS)][:16]
    rows = []
    for at, row in enumerate(run.rows):
        is_best = judged is not None and row["round"] == judged[2]
        if at in wanted or is_best:
            shown = [number(row.get(column)) for column in names]
            rows.append([f"{shown[0]} (best)" if is_best else shown[0], *shown[1:]])
    caption = f"{len(rows)} of {counted(count, 'round')}; rounds.csv has all rounds"
    return Section("Rounds", (), (), [Table(names, rows, caption, folded=True)])
