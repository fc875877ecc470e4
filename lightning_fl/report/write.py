"""The files of a report."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeAlias

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lightning_fl import __version__
from lightning_fl.errors import FederationError
from lightning_fl.files import error_context, write_atomically
from lightning_fl.options import check_choice, check_that
from lightning_fl.report.figures import COLORS, Panel, svg
from lightning_fl.report.groups import Group, group
from lightning_fl.report.one_run import about_run
from lightning_fl.report.page import Report
from lightning_fl.report.run import find_runs, read_run
from lightning_fl.report.several_runs import Comparison, about_groups
from lightning_fl.report.several_runs import latex as table_of
from lightning_fl.report.summary import direction

#: Folders of runs, or folders that contain runs.
Runs: TypeAlias = str | Path | Sequence[str | Path]


def report(
    runs: Runs | Mapping[str, Runs],
    output: str | Path | None = None,
    title: str | None = None,
    metric: str | None = None,
    mode: Literal["max", "min"] | None = None,
    latex: str | Path | None = None,
    columns: Sequence[str] = (),
    percent: bool = False,
) -> Path:
    """Write a report on one run, or a comparison of several runs.

    The report is a self-contained HTML file, which needs no network. The same runs give the same
    file, byte for byte.

    Args:
        runs: Folders of runs, or folders that contain runs as ``version_0``, ``version_1``, ...
            Runs that differ only in the seed are shown as mean and standard deviation. A mapping
            has the names of groups as keys, such as ``{"FedAvg": "runs/a", "FedProx": "runs/b"}``.
            Runs under an empty name are grouped and named automatically.
        output: Path of the report, ``.html``; None means ``report.html``, in the folder of the run
            for a single run, in the working directory for several runs. An existing report is
            replaced.
        title: Title of the page; None derives it from the name of the run.
        metric: Column of ``rounds.csv`` by which runs are judged and compared, such as
            ``val/f1``. None means the accuracy of the validation, or else its loss.
        mode: Whether the best value of ``metric`` is its ``max`` or its ``min``. None means
            the name tells, as in ``val_loss``, ``rmse``, ``val_acc`` or ``f1``.
        latex: File for a table of the groups in LaTeX, in addition to the page.
        columns: Columns of this table: measures of the page's table of groups, or last values of
            columns of ``rounds.csv``. By default, the final metric and the metrics of the test.
        percent: Whether values from 0 to 1 of which more is better are in percent in this table.

    Returns:
        Path of the report.

    Raises:
        FederationError: If there is no run, a run is in two groups, its table of rounds cannot be
            read, no run has the metric or a column, an option has no effect, or a file cannot be
            written.
    """
    if latex is None and (columns or percent):
        raise FederationError("columns and percent are for the table in LaTeX: set latex, too")
    found, left_out = _folders(runs if isinstance(runs, Mapping) else {"": runs})
    first, *others = (folder for folders in found.values() for folder in folders)
    path = Path(output or ("report.html" if others else first / "report.html"))
    check_that("output", str(path), path.suffix == ".html", "a file name that ends in .html")
    groups = _judged(found, metric, mode)
    page = about_groups(groups, title) if others else about_run(groups[0].runs[0], title)
    page = replace(page, warnings=[*left_out, *page.warnings])
    table = "" if latex is None else table_of(Comparison(groups), columns, percent)
    with error_context(f"{path} could not be written, choose another output", OSError):
        write_atomically(path, html(page).encode(errors="replace"))
        if latex is not None:
            write_atomically(latex, table)
    return path


def _folders(named: Mapping[str, Runs]) -> tuple[dict[str, list[Path]], list[str]]:
    """Return the folders of runs by name of their group, and notes on runs that are left out."""
    found, left_out = dict[str, list[Path]](), list[str]()
    for name, paths in named.items():
        folders, notes = find_runs([paths] if isinstance(paths, str | Path) else paths)
        found |= {name: folders} if folders else {}
        left_out += notes
    every = Counter(folder.resolve() for folders in found.values() for folder in folders)
    if not every:
        raise FederationError("no run to report: pass the folder of a run, such as runs/digits")
    ((often, count),) = every.most_common(1)
    if count > 1:
        raise FederationError(f"{often} is in several groups: pass it once")
    return found, left_out


def _judged(
    named: Mapping[str, Sequence[Path]], metric: str | None, mode: str | None
) -> list[Group]:
    """Read the runs, and return them in groups with the metric that was asked for."""
    if metric is None and mode is not None:
        raise FederationError(f"mode={mode} is for a metric: set metric, too")
    mode = mode or direction(metric or "acc")
    if mode is None:
        raise FederationError(
            f"the name {metric!r} does not tell whether more or less of it is better: set"
            " --mode=max or --mode=min"
        )
    groups: list[Group] = []
    for name, folders in named.items():
        runs = [replace(read_run(folder), metric=metric, mode=mode) for folder in folders]
        groups += [Group(name, runs)] if name else group(runs)
    known = dict.fromkeys(n for each in groups for run in each.runs for n in run.columns)
    if metric is not None:
        check_choice("metric", metric, *known)
    return groups


def html(page: Report) -> str:
    """Render a page as HTML. All contents are escaped.

    Example:
        >>> "&lt;script&gt;" in html(Report("<script>", [], [], []))
        True
    """
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    folder = Path(__file__).parent
    script = Markup((folder / "page.js").read_text(encoding="utf-8"))
    environment.filters |= {"sha256": _sha256, "svg": _svg}
    template = environment.from_string((folder / "page.html").read_text(encoding="utf-8"))
    return template.render(report=page, version=__version__, script=script, colors=COLORS)


def _sha256(script: str) -> str:
    """Return the only source of scripts that the Content Security Policy allows."""
    return f"sha256-{base64.b64encode(sha256(script.encode()).digest()).decode()}"


def _svg(panel: Panel, name: str) -> tuple[Markup, str]:
    element, chart = svg(panel, name)
    return Markup(element), json.dumps(chart, separators=(",", ":"), allow_nan=False)
