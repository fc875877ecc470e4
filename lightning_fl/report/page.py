"""Parts of a page: sections with text, pictures and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from lightning_fl.report.figures import png


@dataclass(frozen=True)
class Picture:
    """Picture of a section.

    Args:
        name: Name of the file, without the suffix.
        content: Content of the PNG file.
        caption: Text below the picture.
    """

    name: str
    content: bytes
    caption: str

    @classmethod
    def of(cls, name: str, figure: Figure, caption: str) -> Picture:
        """Return a figure as a picture."""
        return cls(name, png(figure), caption)


@dataclass(frozen=True)
class Table:
    """Table of a section.

    Args:
        head: Names of the columns; without any name there is no head.
        rows: Cells of each row.
        caption: Text below the table, or the text to click if it is folded.
        folded: Whether the table is collapsed at first.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """Section of a page.

    Args:
        title: Heading.
        text: Paragraphs.
        pictures: Pictures below the text.
        tables: Tables below the pictures.
        verbatim: Titles and contents of files, shown verbatim and collapsed at first.
    """

    title: str
    text: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    verbatim: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Report:
    """Contents of a page.

    Args:
        title: Heading.
        lead: Paragraphs at the top.
        figures: Names and values of the key figures.
        sections: Sections from top to bottom.
        warnings: Warnings, such as unfinished runs or unreadable files.
    """

    title: str
    lead: Sequence[str]
    figures: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    warnings: Sequence[str] = ()
