"""Checkpoint I/O with atomic writes and validated reads."""

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
from packaging.version import Version
from torch import Tensor, nn
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_fl.federation.compare import COUNT, compare
from lightning_fl.federation.frozen import FrozenTensors, complete
from lightning_fl.files import (
    FolderLock,
    archive_size,
    check_sums,
    error_context,
    one_line,
    short_repr,
    write_atomically,
)
from lightning_fl.options import check_integer
from lightning_fl.types import FederationError

#: Maximum number of objects in a tree (each takes at least one byte), and of nested levels.
MAX_PARTS, MAX_LEVELS = 2**26, 64
#: Entries of a checkpoint that Lightning reads.
_OUTLINE: dict[str, Any] = {
    "pytorch-lightning_version": str,
    "state_dict": {str: object},
    "epoch": COUNT,
    "global_step": COUNT,
    "loops": {str: dict},
    "callbacks": {str: dict},
    "optimizer_states": [dict, ...],
    "lr_schedulers": [dict, ...],
}


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write checkpoints atomically, and validate them when they are read.

    :class:`FederatedLoop` installs it on the Trainer. Checkpoints are always loaded with
    ``weights_only=True``, unless ``Trainer.fit(weights_only=False)`` is set.

    Local checkpoints do not hold the constant tensors of a fit, unless ``checkpoint_frozen`` is
    set: see :mod:`lightning_fl.federation.frozen`.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Tensors that checkpoints refer to; None saves everything.
        self.frozen: FrozenTensors | None = None
        #: Module of the Trainer, which may have these tensors when a checkpoint is loaded.
        self.module: nn.Module | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint to a temporary file beside it, then replace the old one."""
        if "://" in os.fspath(path):  # remote stores write objects atomically
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        computes = get_crc32_options()
        set_crc32_options(True)  # verified by load_checkpoint
        try:
            if self.frozen is not None:
                checkpoint = self.frozen.leave_out(checkpoint, Path(path).parent)
            write_atomically(path, lambda file: torch.save(checkpoint, file))
        finally:
            set_crc32_options(computes)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read and validate a checkpoint; see ``read_checkpoint``.

        Lightning alone would execute code in checkpoints from ``http://``, or if the environment
        variable ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` is set.
        """
        if weights_only is False:
            if "://" not in os.fspath(path) and is_zipfile(path):
                check_sums(path)
            checkpoint = super().load_checkpoint(path, map_location, weights_only)
        else:
            load = partial(super().load_checkpoint, path, map_location, True)
            checkpoint = read_checkpoint(path, load)
        if isinstance(checkpoint, dict):
            complete(checkpoint, path, self.module)
        return checkpoint


def complete_checkpoint(path: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    """Write a copy of a checkpoint that includes the frozen tensors of the file beside it.

    The copy can be loaded without this package, and by ``MyModule.load_from_checkpoint(output)``.

    Args:
        path: The checkpoint, with ``frozen-*.pt`` in its folder.
        output: Path of the copy.

    Raises:
        FederationError: If a file is missing or damaged.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "last.ckpt")
        ...     net = nn.Linear(2, 2)
        ...     writer = AtomicCheckpointIO()
        ...     writer.frozen = FrozenTensors({"weight": net.weight})
        ...     checkpoint = {"pytorch-lightning_version": "2.6", "state_dict": net.state_dict()}
        ...     writer.save_checkpoint(checkpoint, path)
        ...     list(torch.load(path)["state_dict"])
        ...     complete_checkpoint(path, path.with_name("whole.ckpt"))
        ...     list(torch.load(path.with_name("whole.ckpt"))["state_dict"])
        ['bias']
        ['bias', 'weight']
    """
    reader = AtomicCheckpointIO()
    reader.save_checkpoint(reader.load_checkpoint(Path(path)), Path(output))


def read_checkpoint(
    path: str | os.PathLike[str], load: Callable[[], Any], *, in_full: bool = True
) -> dict[str, Any]:
    """Read a checkpoint, which may be damaged or untrusted, and validate the file.

    What it holds is compared with the run later, by ``lightning_fl/federation/resume.py``.

    Args:
        path: Path of the file, local or remote.
        load: Function that loads the file with ``weights_only=True``.
        in_full: Whether to verify the checksums of the contents.

    Raises:
        FederationError: If the file is damaged, is not a checkpoint of Lightning 2, contains more
            than plain data, or needs more memory than its size.
    """
    is_local = "://" not in os.fspath(path)
    # torch.load may raise any exception
    with error_context(f"{path} is damaged, or not a checkpoint", Exception):
        size = archive_size(path) if is_local else None
        try:
            checkpoint = load()
        except pickle.UnpicklingError as error:
            # Only the cause, as torch's advice is to run the code in the file.
            cause = next((line for line in str(error).splitlines() if "nsupported" in line), error)
            what = str(cause).rpartition("WeightsUnpickler error: ")[2].partition(". ")[0]
            raise FederationError(
                f"it holds more than data: {one_line(what)}. If you trust its source, pass"
                " weights_only=False to Trainer.fit (lightning-fl fit --weights_only=false), which"
                " lets it run code"
            ) from error
        if not isinstance(checkpoint, dict) or "pytorch-lightning_version" not in checkpoint:
            raise FederationError(
                "it is a torch file, but not a checkpoint of Lightning: choose one of a fit"
            )
        check_outline(checkpoint, size)
    if in_full and is_local:
        check_sums(path)
    return checkpoint


def check_outline(checkpoint: dict[str, Any], size: int | None = None) -> None:
    """Check that a checkpoint contains plain data only and that Lightning can read it.

    Args:
        checkpoint: Contents of the file.
        size: Size of the file in bytes; None if unknown.

    Raises:
        FederationError: If the checkpoint is invalid.
        packaging.version.InvalidVersion: If it has no valid version of Lightning.
    """
    for name, tree in checkpoint.items():
        # Tensors of the model are checked against the module when they are loaded.
        _check_data(tree, size, has_any_tensors=name == "state_dict")
    names = checkpoint.keys() | {"pytorch-lightning_version", "state_dict"}
    compare(checkpoint, {name: like for name, like in _OUTLINE.items() if name in names})
    if (version := Version(checkpoint["pytorch-lightning_version"])) < Version("2.0"):
        raise FederationError(
            f"it is of Lightning {version}: bring it up to date with python -m"
            " lightning.pytorch.utilities.upgrade_checkpoint"
        )


def _check_data(tree: Any, size: int | None, has_any_tensors: bool) -> None:
    """Check that a tree holds plain data, and no more of it than a file of this size can."""
    todo, count = [(tree, 0)], 0
    while todo:
        item, level = todo.pop()
        if isinstance(item, dict | list | tuple | set):
            count += len(item)
            if count > min(size or MAX_PARTS, MAX_PARTS) or level > MAX_LEVELS:  # as in a cycle
                raise FederationError(
                    f"it has more parts than bytes, or is nested more than {MAX_LEVELS} levels deep"
                )
            children = item.values() if isinstance(item, dict) else item
            todo += [(child, level + 1) for child in children]
        elif not isinstance(item, Tensor):
            continue
        elif not has_any_tensors:
            is_dense = type(item) in (Tensor, nn.Parameter) and item.layout == torch.strided
            if not is_dense or item.is_meta or item.is_quantized or item.is_nested:
                raise FederationError(f"a {type(item).__name__} is not simply its numbers")
            if size is not None and item.nbytes > size:
                raise FederationError(f"a tensor of {list(item.shape)} is larger than the file")
        attributes = dict(getattr(item, "__dict__", {}))  # could override methods
        if isinstance(item, dict) and "_metadata" in attributes:  # versions in a state_dict
            versions = attributes.pop("_metadata")
            compare(versions, {str: {str: int | dict}}, "_metadata")
            todo.append((versions, level + 1))
        if attributes:
            name = short_repr(next(iter(attributes)))
            raise FederationError(f"{type(item).__name__} has an attribute {name}")


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
        self,
        dirpath: str | None = None,
        filename: str = "last",
        every_n_rounds: int = 1,
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
