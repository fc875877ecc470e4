"""Centralized baseline: training on the pooled samples of all clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fl.datamodules.batches import Batch, OwnBatches, RoundBatches


class EpochBatches(OwnBatches):
    """Yield shuffled batches, in a new order in each epoch. A Trainer is warned.

    Args:
        trainer: Trainer that provides the epoch; None means epoch 0.
        batches: Function that returns the batches of an epoch.
    """

    def __init__(self, trainer: Trainer | None, batches: Callable[[int], RoundBatches]) -> None:
        if trainer is not None:
            rank_zero_warn(
                "The Trainer has no FederatedLoop, so the module trains on the pooled samples of"
                " all clients, as a centralized baseline. For federated training, use"
                " Trainer(callbacks=[FederatedLoop(), ...])."
            )
        self.trainer, self.batches = trainer, batches

    def __len__(self) -> int:
        return len(self.batches(0))

    def __iter__(self) -> Iterator[Batch]:
        epoch, done = _position(self.trainer)
        return islice(self.batches(epoch), done, None)

    def worker_key(self) -> tuple[int, ...]:
        """Return a key of the epoch, and of the process."""
        epoch, _ = _position(self.trainer)
        return self.batches(epoch).worker_key()


def _position(trainer: Trainer | None) -> tuple[int, int]:
    """Return the index of the epoch, and the number of its batches that are already done."""
    if trainer is None:
        return 0, 0
    loop: Any = trainer.fit_loop  # its counters are typed as their base class, with fewer fields
    if not loop.is_resuming:
        return trainer.current_epoch, 0
    # The loader starts before Lightning corrects the restored counters. For a checkpoint at the end
    # of an epoch, or in its last batch, current_epoch is still that epoch.
    epoch, batch = loop.epoch_progress.current, loop.epoch_loop.batch_progress
    if epoch.started == epoch.processed:
        return epoch.processed, 0
    if batch.is_last_batch:
        return epoch.processed + 1, 0
    return epoch.processed, batch.current.processed
