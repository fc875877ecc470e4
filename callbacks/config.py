"""Callback that saves the configuration of a run."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_fl.files import write_atomically


class RunConfig(Callback):
    """Write the configuration of a fit to ``config.yaml`` in the folder of the run.

    The run can be repeated with ``fit --config config.yaml``. A resumed fit with different options
    keeps ``config.yaml`` and writes ``config_resumed_1.yaml`` (2, 3, ...) beside it. Nothing is
    written if the fit fails before training starts.

    Args:
        text: Configuration as YAML.
        folder: Folder of the run.
    """

    def __init__(self, text: str, folder: Path) -> None:
        self.text, self.folder = text, folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the configuration after all checks at the start of the fit."""
        if not trainer.is_global_zero:
            return
        path = self.folder / "config.yaml"
        if path.exists() and not path.is_symlink():  # a link is replaced
            earlier = [path, *self.folder.glob("config_resumed_*.yaml")]
            if any(each.read_bytes() == self.text.encode() for each in earlier):
                return
            path = self.folder / f"config_resumed_{len(earlier)}.yaml"
        write_atomically(path, self.text)
