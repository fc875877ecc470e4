"""Centralized baseline: training on the pooled samples of all clients."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.datamodules.batches import Batch, Batching, OwnBatches, RoundBatches


class EpochBatches(OwnBatches):
    """Yield shuffled batches, in a new order in each epoch. A Trainer is warned.

    An epoch is a round with one client that holds all samples.

    Args:
        trainer: Trainer that provides the epoch; None means epoch 0.
        part: Indices of the samples, ``[n]``.
        batching: How samples are grouped into batches.
        seed: Seed of the run.
        rank: Index of the share of each batch that this process takes.
        world_size: Number of shares.
        draws: Number of random numbers per sample for augmentation.
    """

    def __init__(
        self,
        trainer: Trainer | None,
        part: Tensor,
        batching: Batching,
        seed: int,
        rank: int,
        world_size: int,
        draws: int = 0,
    ) -> None:
        if trainer is not None:
            rank_zero_warn(
                "The Trainer has no FederatedLoop, so the module trains on the pooled samples of"
                " all clients, as a centralized baseline. For federated training, use"
                " Trainer(callbacks=[FederatedLoop(), ...])."
            )
        self.trainer, self.seed = trainer, seed
        self.part, self.batching = part, batching
        self.steps = batching.count(torch.tensor([len(part)]))
        self.share, self.draws = (rank, world_size), draws

    def __len__(self) -> int:
        return int(self.steps)

    def __iter__(self) -> Iterator[Batch]:
        epoch, done = _position(self.trainer)
        return islice(self._batches(epoch), done, None)

    def _batches(self, epoch: int) -> RoundBatches:
        plan = RoundPlan(self.seed, epoch, torch.zeros_like(self.steps), self.steps)
        return RoundBatches(plan, [self.part], self.batching, *self.share, draws=self.draws)

    def worker_key(self) -> tuple[int, ...]:
        """Return a key of the epoch, and of the process."""
        epoch, _ = _position(self.trainer)
        return self._batches(epoch).worker_key()


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
