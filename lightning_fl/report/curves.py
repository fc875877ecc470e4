"""Sections with curves over rounds, for one run or groups of runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lightning_fl.federation.dropped import CAUSES
from lightning_fl.report.figures import MOST_LINES, MOST_PANELS, MOST_POINTS, Line, Lines, mean_line
from lightning_fl.report.groups import Group, common_time
from lightning_fl.report.page import Picture, Section
from lightning_fl.report.summary import STEPS, TIME, TOTAL, UP
from lightning_fl.report.words import listed, number

#: Columns of the table of rounds that other sections of the page show.
KNOWN = {"round", "clients", "dropped", "num_samples", "num_steps", "bytes_up", "bytes_down"}
KNOWN |= {"virtual_time", UP, TOTAL, TIME, *CAUSES}
SENT = "MB so far"
#: Texts of captions on bands and on points that are left out.
MEANS = " Thick lines: means over the seeds of a group, in rounds that all its runs have."
SEEDS = " Thin lines: single seeds."
BANDS = " Bands: 95 % confidence intervals of the mean (Student's t)."
THINNED = " Not every point is drawn, but the lowest and the highest of each stretch."


def _line(group: Group, name: str, label: str, across: str = "round") -> Line | None:
    """Return a column as a line over rounds or over another column; None without values."""
    points = group.values(name, across)
    return mean_line(label, points) if points else None


def _panels(groups: Sequence[Group], names: Sequence[str], label: str) -> dict[str, list[Line]]:
    """Return lines by panel: one panel if there is one group, otherwise one per column."""
    panels: dict[str, list[Line]] = {}
    for name in names:
        for group in groups:
            panel, shown = (label, name) if len(groups) == 1 else (name, group.name)
            if line := _line(group, name, shown):
                panels.setdefault(panel, []).append(line)
    return panels


def _columns(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(n for g in groups for run in g.runs for n in run.columns))


def picture(
    name: str,
    caption: str,
    panels: Mapping[str, Sequence[Line]],
    groups: Sequence[Group],
    across: Mapping[str, str] | None = None,
) -> Picture:
    """Return a picture of lines. Its caption says what bands are, and whether points are left out.

    Args:
        name: Name of the file.
        caption: Text below the picture.
        panels: Lines by label of the vertical axis.
        groups: Groups of runs, which have the same colors in all panels.
        across: Label of the horizontal axis of panels that are not over rounds.
    """
    order = [group.name for group in groups] if len(groups) > 1 else ()
    every = [line for lines in panels.values() for line in lines[:MOST_LINES]]
    most = min(600, max(20, MOST_POINTS // len(every)))
    across = across or {}
    drawn = [
        Lines(ylabel, [line.thinned(most) for line in lines], across.get(ylabel, "round"), order)
        for ylabel, lines in panels.items()
    ]
    has_seeds, has_bands = any(line.seeds for line in every), any(line.band for line in every)
    caption += MEANS * (has_seeds or has_bands) + SEEDS * has_seeds + BANDS * has_bands
    if any(len(line.x) > most for line in every):
        caption += THINNED
    return Picture(name, caption, drawn)


def progress(groups: Sequence[Group]) -> Section:
    """Draw accuracy and loss over rounds, and the metric of the page if it is neither."""
    title = "Accuracy and loss"
    metric = groups[0].runs[0].metric
    names = sorted(_columns(groups), key=lambda name: name != metric)
    accuracies = [name for name in names if "acc" in name]
    losses = [name for name in names if "loss" in name and "acc" not in name]
    others = [metric] if metric and metric not in (*accuracies, *losses) else []
    panels = _panels(groups, others, metric or "")
    panels |= _panels(groups, accuracies[:6], "accuracy") | _panels(groups, losses[:6], "loss")
    if not panels:
        return Section(title, ["The module logged neither accuracy nor loss."])
    caption = "val_: the global model on held-out samples. train_: the clients' models in training."
    caption += " Gaps are non-finite values."
    text = _not_drawn([*accuracies[6:], *losses[6:]])
    return Section(title, text, [picture("accuracy", caption, panels, groups)])


def _not_drawn(names: Sequence[str]) -> list[str]:
    return [f"Not drawn: {listed(names, 20)}."] if names else []


def cost(groups: Sequence[Group]) -> Section | None:
    """Draw traffic and virtual time, and the metric over both; None without either."""
    alone, metric = len(groups) == 1, groups[0].runs[0].metric or ""
    panels = _panels(groups, [UP, TOTAL] if alone else [TOTAL], SENT)
    panels |= (times := _panels(groups, [TIME], TIME))
    if not panels:
        return None
    is_timed = common_time([run for group in groups for run in group.runs]) is not None
    across = {}
    for column, words in ((TOTAL, "traffic"), (TIME, "virtual time"))[: 1 + is_timed]:
        panel = f"{metric}, by {words}"
        lines = [_line(g, metric, panel if alone else g.name, column) for g in groups]
        if drawn := [line for line in lines if line]:
            panels[panel], across[panel] = drawn, column
    caption = "Traffic between server and clients so far, and the metric of the model over it."
    caption += " Virtual time is the simulated duration of the rounds." if times else ""
    return Section("Traffic and time", (), [picture("cost", caption, panels, groups, across)])


def hyper_parameters(groups: Sequence[Group]) -> Section | None:
    """Draw the other columns, such as learning rates and logged values; None without any."""
    drawn = {*KNOWN, groups[0].runs[0].metric}
    rest = [n for n in _columns(groups) if n not in drawn and "acc" not in n and "loss" not in n]
    # Columns of the policy first, its precisions last.
    rest.sort(key=lambda n: (n.startswith("precision"), n != "lr", n != STEPS))
    panels: dict[str, list[Line]] = {}
    constant = []
    for name in rest:
        found = [line for panel in _panels(groups, [name], name).values() for line in panel]
        values = {y for line in found for y in line.y}
        # Scores of clients are logged once, at the end; another section shows them.
        if not any(len(line.x) > 1 for line in found):
            continue
        if len(values) == 1:
            constant.append(f"{name} {number(values.pop())}")
        else:
            together = re.fullmatch(r"(.+)_\d+", name) if len(groups) == 1 else None
            panels.setdefault(together[1] if together else name, []).extend(found)
    text = [f"Constant in all rounds: {', '.join(constant)}."] if constant else []
    text += _not_drawn(list(panels)[MOST_PANELS:])
    panels = dict(list(panels.items())[:MOST_PANELS])
    if not text and not panels:
        return None
    caption = "Values that differ between clients are means over the sampled clients."
    pictures = [picture("hyperparameters", caption, panels, groups)] if panels else []
    return Section("Hyperparameters and other metrics", text, pictures)
