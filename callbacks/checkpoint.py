"""Checkpoints that a kill cannot spoil."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_fl.federation.checkpoint_checks import read_checkpoint
from lightning_fl.files import check_sums, write_atomically
from lightning_fl.types import FederationError


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints, written atomically and read with suspicion.

    A :class:`FederatedLoop` puts it in place. A checkpoint is data, not code, wherever it is from,
    unless ``Trainer.fit(weights_only=False)`` says that it is trusted.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint to a temporary file beside it, then replace the old one."""
        if "://" in os.fspath(path):  # A remote store writes whole objects itself.
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        computes = get_crc32_options()
        set_crc32_options(True)  # they are checked when the file is read
        try:
            write_atomically(path, lambda file: torch.save(checkpoint, file))
        finally:
            set_crc32_options(computes)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint; see ``lightning_fl/federation/checkpoint_checks.py``.

        Lightning alone would run the code that is in one from ``http://``, or where the variable
        ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` is set.
        """
        if weights_only is False:
            if "://" not in os.fspath(path) and is_zipfile(path):
                check_sums(path)
            return super().load_checkpoint(path, map_location, weights_only)
        return read_checkpoint(path, partial(super().load_checkpoint, path, map_location, True))


class RoundCheckpoint(ModelCheckpoint):
    """One ``last.ckpt`` a run, replaced after every round (or every n-th, and the last).

    ``ModelCheckpoint(save_last=True)`` follows ``save_top_k``, so its last is not the last round.
    For the best round add a ``ModelCheckpoint`` of your own.

    Args:
        dirpath: Folder; None is the logger's.
        filename: Name without ``.ckpt``.
        every_n_rounds: How often.

    Raises:
        FederationError: If ``every_n_rounds`` is not positive.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        filename: str = "last",
        every_n_rounds: int = 1,
    ) -> None:
        if every_n_rounds < 1:
            raise FederationError(f"every_n_rounds must be at least 1, got {every_n_rounds}")
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            every_n_epochs=every_n_rounds,
            enable_version_counter=False,
            save_on_train_epoch_end=True,
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the folder."""
        with warnings.catch_warnings():
            # Its one file is replaced on purpose, and a resumed run goes on beside its own.
            warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last round too, where it is not an n-th."""
        super().on_train_end(trainer, pl_module)
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
