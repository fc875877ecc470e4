"""The parts of a page: sections with text, pictures and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from lightning_fl.report.figures import png


@dataclass(frozen=True)
class Picture:
    """A picture.

    Args:
        name: Name of its file, without the suffix.
        content: The PNG file.
        caption: What it shows.
    """

    name: str
    content: bytes
    caption: str

    @classmethod
    def of(cls, name: str, figure: Figure, caption: str) -> Picture:
        """Return the picture of a figure."""
        return cls(name, png(figure), caption)


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        head: Names of the columns; empty names leave the head out.
        rows: Cells of each row.
        caption: What it shows.
        folded: Whether a reader has to unfold it.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Args:
        title: Its heading.
        text: Paragraphs.
        pictures: Pictures below the text.
        tables: Tables below the pictures.
        verbatim: Titles and texts of files that are shown as they are, folded.
    """

    title: str
    text: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    verbatim: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Report:
    """What a page shows.

    Args:
        title: The heading.
        lead: Paragraphs at the top.
        figures: Names and values of the key figures.
        sections: Parts of the page, from the top.
        warnings: What is unfinished, differs, or could not be read.
    """

    title: str
    lead: Sequence[str]
    figures: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    warnings: Sequence[str] = ()
