"""The server, the clients and the app of a configuration of ``lightning-fl fit``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from shutil import copyfile
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import Dataset

from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule, FromClients
from lightning_fl.errors import FederationError
from lightning_fl.hooks import TRANSFER_HOOKS, overrides
from lightning_fl.integrations.client import OF_CLIENT, RemoteClient
from lightning_fl.integrations.server import OF_SERVER, RemoteServer
from lightning_fl.objectives import ClientModule

#: Options of the Trainer that the local training of a client depends on.
TRAINING = (
    *("accelerator", "precision", "gradient_clip_val", "gradient_clip_algorithm"),
    *("accumulate_grad_batches", "deterministic", "detect_anomaly"),
)
#: Options of the Trainer that change results in ways that a server and its clients do not have.
UNSUPPORTED = (
    *("limit_train_batches", "max_steps", "max_time", "min_epochs", "min_steps"),
    *("overfit_batches", "plugins", "sync_batchnorm"),
)


@dataclass(frozen=True)
class Configuration:
    """Hold what a configuration of ``lightning-fl fit`` describes, without a Trainer.

    :func:`lightning_fl.cli.parts.read_config` returns it.

    Args:
        module: The LightningModule, with the initial weights of ``lightning-fl fit``.
        data: The data module with the clients of the simulation.
        loop: The federation.
        trainer: Options of the Trainer of a client.
        num_rounds: Number of rounds.
        text: The whole configuration as YAML.
        left_out: Options that may change results and that a server and clients do not have, such as
            callbacks of the Trainer.
    """

    module: LightningModule
    data: FederatedDataModule
    loop: FederatedLoop
    trainer: Mapping[str, Any]
    num_rounds: int
    text: str
    left_out: tuple[str, ...] = ()

    def server(self, send_frozen: bool = False) -> RemoteServer:
        """Return the server of the federation.

        Args:
            send_frozen: Whether frozen parameters that are not exchanged are sent to clients, which
                otherwise have them from the same configuration.
        """
        names = ("aggregator", "policy", "sampler", *OF_SERVER)
        chosen = {name: vars(self.loop.options)[name] for name in names}
        chosen |= {"seed": self.loop.seed, "trainer": self.trainer, "send_frozen": send_frozen}
        return RemoteServer(self.module, **chosen)

    def client(self, data: FederatedDataModule | Dataset[Any] | None = None) -> RemoteClient:
        """Return a client of the federation.

        Args:
            data: The client's own samples, a data set. Batches are those of the configuration's
                data module, and so are its hooks, such as a normalization. Or a data module, with
                options of its own. None uses the data of the configuration, of which each client
                trains its part.
        """
        options = self.loop.options
        known = {**vars(options), "phases": options.phases}
        # Where buffers are None, the server warns.
        chosen = {name: known[name] for name in OF_CLIENT if known[name] is not None}
        if data is None:
            data = self.data
        elif not isinstance(data, FederatedDataModule):
            data = Site(data, self.data)
        return RemoteClient(self.module, data, options.aggregator, self.trainer, **chosen)


class Site(FromClients):
    """The samples of one client, batched and transferred as by another data module.

    Args:
        samples: Map-style data set.
        like: The other data module. Its own samples are not loaded.
    """

    def __init__(self, samples: Dataset[Any], like: FederatedDataModule) -> None:
        names = ("batch_size", "replacement", "drop_last", "eval_batch_size", "num_workers")
        options = {name: vars(like)[name] for name in names}
        super().__init__([samples], val_size=0, collate_fn=like.collate_fn, **options)
        self.like = like
        for name in TRANSFER_HOOKS:  # others are those of the module, as in a simulation
            if overrides(like, name, LightningDataModule):
                vars(self)[name] = getattr(like, name)

    def setup(self, stage: str | None = None) -> None:
        """Give the other data module, whose hooks are called, the Trainer."""
        self.like.trainer = self.trainer
        super().setup(stage)


# --- an app of a deployment -----------------------------------------------------------------------

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
            process, or the samples are a stream.
    """
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FederationError(f"{folder} exists and is not empty: choose another --output")
    found.server()  # this and the next line refuse what cannot run
    found.client()
    own = dict(_own_modules())
    num_clients = len(found.data.num_samples)
    x = found.data.example()[0] if isinstance(found.module, ClientModule) else None
    about = {
        "source": source.name,
        "name": re.sub(r"[^a-z0-9]+", "-", source.stem.lower()).strip("-") or "federation",
        "rule": type(found.loop.options.aggregator).__name__,
        "module": type(found.module).__name__,
        "version": version("lightning_fl"),
        "num_rounds": found.num_rounds,
        "num_clients": num_clients,
        "last": num_clients - 1,
        "example": "None" if x is None else f"torch.zeros({[*x.shape]}, dtype={x.dtype})",
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
