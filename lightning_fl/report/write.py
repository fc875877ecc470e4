"""The files of a report."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeAlias

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lightning_fl import __version__
from lightning_fl.errors import FederationError
from lightning_fl.files import error_context, write_atomically
from lightning_fl.report.figures import COLORS, Panel, svg
from lightning_fl.report.groups import Group, with_names
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
            read, no run has the metric or a column, there is a mode without a metric, or a file
            cannot be written.
    """
    named, left_out = _find_named(runs if isinstance(runs, Mapping) else {"": runs})
    folders = [folder for each in named.values() for folder in each]
    if not folders:
        raise FederationError("no run to report: pass the folder of a run, such as runs/digits")
    alone = len(folders) == 1
    path = Path(output or (folders[0] / "report.html" if alone else "report.html"))
    if path.suffix != ".html" or path.is_dir():
        raise FederationError(f"output must be a file name that ends in .html, got {path}")
    groups = _judged(named, metric, mode)
    page = about_run(groups[0].runs[0], title) if alone else about_groups(groups, title, left_out)
    table = "" if latex is None else table_of(Comparison(groups), columns, percent)
    with error_context(f"{path} could not be written, choose another output", OSError):
        write_atomically(path, html(page).encode(errors="replace"))
        if latex is not None:
            write_atomically(latex, table)
    return path


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
    judged = partial(replace, metric=metric, mode=mode)
    groups = with_names({n: [judged(read_run(f)) for f in each] for n, each in named.items()})
    known = dict.fromkeys(n for each in groups for run in each.runs for n in run.columns)
    if metric not in (None, *known):
        raise FederationError(f"no run has a metric {metric!r}: they have {', '.join(known)}")
    return groups


def _find_named(runs: Mapping[str, Runs]) -> tuple[dict[str, list[Path]], list[str]]:
    """Return the folders of runs by the name of their group, and notes on runs left out."""
    named: dict[str, list[Path]] = {}
    notes: list[str] = []
    seen: set[Path] = set()
    for name, paths in runs.items():
        named[name], left_out = find_runs([paths] if isinstance(paths, str | Path) else paths)
        notes += left_out
        folders = {folder.resolve() for folder in named[name]}
        if twice := seen & folders:
            raise FederationError(f"{twice.pop()} is in several groups: pass it once")
        seen |= folders
    return {name: folders for name, folders in named.items() if folders}, notes


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
    environment.filters |= {
        "json": _json,
        # The Content Security Policy allows the script with this hash, and no other.
        "sha256": _hash,
        "svg": _svg,
    }
    template = environment.from_string((folder / "page.html").read_text(encoding="utf-8"))
    return template.render(report=page, version=__version__, script=script, colors=COLORS)


_json = partial(json.dumps, separators=(",", ":"), allow_nan=False)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"


def _svg(panel: Panel, name: str) -> tuple[Markup, str]:
    element, chart = svg(panel, name)
    return Markup(element), _json(chart)
