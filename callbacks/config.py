"""The configuration of a run in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_fl.files import write_atomically


class RunConfig(Callback):
    """Write what ``fit`` runs to ``config.yaml`` in the folder of the run; ``fit`` repeats it.

    A resumed fit with other options leaves ``config.yaml`` alone and writes
    ``config_resumed_1.yaml`` (2, 3, ...) beside it. Nothing is written for a fit that is refused.

    Args:
        text: The configuration, YAML.
        folder: Folder of the run.
        resumed: Whether the fit goes on with the run of this folder.
    """

    def __init__(self, text: str, folder: Path, resumed: bool) -> None:
        self.text, self.folder, self.resumed = text, folder, resumed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the configuration, once everything has agreed to start."""
        if not trainer.is_global_zero:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "config.yaml"
        if self.resumed and path.exists():
            earlier = [path, *self.folder.glob("config_resumed_*.yaml")]
            if any(_options(each.read_text()) == _options(self.text) for each in earlier):
                return
            path = self.folder / f"config_resumed_{len(earlier)}.yaml"
        write_atomically(path, self.text)


def _options(text: str) -> Any:
    """Return what a configuration says but for the checkpoint that the fit goes on from."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:  # damaged, or of a stranger
        return None
    return {k: v for k, v in found.items() if k != "ckpt_path"} if isinstance(found, dict) else None
