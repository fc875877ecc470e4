"""Tables to copy into a paper: LaTeX, Markdown and CSV."""

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
#: Characters with a meaning in Markdown, which a backslash takes away.
MARKDOWN = r"\`*_{}[]<>#|~$"


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

    def line(cells: Sequence[str]) -> str:
        return " & ".join(map(_latex, cells)) + r" \\"

    return "\n".join(
        [
            f"% {_latex(caption)}",
            f"\\begin{{tabular}}{{{'l' * len(head)}}}",
            *("\\hline", line(head), "\\hline", *map(line, rows), "\\hline"),
            "\\end{tabular}",
        ]
    )


def _latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in _one_line(text))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""Return a table in Markdown.

    Example:
        >>> print(markdown(["rule", "val_acc"], [["A|B", "0.5"]]))
        | rule | val\_acc |
        |---|---|
        | A\|B | 0.5 |
    """

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(map(_markdown, cells))} |"

    return "\n".join([line(head), "|---" * len(head) + "|", *map(line, rows)])


def _markdown(text: str) -> str:
    text = _one_line(text)
    return "".join(f"\\{character}" if character in MARKDOWN else character for character in text)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())
