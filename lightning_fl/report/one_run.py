"""Page on one run."""

from __future__ import annotations

from lightning_fl.report.clients import clients, participation, partition
from lightning_fl.report.curves import cost, hyper_parameters, progress
from lightning_fl.report.groups import Group
from lightning_fl.report.lead import alarms, key_figures, setting, warnings
from lightning_fl.report.page import Picture, Report, Section
from lightning_fl.report.run import Run
from lightning_fl.report.scores import headline, with_derived
from lightning_fl.report.settings import settings
from lightning_fl.report.words import SEPARATOR

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
        cost(alone),
        hyper_parameters(alone),
        partition(run),
        participation(run),
        clients(run),
        *(
            Section(name.capitalize(), (), [Picture(name, DRAWN_BY_RULES[name], (), content)])
            for name, content in run.pictures.items()
        ),
        settings(alone),
    ]
    return Report(
        title or "Run " + run.name.partition("/")[0],
        [SEPARATOR.join(setting(run))],
        list(key_figures(run)),
        [section for section in sections if section is not None],
        list(warnings(run)),
        list(alarms(run)),
    )
