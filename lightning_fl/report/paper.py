"""Tables in LaTeX, to copy into a paper."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_fl.report.words import NBSP

#: Characters with a meaning in LaTeX, and their replacements.
LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "[": "{[}",  # after a line break, it would be an optional argument
    "]": "{]}",
    "±": r"$\pm$",
    "…": r"\ldots{}",
    NBSP: "~",
}


def latex(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    r"""Return a table in LaTeX, without packages.

    Example:
        >>> print(latex(["rule", "val_acc"], [["A&B", "0.5"]], "50 %"))
        % 50 \%
        \begin{tabular}{ll}
        \hline
        rule & val\_acc \\
        \hline
        A\&B & 0.5 \\
        \hline
        \end{tabular}
    """
    first, *others = [" & ".join(map(_latex, row)) for row in [head, *rows]]
    lines = [
        f"% {_latex(caption)}",
        f"\\begin{{tabular}}{{{'l' * len(head)}}}",
        *("\\hline", rf"{first} \\", "\\hline"),
        *(rf"{row} \\" for row in others),
        *("\\hline", "\\end{tabular}"),
    ]
    return "\n".join(lines)


def _latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in " ".join(text.splitlines()))
