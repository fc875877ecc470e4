"""An app of a deployment, written from a configuration: ``lightning-fl export flower CONFIG``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from shutil import copyfile

from lightning_fl.integrations.config import Configuration
from lightning_fl.types import FederationError

PROJECT = """\
# Written by: lightning-fl export flower {source}
#
#     flwr run . --stream

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "{rule} of {module}, exported by lightning_fl"
license = "Apache-2.0"
dependencies = ["lightning_fl[flower]=={version}"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "lightning-fl"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
num-rounds = {num_rounds}
num-clients = {num_clients}
# Seconds that the server waits for all clients at the start, and for their replies in a round.
timeout = 3600
# The server writes its state here after each round. A run that finds the file resumes from it.
checkpoint = ""
# The server writes the last global model here, as a state_dict.
model = "model.pt"
"""

README = """\
# {name}

{rule} of {module} with {num_clients} clients, an app of Flower written by
`lightning-fl export flower {source}`.

The environments of the server and of the clients need lightning_fl:

    pip install "lightning_fl[flower]=={version}"

Flower can install it for each run from `pyproject.toml`, if a registry has this version. Otherwise,
set `FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1` for `flwr run`, `flower-superlink` and
`flower-supernode`.

## Simulation

One machine trains all {num_clients} clients (`pip install "flwr[simulation]"`):

    flwr run . --federation-config "num-supernodes={num_clients}" --stream

## Deployment

Start a SuperLink and {num_clients} SuperNodes, with `partition-id` from 0 to {last}:

    flower-superlink --insecure
    flower-supernode --insecure --superlink HOST:9092 --node-config "partition-id=0"

`--insecure` is for trials on one machine: see Flower's pages on TLS and node authentication. Then
name the SuperLink in Flower's `config.toml` and run the app on it: `flwr run . NAME --stream`. The
run waits until all {num_clients} clients have connected. In `client_app.py`, replace the samples of
the simulation by those of the site.
"""

SERVER = '''\
"""The server of the federation in config.yaml."""

from functools import partial
from pathlib import Path

import torch
from flwr.serverapp import ServerApp

from lightning_fl.cli.parts import read_config
from lightning_fl.files import check_writable, write_atomically
from lightning_fl.integrations.flower import FederationStrategy

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    server = read_config(Path(__file__).with_name("config.yaml")).server()
    strategy = FederationStrategy(server, config["num-clients"], config["checkpoint"] or None)
    check_writable(config["model"])
    strategy.start(grid, num_rounds=config["num-rounds"], timeout=config["timeout"])
    write_atomically(config["model"], partial(torch.save, server.module.state_dict()))
'''

CLIENT = '''\
"""A client of the federation in config.yaml."""

from functools import cache
from pathlib import Path

from lightning_fl.cli.parts import read_config
from lightning_fl.integrations.flower import app_of

#: Folder on the node for what a client keeps between rounds, such as control variates, so that a
#: run that resumes finds it. None keeps it in Flower's context, which ends with the run.
KEPT = None


@cache
def client():
    found = read_config(Path(__file__).with_name("config.yaml"))
    # Node i trains client i of the data in config.yaml, as in the simulation. At a site, give its
    # own samples instead: found.client(SiteSamples())
    return found.client()


app = app_of(lambda context: client(), KEPT)
'''


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
        "README.md": README.format(**about),
        "pyproject.toml": PROJECT.format(**about),
        "config.yaml": found.text,
        "server_app.py": SERVER,
        "client_app.py": CLIENT,
    }
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
