"""Checkpoints that a kill cannot spoil."""

from __future__ import annotations

import glob
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fl.callbacks.checkpoint_checks import read_checkpoint
from lightning_fl.types import FederationError


def write_atomically(
    path: str | os.PathLike[str], write: Callable[[IO[bytes]], Any], *, durable: bool = True
) -> None:
    """Write a file beside its place, then put it there at once.

    A reader, or a run that resumes after a kill, finds the old file or the new one, whole; what
    the killed one left beside it is removed. A file has one writer.

    Args:
        path: The place.
        write: Writes the content.
        durable: Whether to wait for the disk first: else that holds for a killed process, but not
            for a machine without power.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # mkstemp puts eight characters between: no pattern of one file fits another's.
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.{'?' * 8}.tmp"):
        leftover.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


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
        else:
            write_atomically(path, lambda file: torch.save(checkpoint, file))

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint; see ``callbacks/checkpoint_checks.py``.

        Lightning alone would run the code that is in one from ``http://``, or where the variable
        ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` is set.
        """
        if weights_only is False:
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
