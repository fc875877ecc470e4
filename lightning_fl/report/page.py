"""Parts of a page: sections with text, pictures and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_fl.report.figures import Panel


@dataclass(frozen=True)
class Picture:
    """Picture of a section: panels that the report draws.

    Args:
        name: Name of the picture on the page.
        caption: Text below the picture.
        panels: The panels.
    """

    name: str
    caption: str
    panels: Sequence[Panel] = ()

    @property
    def legend(self) -> list[tuple[str, int]]:
        """Common legend of the panels; empty if each panel has its own."""
        legends = [panel.legend() for panel in self.panels]
        is_common = bool(self.panels) and bool(self.panels[0].order)
        return list(dict.fromkeys(e for legend in legends for e in legend)) if is_common else []


@dataclass(frozen=True)
class Curve:
    """Small curve in a cell of a table.

    Args:
        path: Path of SVG in a box of 100 x 22.
        marks: Path of marks at its lower edge.
        title: Its values as text.
    """

    path: str
    marks: str
    title: str


@dataclass(frozen=True)
class Table:
    """Table of a section.

    Args:
        head: Names of the columns; without any name there is no head.
        rows: Cells of each row.
        caption: Text below the table, or the text to click if it is folded.
        folded: Whether the table is collapsed at first.
        sortable: Whether a click on the name of a column sorts the rows.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str | Curve]]
    caption: str = ""
    folded: bool = False
    sortable: bool = False


@dataclass(frozen=True)
class Verbatim:
    """Text that is shown verbatim, with a button that copies it.

    Args:
        title: Title, the text to click if it is folded.
        content: The text.
        folded: Whether the text is collapsed at first.
    """

    title: str
    content: str
    folded: bool = True


@dataclass(frozen=True)
class Section:
    """Section of a page.

    Args:
        title: Heading.
        text: Paragraphs.
        pictures: Pictures below the text.
        tables: Tables below the pictures.
        verbatim: Texts below the tables.
    """

    title: str
    text: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    verbatim: Sequence[Verbatim] = ()


@dataclass(frozen=True)
class Report:
    """Contents of a page.

    Args:
        title: Heading.
        lead: Paragraphs at the top.
        figures: Names and values of the key figures.
        sections: Sections from top to bottom.
        warnings: Warnings, such as unfinished runs.
        alarms: Why results are doubtful.
    """

    title: str
    lead: Sequence[str]
    figures: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    warnings: Sequence[str] = ()
    alarms: Sequence[str] = ()
