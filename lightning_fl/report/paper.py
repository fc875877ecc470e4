"""Tables in LaTeX for a paper."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_fl.errors import FederationError
from lightning_fl.report.lead import alarms
from lightning_fl.report.measures import Comparison
from lightning_fl.report.words import NBSP, plus_minus, span

#: Characters with a meaning in LaTeX, and their replacements.
LATEX = {character: f"\\{character}" for character in "&%$#_{}"}
LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", NBSP: "~"}
LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {'"': r"\textquotedbl{}", "…": r"\ldots{}"}
LATEX |= {"[": "{[}", "]": "{]}"}  # after a line break, it would be an optional argument


def latex(compared: Comparison, columns: Sequence[str] = (), percent: bool = False) -> str:
    r"""Return a table of groups in LaTeX, which needs the package booktabs.

    A cell is the mean over the seeds, and their sample standard deviation with two digits. The best
    mean of a column is bold if the seeds separate it from all other groups, and its name tells
    whether more or less is better. Runs with an alarm are never the best.

    Args:
        compared: Measures of the groups.
        columns: Measures, or columns of the tables of rounds of which the last value counts. By
            default, the final value of the metric, and the metrics of the test.
        percent: Whether shares are in percent: values from 0 to 1 of which more is better.

    Raises:
        FederationError: If no run has a column.
    """
    if not columns:
        tested = {name for run in compared.runs for name in run.test.get("metrics", {})}
        columns = [name for name in compared.names if name.startswith("final ") or name in tested]
    if unknown := [name for name in columns if name not in compared.known]:
        raise FederationError(
            f"no run has a column {unknown[0]!r}: they have {', '.join(compared.known)}"
        )
    head, cells = ["group"], [[_text(group.name)] for group in compared.groups]
    for name in columns:
        values = [compared.values(group, name) for group in compared.groups]
        every = [value for each in values for value in each]
        is_share = compared.mode(name) == "max" and all(0 <= value <= 1 for value in every)
        best, close = compared.best(name) or (None, [""])
        factor = 100 if percent and is_share else 1
        head.append(_text(name + " (%)" * (factor > 1)))
        for at, (group, each) in enumerate(zip(compared.groups, values, strict=True)):
            cell = _cell([factor * value for value in each], at == best and not close)
            is_whole = len(each) in (0, len(group.runs))
            cells[at].append(cell + ("" if is_whole else f" ({len(each)} of {len(group.runs)})"))
    seeds = span([len(group.runs) for group in compared.groups])
    lines = [
        f"% Needs \\usepackage{{booktabs}}. Mean and sample standard deviation, seeds: {seeds}.",
        "% Bold: best, where the 95 % interval of the paired differences from each other group does"
        " not contain 0.",
        *(
            f"% {_text(name)}: {compared.mode(name) or 'not known whether max or min'} is best."
            for name in columns
        ),
        *(f"% {_text(alarm)}" for run in compared.runs for alarm in alarms(run)),
        f"\\begin{{tabular}}{{l{'r' * len(columns)}}}",
        *("\\toprule", rf"{' & '.join(head)} \\", "\\midrule"),
        *(rf"{' & '.join(row)} \\" for row in cells),
        *("\\bottomrule", "\\end{tabular}"),
    ]
    return "\n".join(lines) + "\n"


def _cell(values: Sequence[float], is_bold: bool) -> str:
    r"""Return mean and standard deviation.

    Example:
        >>> print(_cell([0.5, 0.61, 0.7], is_bold=True), _cell([12345.0], is_bold=False))
        $\mathbf{0.60} \pm 0.10$ $12{,}345$
    """
    text = plus_minus(values).replace(NBSP, " ").replace(",", "{,}")
    if not any(map(str.isdigit, text)):  # unknown or not finite
        return text
    mean, _, std = text.partition(" ± ")
    mean = rf"\mathbf{{{mean}}}" if is_bold else mean
    return f"${mean}$" if not std else rf"${mean} \pm {std}$"


def _text(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in " ".join(text.splitlines()))
