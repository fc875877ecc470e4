"""``lightning-fl init``, ``configs`` and ``methods``, which answer without torch."""

from __future__ import annotations

import re
import shlex
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

from lightning_fl.cli import fail
from lightning_fl.cli.arguments import CONFIGS

#: Page of the documentation with the tables of all methods: in a wheel, and in a checkout.
METHODS = (
    Path(__file__).parents[1] / "methods" / "index.md",
    Path(__file__).parents[2] / "docs" / "methods" / "index.md",
)
#: The files of a new project, each with ``.txt`` behind its name.
FILES = Path(__file__).with_name("project_files")


def init(name: str) -> None:
    """Write a minimal project: a module, a configuration and a README.

    Args:
        name: New folder of the project.
    """
    folder = Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fail(f"{folder} exists and is not empty: choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    for source in sorted(FILES.glob("*.txt")):
        text = source.read_text(encoding="utf-8").replace("{name}", folder.resolve().name)
        (folder / source.stem).write_text(text, encoding="utf-8")
        print(f"Written to {folder / source.stem}")
    print(f"Next: cd {shlex.quote(str(folder))} && lightning-fl fit --config config.yaml")


def configs() -> None:
    """Print the name and the description of each configuration of the package."""
    paths = sorted(CONFIGS.rglob("*.yaml"), key=lambda path: (len(path.parts), path))
    names = {path.relative_to(CONFIGS).as_posix(): path for path in paths}
    width = max(map(len, names))
    for name, path in names.items():
        print(f"{name:{width}}  {description(path)}")


def description(path: Path) -> str:
    """Return the description of a configuration, the first sentence in its head.

    A head may begin with the command and its result, one line each.

    Args:
        path: The file.

    Example:
        >>> description(CONFIGS / "ditto_mnist.yaml")
        'Ditto (Li et al., 2021): 20 clients with two digits each, five per round.'
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next(at for at, line in enumerate(lines) if not line.startswith("#"))
    head = [line.removeprefix("# ") for line in lines[:end]]
    text = " ".join(head[2:] if head[0].startswith("lightning-fl ") else head)
    return re.split(r"(?<=\.)\s+(?=[A-Z-])", text, maxsplit=1)[0] if text else ""


def methods(word: str) -> None:
    """Print the methods of the package that have a word in their row of the documentation."""
    page = next(filter(Path.is_file, METHODS)).read_text(encoding="utf-8")
    chosen = {
        title: kept
        for title, rows in tables(page)
        if (kept := [row for row in rows if word.lower() in " ".join((title, *row)).lower()])
    }
    if not chosen:
        fail(f"no method has {word!r} in its row: lightning-fl methods lists all of them")
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    for title, rows in chosen.items():
        print(f"{title}\n")
        for method, *details in rows:
            for depth, text in ((2, method), *((6, detail) for detail in details if detail)):
                print(textwrap.indent(textwrap.fill(text, width - depth), " " * depth))
        print()


def tables(page: str) -> Iterator[tuple[str, list[list[str]]]]:
    r"""Yield the tables of a page in Markdown: the title above, and the cells without markup.

    Links in parentheses are left out.

    Args:
        page: The page.

    Example:
        >>> list(tables("## A\n\n| x | y |\n|---|---|\n| [b](c.md) ([e](f.md)) | `d` |\n"))
        [('A', [['b', 'd']])]
    """
    page = re.sub(r" \(\[[^]]+\]\([^)]*\)\)", "", page)
    page = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", page).replace("`", "")
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, *lines = section.splitlines()
        rows = [line for line in lines if line.startswith("|")][2:]
        if rows:
            yield title, [[cell.strip() for cell in row[1:-1].split("|")] for row in rows]
