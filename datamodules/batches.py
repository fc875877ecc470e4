"""Select the samples of each batch, in training and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.types import FederationError, RoundPlan


@dataclass(frozen=True)
class Batching:
    """Describe how the samples of a client are grouped into batches.

    Args:
        size: Samples per batch; None, or more samples than the client has, means all of them.
        replacement: Draw each batch from all samples, with replacement, instead of making passes.
        drop_last: Drop the incomplete batch of a pass, unless it is the only one.

    Example:
        >>> batching = Batching(size=4)
        >>> batching.count(torch.tensor([10])), batching.smallest(torch.tensor([10]))
        (tensor([3]), tensor([2]))
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

    def smallest(self, n: Tensor) -> Tensor:
        """Return the size of the smallest batch in one pass over ``n`` samples, ``[k]``."""
        size = self.full(n)
        return size if self.drop_last or self.replacement else (n - 1) % size + 1

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
    """

    index: Tensor
    keys: Sequence[tuple[int, ...]]
    sizes: Sequence[int] | None = None
    stepwise: int = 0
    place: tuple[int, int] = (0, 0)

    @classmethod
    def evaluation(cls, index: Tensor, seed: int) -> Batch:
        """Return a batch for validation, test or prediction."""
        return cls(index, [(seed, RandomStream.EVALUATION_SAMPLES, int(index[0]))])


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
    """

    def __init__(
        self,
        plan: RoundPlan,
        parts: Sequence[Tensor],
        batching: Batching,
        rank: int = 0,
        world_size: int = 1,
        apart: bool = False,
    ) -> None:
        self.plan, self.parts, self.batching, self.apart = plan, parts, batching, apart
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return len(self.plan.schedule)

    def __iter__(self) -> Iterator[Batch]:
        plan, steps, clients = self.plan, self.plan.num_steps.tolist(), self.plan.clients.tolist()
        streams: dict[int, Iterator[Tensor]] = {}
        # Otherwise the first samples of all shares would draw the same numbers, and so on.
        share = (self.rank,) if self.world_size > 1 else ()
        for position, step in enumerate(plan.schedule):
            if not step.rows:  # no client on this process: the loop ignores this sample
                yield Batch(self.parts[clients[0]][:1], [(plan.seed, RandomStream.SAMPLES)])
                continue
            if step.first:
                streams = {row: self._client(clients[row]) for row in step.rows}
            index, keys = [], []
            for i in range(step.start, step.start + step.steps):
                for row in step.rows:
                    client = clients[row]
                    padding = self.parts[client][: 0 if self.apart else 1]
                    index.append(next(streams[row]) if i < steps[row] else padding)
                    keys.append((plan.seed, RandomStream.SAMPLES, plan.round, client, i, *share))
            if self.apart:
                yield Batch(torch.cat(index), keys, [len(part) for part in index])
                continue
            samples = torch.cat(_padded(index)) if len(index) > 1 else index[0]
            # A process with an empty share takes one sample, which the loop weights with 0.
            own = samples[self.rank :: self.world_size] if self.world_size > 1 else samples
            stepwise = step.steps if plan.stepwise else 0
            taken, place = own if len(own) else samples[:1], (plan.round, position)
            yield Batch(taken, keys, stepwise=stepwise, place=place)

    def worker_key(self) -> tuple[int, ...]:
        """Return a key of the round, and of the process among those that train."""
        plan = self.plan
        return plan.seed, RandomStream.SAMPLES, plan.round, plan.rank + self.rank

    def _client(self, client: int) -> Iterator[Tensor]:
        order = generator(self.plan.seed, RandomStream.BATCHES, self.plan.round, client)
        return client_batches(self.parts[client], self.batching, order)


def _padded(rows: list[Tensor]) -> list[Tensor]:
    """Pad all rows to the same length with their first elements."""
    length = max(len(row) for row in rows)
    return [
        row if len(row) == length else torch.cat([row, row[:1].expand(length - len(row))])
        for row in rows
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
