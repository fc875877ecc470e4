"""``lightning-fl init``, ``configs`` and ``methods``, which answer without torch."""

from __future__ import annotations

import re
import shlex
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
    """Print the methods of the package that have a word in their row of the documentation.

    A row of the page is a line with the method, and one with its names, paper and configuration.

    Args:
        word: The word; empty prints all methods.
    """
    page = next(filter(Path.is_file, METHODS)).read_text(encoding="utf-8")
    page = re.sub(r" \(\[[^]]+\]\([^)]*\)\)", "", page)  # links in parentheses
    page = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", page).replace("`", "")
    sections = [section.splitlines() for section in re.split("^## ", page, flags=re.MULTILINE)[1:]]
    lines = []
    for title, *others in sections:
        rows = [line[1:-1].split("|") for line in others if line.startswith("|")][2:]
        for method, *details in (list(map(str.strip, row)) for row in rows):
            if word.lower() in " ".join((title, method, *details)).lower():
                lines.append(f"{title}: {method}\n    {' · '.join(filter(None, details))}")
    if not lines:
        fail(f"no method has {word!r} in its row: lightning-fl methods lists all of them")
    print("\n".join(lines))
