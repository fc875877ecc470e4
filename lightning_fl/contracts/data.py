"""What the loop asks of a data module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_fl.contracts.plan import RoundPlan


class ClientBatches(list[Any]):
    """Batches of several clients and local steps, in the order ``[steps, clients]``.

    Each entry is the batch of one client, as in sequential training; None if the client has
    finished.
    """


@runtime_checkable
class FederatedData(Protocol):
    """Interface of the data module (``lightning_fl.datamodules.FederatedDataModule``)."""

    #: Function that returns the plan of the round; set by the loop.
    plan: Callable[[], RoundPlan] | None
    #: Digest of the partition, stored in checkpoints.
    checksum: str
    #: Whether processes split the validation samples in a fit; otherwise each process reads all.
    shares_validation: bool
    #: Checksum of the labels of the training samples, and its name in a checkpoint.
    samples_checksum: str
    samples_are: str
    #: Whether clients have streams of samples, which training reads in order.
    is_stream: bool
    #: Class of each training sample, ``[n]``; None if it is unknown.
    class_labels: Tensor | None
    #: Samples per local step, None for all; whether they are drawn with replacement, and whether
    #: a local epoch leaves out a last smaller batch.
    batch_size: int | None
    replacement: bool
    drop_last: bool
    #: Number of training samples per client, ``[num_clients]``.
    num_samples: Tensor
    #: Name of each client; None if clients have no names.
    client_names: list[str] | None
    #: Number of batches per local epoch of each client, ``[num_clients]``.
    batches_per_epoch: Tensor

    #: Size of a sample in bytes.
    sample_bytes: int
    #: Whether the first axis of every tensor in a batch is known to be the sample axis.
    has_samples_in_front: bool
    #: Whether the local steps of a batch can be fetched one at a time.
    can_fetch_steps: bool

    def local_steps(self, round: int, position: int) -> Callable[[int], Any]:
        """Return a function that fetches the local steps of a batch of a stepwise plan.

        Its argument is the local step.
        """

    def advance(self, round: int) -> bool:
        """Make the samples of a round available; return whether rounds have different samples."""

    def samples_of(self, client: int) -> Iterator[Any]:
        """Yield all training samples of a client in batches."""

    def steps_of(self, client: int, generator: torch.Generator) -> Iterator[Any]:
        """Yield an infinite stream of a client's training batches, batched as in a round."""

    def example(self) -> Any:
        """Return a batch of two training samples; None if they are on other machines."""

    def batch_sizes(self, clients: Tensor, start: int, count: int) -> Tensor:
        """Return the batch sizes of ``count`` local steps of the clients, ``[count, k]``."""
