"""Checkpoint I/O: atomic writes, and reads that execute no code."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.serialization import (
    get_crc32_options,
    get_unsafe_globals_in_checkpoint,
    set_crc32_options,
)

from lightning_fl.errors import FederationError
from lightning_fl.files import FolderLock, check_sums, error_context, one_line, write_atomically
from lightning_fl.options import check_integer


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write checkpoints atomically, and verify their checksums when they are read.

    :class:`FederatedLoop` installs it on the Trainer. Checkpoints are always loaded with
    ``weights_only=True``, unless ``Trainer.fit(weights_only=False)`` is set.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint to a temporary file beside it, then replace the old one."""
        if "://" in os.fspath(path):  # remote stores write objects atomically
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        save_with_sums(checkpoint, path)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint; see ``read_checkpoint``.

        Lightning alone would execute code in checkpoints from ``http://``, or if the environment
        variable ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` is set.
        """
        load = partial(super().load_checkpoint, path, map_location)
        if weights_only is not False:
            return read_checkpoint(path, partial(load, True))
        if "://" not in os.fspath(path) and is_zipfile(path):
            check_sums(path)
        return load(False)


def save_with_sums(content: Any, path: str | os.PathLike[str]) -> None:
    """Write a file of ``torch.save`` atomically, with checksums for :func:`check_sums`."""
    computes = get_crc32_options()
    set_crc32_options(True)
    try:
        write_atomically(path, lambda file: torch.save(content, file))
    finally:
        set_crc32_options(computes)


def read_checkpoint(
    path: str | os.PathLike[str], load: Callable[[], Any], *, in_full: bool = True
) -> dict[str, Any]:
    """Read a checkpoint, which may be damaged or come from a stranger.

    Args:
        path: Path of the file, local or remote.
        load: Function that loads the file with ``weights_only=True``.
        in_full: Whether to verify the checksum of a local file.

    Raises:
        FederationError: If the file is damaged, is no checkpoint, or holds more than data.
    """
    is_local, objects = "://" not in os.fspath(path), ""
    checkpoint: Any = None
    # torch.load may raise any exception
    with error_context(f"{path} is damaged, or not a checkpoint", Exception):
        if in_full and is_local:
            check_sums(path)
        try:
            checkpoint = load()
        except pickle.UnpicklingError:
            names = get_unsafe_globals_in_checkpoint(path) if is_local else ()
            objects = ", ".join(sorted(names)) or "objects"
        is_dict = isinstance(checkpoint, dict)
        if not objects and not (is_dict and "pytorch-lightning_version" in checkpoint):
            raise FederationError(
                "it is a torch file, but not a checkpoint of Lightning: choose one of a fit"
            )
    if objects:
        raise FederationError(
            f"{path} holds more than data: {one_line(objects)}. If you trust its source, pass"
            " weights_only=False to Trainer.fit (lightning-fl fit --weights_only=false), which lets"
            " it run code"
        )
    return dict(checkpoint)


class RoundCheckpoint(ModelCheckpoint):
    """Save the last round to ``last.ckpt``, which is replaced at each save.

    Unlike ``ModelCheckpoint(save_last=True)``, which depends on ``save_top_k``, this always saves
    the last round. To save the best round, add a ``ModelCheckpoint``.

    Args:
        dirpath: Folder of the checkpoint; None uses the logger's directory.
        filename: Name of the file, without ``.ckpt``.
        every_n_rounds: Number of rounds between checkpoints. The last round is always saved.

    Raises:
        FederationError: If ``every_n_rounds`` is not positive.
    """

    def __init__(
        self, dirpath: str | None = None, filename: str = "last", every_n_rounds: int = 1
    ) -> None:
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            every_n_epochs=check_integer("every_n_rounds", every_n_rounds, min=1),
            enable_version_counter=False,
            save_on_train_epoch_end=True,
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Resolve the folder."""
        with warnings.catch_warnings():
            # The file is replaced on purpose, and a resumed run continues in its folder.
            warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last round if it has not been saved."""
        super().on_train_end(trainer, pl_module)
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))


def lock_folders(trainer: Trainer, table: Path | None, undo: ExitStack) -> None:
    """Lock the folders of a run against other runs for the duration of a fit.

    Args:
        trainer: The Trainer, whose :class:`RoundCheckpoint` callbacks write to their folders.
        table: Path of the table of rounds; None if it is not written.
        undo: Clean-up functions of the fit, to which those of the locks are added.
    """
    if trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
        return
    written = [c.dirpath for c in trainer.callbacks if isinstance(c, RoundCheckpoint)]  # type: ignore[attr-defined]
    folders = [table and table.parent, *written]
    local = [folder for folder in folders if folder is not None and "://" not in str(folder)]
    for folder in dict.fromkeys(Path(folder).absolute() for folder in local):
        undo.callback(FolderLock(folder).release)
