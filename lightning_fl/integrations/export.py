"""An app of a deployment, written from a configuration: ``lightning-fl export flower CONFIG``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from shutil import copyfile

from lightning_fl.errors import FederationError
from lightning_fl.integrations.config import Configuration

#: Files of an app, with names of :func:`write_flower_app` in braces.
TEMPLATES = Path(__file__).parent / "flower_app"


def write_flower_app(found: Configuration, source: Path, output: str | Path) -> list[Path]:
    """Write a Flower app that runs the federation of a configuration.

    Modules in the current folder that the configuration has imported are copied.

    Args:
        found: The configuration.
        source: Its file, which gives the app its name.
        output: Folder of the app.

    Returns:
        The files.

    Raises:
        FederationError: If the folder is not empty, the rule or the policy needs all clients in one
            process, the parameters are in bfloat16, or the samples are a stream.
    """
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FederationError(f"{folder} exists and is not empty: choose another --output")
    found.server()  # this and the next line refuse what cannot run
    found.client()
    if found.trainer["precision"] == "bf16-true":
        raise FederationError(
            "the parameters of precision: bf16-true are in bfloat16, which Flower cannot send: set"
            " precision: bf16-mixed"
        )
    own = dict(_own_modules())
    num_clients = len(found.data.num_samples)
    about = {
        "source": source.name,
        "name": re.sub(r"[^a-z0-9]+", "-", source.stem.lower()).strip("-") or "federation",
        "rule": type(found.loop.options.aggregator).__name__,
        "module": type(found.module).__name__,
        "version": version("lightning_fl"),
        "num_rounds": found.num_rounds,
        "num_clients": num_clients,
        "last": num_clients - 1,
    }
    texts = {
        path.stem: path.read_text(encoding="utf-8").format(**about)
        for path in sorted(TEMPLATES.glob("*.template"))
    }
    texts["config.yaml"] = found.text
    if taken := sorted(texts.keys() & own.keys()):
        raise FederationError(f"the configuration uses a file {taken[0]}: rename it")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name, path in own.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copyfile(path, folder / name)
    return [folder / name for name in [*texts, *own]]


def _own_modules() -> Iterator[tuple[str, Path]]:
    """Return the modules in the current folder that are imported: file in the app, and file."""
    here = Path.cwd()
    for name, module in sorted(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "/")
        if name.partition(".")[0] in ("lightning_fl", "__main__"):
            continue
        if path.suffix != ".py" or not path.is_relative_to(here):
            continue
        if not {"site-packages", "dist-packages"} & set(path.relative_to(here).parts):
            end = "/__init__.py" if path.name == "__init__.py" else ".py"
            yield name.replace(".", "/") + end, path
