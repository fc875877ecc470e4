"""What a data module knows of the split of its samples over clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from lightning_fl.datamodules.splits import Split
from lightning_fl.partition import Manifest, Partition


class SplitDataModule(LightningDataModule):
    """Data module with the samples of clients, as its split gives them."""

    train: Any
    partition: Partition
    num_clients: int | None
    stream_steps: int
    split: Split

    def _present(self, parts: list[Tensor]) -> None:
        #: Training samples of each client in the current step of the stream, and then the samples
        #: for fine-tuning of each unseen client.
        self.present = [*parts, *self.split.unseen]
        #: Number of present samples of each client that trains, ``[num_clients]``.
        self.num_samples = torch.tensor([len(part) for part in parts], dtype=torch.int64)

    def repeat_client(self, count: int) -> None:
        """Let clients 0 to ``count`` - 1 all have the samples of the only client.

        A process that trains one client of a federation then finds its own samples under any id.
        """
        parts = self.parts[:1] * count
        self.split = replace(self.split, names=[], parts=parts, stream_steps=[parts])
        self.num_clients = count
        self._present(parts)

    @property
    def parts(self) -> list[Tensor]:
        """Training samples of each client in the whole stream; empty before the set-up."""
        return self.split.parts

    @property
    def unseen_parts(self) -> list[Tensor]:
        """Samples for fine-tuning of each unseen client; their ids follow those of ``parts``."""
        return self.split.unseen

    @property
    def local_tests(self) -> list[Tensor]:
        """Local test samples of each client, the unseen ones last; empty if there are none."""
        return self.split.local_tests

    @property
    def client_names(self) -> list[str] | None:
        """Name of each client, the unseen ones last, if the data names clients; otherwise None."""
        return self.split.names or None

    @property
    def class_labels(self) -> Tensor | None:
        """Label of each training sample, ``[n]``; None if labels are unknown."""
        return self.split.labels

    def advance(self, round: int) -> bool:
        """Load the samples of a round, from 0, into ``present``; return whether rounds differ."""
        if self.stream_steps == 1:
            return False
        self._present(self.split.stream_steps[round % self.stream_steps])
        return True

    @property
    def class_counts(self) -> Tensor | None:
        """Number of present samples of each client and class, ``[num_clients, classes]``.

        None if the classes are unknown, or more than 100,000. Classes are integers from 0.
        """
        return self.split.class_counts(self.present[: len(self.num_samples)])

    @property
    def checksum(self) -> str:
        """Checksum of the split."""
        return self.split.checksum

    @property
    def samples_checksum(self) -> str:
        """Checksum of the labels of the training samples, as far as they are known."""
        return self.split.samples

    def manifest(self) -> Manifest:
        """Return the manifest of the split: rule, parameters, seed, indices and class counts."""
        split = self.split
        # Float labels stand for unknown classes.
        labels = torch.zeros(len(self.train)) if split.labels is None else split.labels
        tests, unseen = split.local_tests, len(split.unseen)
        return Manifest.of(self.partition, split.clients, labels, split.seed, tests, unseen)
