"""Select the samples of each batch, in training and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.errors import FederationError
from lightning_fl.functional.randomness import RandomStream, generator


@dataclass(frozen=True)
class Batching:
    """Describe how the samples of a client are grouped into batches.

    Args:
        size: Samples per batch; None, or more samples than the client has, means all of them.
        replacement: Draw each batch from all samples, with replacement, instead of making passes.
        drop_last: Drop the incomplete batch of a pass, unless it is the only one.

    Example:
        >>> Batching(size=4).count(torch.tensor([10]))
        tensor([3])
    """

    size: int | None = None
    replacement: bool = False
    drop_last: bool = False

    def full(self, n: Tensor) -> Tensor:
        """Return the full batch size of clients with ``n`` samples, ``[k]``."""
        return n if self.size is None else n.clamp(max=self.size)

    def count(self, n: Tensor) -> Tensor:
        """Return the number of batches in one pass over ``n`` samples, ``[k]``."""
        size = self.full(n)
        return n // size if self.drop_last else (n + size - 1) // size

    def sizes(self, n: Tensor, start: int, count: int) -> Tensor:
        """Return the sizes of consecutive batches of clients with ``n`` samples.

        Args:
            n: Samples of each client, ``[k]``.
            start: Index of the first batch.
            count: Number of batches.

        Returns:
            Sizes, ``[count, k]``.
        """
        size = self.full(n)
        if self.drop_last or self.replacement:
            return size.expand(count, -1)
        batches = self.count(n)
        is_last = torch.arange(start, start + count)[:, None] % batches == batches - 1
        return torch.where(is_last, n - (batches - 1) * size, size)


def client_batches(
    part: Tensor, batching: Batching, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield an infinite stream of a client's batches, reshuffled in every pass over its samples.

    Args:
        part: Indices of the client's samples, ``[n]``.
        batching: How samples are grouped into batches.
        generator: Random generator of the order.

    Example:
        >>> batches = client_batches(torch.arange(5), Batching(2), torch.Generator().manual_seed(0))
        >>> sorted(torch.cat([next(batches) for _ in range(3)]).tolist())
        [0, 1, 2, 3, 4]
    """
    n = len(part)
    size = n if batching.size is None else min(batching.size, n)
    while True:
        if batching.replacement:
            yield part[torch.randint(n, (size,), generator=generator)]
            continue
        order = part.index_select(0, torch.randperm(n, generator=generator))
        for at in range(0, n - n % size if batching.drop_last else n, size):
            yield order[at : at + size]


class Draws(NamedTuple):
    """Random numbers for the augmentation of a training batch on its device.

    They are the last element of the batch until ``on_after_batch_transfer`` of the data module.

    Args:
        numbers: Independent random numbers below 2^24 of each sample, ``[n, draws]``. Integers,
            because precision plugins would round floating-point numbers.

    Example:
        >>> Draws(torch.tensor([[0, 2**23]])).uniform()
        tensor([[0.0000, 0.5000]])
    """

    numbers: Tensor

    @classmethod
    def sample(cls, count: int, draws: int, generator: torch.Generator | None) -> Draws:
        """Draw the numbers of ``count`` samples from a generator; None means zeros."""
        if generator is None:
            return cls(torch.zeros(count, draws, dtype=torch.int32))
        size = (count, draws)
        return cls(torch.randint(2**24, size, dtype=torch.int32, generator=generator))

    def uniform(self) -> Tensor:
        """Return the numbers divided by 2^24, which are uniform in [0, 1), ``[n, draws]``."""
        return self.numbers.float() / 2**24


@dataclass(frozen=True)
class Batch:
    """Hold the samples of a batch and the keys of the random streams of their transforms.

    Args:
        index: Indices of the samples, ``[n]``.
        keys: One key for the batch, or one key per client and local step.
        sizes: Number of samples per client and local step, to collate them separately; None
            collates all samples together.
        stepwise: Number of local steps of equal size in the batch. Only the first step is fetched
            with the batch; 0 fetches the whole batch.
        place: Round, and position in the round, of a stepwise batch.
        draws: Random numbers for augmentation, ``[n, draws]``; None without augmentation.
        client: Id of the client of the samples; None for training batches, which have it in their
            keys, and for samples of no client.
    """

    index: Tensor
    keys: Sequence[tuple[int, ...]]
    sizes: Sequence[int] | None = None
    stepwise: int = 0
    place: tuple[int, int] = (0, 0)
    draws: Tensor | None = None
    client: int | None = None

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Return the parts of the batch with given numbers of samples."""
        index = self.index.split(list(sizes))
        if self.draws is None:
            return [replace(self, index=part) for part in index]
        draws = self.draws.split(list(sizes))
        return [replace(self, index=i, draws=d) for i, d in zip(index, draws, strict=True)]

    @classmethod
    def evaluation(cls, index: Tensor, seed: int, client: int | None = None) -> Batch:
        """Return a batch for validation, test or prediction."""
        return cls(index, [(seed, RandomStream.EVALUATION_SAMPLES, int(index[0]))], client=client)


class OwnBatches(DistributedSampler[Batch]):
    """Base class of samplers of whole batches, for a loader with ``batch_size=None``.

    It inherits from DistributedSampler only so that Lightning does not replace it by a distributed
    sampler when several processes train.
    """

    def __init__(self) -> None:
        """Skip torch's constructor, which distributes samples."""

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the batches depend only on the plan."""

    def worker_key(self) -> tuple[int, ...]:
        """Return the key of the seeds of loader processes.

        Batches have keys of their own. The seeds are for random generators that a data set creates
        in a loader process, as from ``get_worker_info().seed``.
        """
        raise NotImplementedError


class RoundBatches(OwnBatches):
    """Yield the batches of a round, one client after another, or one group after another.

    Every iteration gives the same batches. With several clients or local steps per batch, the
    samples are in the order ``[steps, k, samples]`` for ``k`` clients. A client with fewer samples
    than another, or with no steps left, is padded with its own first sample, unless the samples of
    each client are collated separately.

    Args:
        plan: Plan of the round.
        parts: Indices of each client's samples.
        batching: How samples are grouped into batches.
        rank: Index of the share of each batch that this process takes (DDP inside a client).
        world_size: Number of shares.
        apart: Whether to collate the samples of each client and local step separately.
        draws: Number of random numbers per sample for augmentation.
    """

    def __init__(
        self,
        plan: RoundPlan,
        parts: Sequence[Tensor],
        batching: Batching,
        rank: int = 0,
        world_size: int = 1,
        apart: bool = False,
        draws: int = 0,
    ) -> None:
        self.plan, self.parts, self.batching, self.apart = plan, parts, batching, apart
        self.rank, self.world_size, self.draws = rank, world_size, draws

    def __len__(self) -> int:
        return len(self.plan.schedule)

    def __iter__(self) -> Iterator[Batch]:
        plan, steps, clients = self.plan, self.plan.num_steps.tolist(), self.plan.clients.tolist()
        streams: dict[int, Iterator[tuple[Tensor, list[Tensor]]]] = {}
        # Otherwise the first samples of all shares would draw the same numbers, and so on.
        share = (self.rank,) if self.world_size > 1 else ()
        for position, step in enumerate(plan.schedule):
            if not step.rows:  # no client on this process: the loop ignores this sample
                yield Batch(self.parts[clients[0]][:1], [(plan.seed, RandomStream.SAMPLES)])
                continue
            if step.first:
                streams = {row: self._client(clients[row]) for row in step.rows}
            index, draws, keys = [], [], []
            for i in range(step.start, step.start + step.steps):
                for row in step.rows:
                    client = clients[row]
                    if i < steps[row]:
                        samples, numbers = next(streams[row])
                    else:
                        samples = self.parts[client][: 0 if self.apart else 1]
                        numbers = self._numbers(samples, None)
                    index.append(samples)
                    draws += numbers
                    keys.append((plan.seed, RandomStream.SAMPLES, plan.round, client, i, *share))
            sizes = [len(part) for part in index] if self.apart else None
            stepwise = step.steps if plan.stepwise and not self.apart else 0
            drawn = self._joined(draws) if draws else None
            place = plan.round, position
            yield Batch(self._joined(index), keys, sizes, stepwise, place, drawn)

    def worker_key(self) -> tuple[int, ...]:
        """Return a key of the round, and of the process among those that train."""
        plan = self.plan
        return plan.seed, RandomStream.SAMPLES, plan.round, plan.rank + self.rank

    def _client(self, client: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield the indices of each batch of a client, and its random numbers if there are any."""
        key = self.plan.round, client
        order = generator(self.plan.seed, RandomStream.BATCHES, *key)
        numbers = generator(self.plan.seed, RandomStream.AUGMENTATION, *key) if self.draws else None
        for index in client_batches(self.parts[client], self.batching, order):
            yield index, self._numbers(index, numbers)

    def _numbers(self, samples: Tensor, generator: torch.Generator | None) -> list[Tensor]:
        return [Draws.sample(len(samples), self.draws, generator).numbers] if self.draws else []

    def _joined(self, rows: list[Tensor]) -> Tensor:
        """Concatenate the entries of clients and local steps, and take the share of the process."""
        if self.apart:
            return torch.cat(rows)
        joined = torch.cat(_padded(rows)) if len(rows) > 1 else rows[0]
        # A process with an empty share takes one sample, which the loop weights with 0.
        own = joined[self.rank :: self.world_size] if self.world_size > 1 else joined
        return own if len(own) else joined[:1]


def _padded(rows: list[Tensor]) -> list[Tensor]:
    """Pad all rows to the same length with their first elements."""
    lengths = [row.shape[0] for row in rows]  # len takes longer
    length = max(lengths)
    return [
        row if size == length else torch.cat([row, row[:1].expand(length - size, *row.shape[1:])])
        for row, size in zip(rows, lengths, strict=True)
    ]


class EvaluationBatches(OwnBatches):
    """Yield all samples in order, with the same number of batches on every process.

    Args:
        n: Number of samples.
        batch_size: Maximum number of samples per batch.
        seed: Seed of the run, for random transforms.
        rank: Index of this process.
        world_size: Number of processes that share the samples.

    Raises:
        FederationError: If there are fewer samples than processes.
    """

    def __init__(
        self, n: int, batch_size: int, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        if n < world_size:
            raise FederationError(
                f"{n} samples cannot be evaluated by {world_size} processes, because each process"
                " needs at least one: lower devices, or use more samples"
            )
        if world_size == 1:
            batches = torch.arange(n).split(batch_size)
        else:
            each = min(-(-n // (batch_size * world_size)), n // world_size)
            batches = torch.arange(n).tensor_split(each * world_size)
        self.batches, self.seed = batches[rank::world_size], seed

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return (Batch.evaluation(index, self.seed) for index in self.batches)

    def worker_key(self) -> tuple[int, ...]:
        """Return a key that is the same in every evaluation."""
        return self.seed, RandomStream.EVALUATION_SAMPLES
