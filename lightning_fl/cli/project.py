"""``lightning-fl init``."""

from __future__ import annotations

import shlex
from pathlib import Path

from lightning_fl.cli import fail

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
