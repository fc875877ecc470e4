"""Any map-style data set, split over clients."""

from __future__ import annotations

import operator
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from lightning_fl.functional.randomness import (
    Purpose,
    derive_seed,
    generator,
    run_seed,
    seeded_rng,
)
from lightning_fl.partition import IID, Manifest, Partition, checksum
from lightning_fl.types import ClientBatches, FederationError, RoundPlan, check_package

Collate = Callable[[list[Any]], Any]
#: Hooks that change a batch on its way to the device.
TRANSFER_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)
#: Packages whose hooks are known to treat each sample by itself.
_SAMPLEWISE = {"lightning", "lightning_fl"}
#: From inputs and labels, ``[n, ...]`` and ``[n]``, to others.
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class InMemory(Dataset[Any]):
    """Tensors of equal length in memory; a batch is one indexing operation a tensor.

    Example:
        >>> InMemory(torch.arange(4.0), torch.tensor([0, 1, 0, 1])).fetch(torch.tensor([3, 0]))
        (tensor([3., 0.]), tensor([1, 0]))
    """

    def __init__(self, *tensors: Tensor) -> None:
        if not tensors or len({len(t) for t in tensors}) != 1:
            raise FederationError(
                f"tensors of a data set have one length, got {[len(t) for t in tensors]}"
            )
        self.tensors = tensors
        self._places: dict[int, tuple[Tensor, ...]] = {}
        self._copy: InMemory | None = None

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(t[index] for t in self.tensors)

    @property
    def bytes(self) -> int:
        """Memory that the samples take."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def on(self, device: torch.device) -> InMemory:
        """Return the samples on a device: themselves, or a copy that is made once."""
        if all(t.device == device for t in self.tensors):
            return self
        if self._copy is None or self._copy.tensors[0].device != device:
            self._copy = InMemory(*(t.to(device) for t in self.tensors))
        return self._copy

    def fetch(self, index: Tensor, reuse: bool = False) -> tuple[Tensor, ...]:
        """Return the samples of a batch, stacked.

        Args:
            index: Which, ``[n]``.
            reuse: Whether to write over what an earlier call of this kind has returned: new memory
                takes several times as long as the copy.
        """
        index = index.to(self.tensors[0].device, non_blocking=True)
        # index_select, not t[index]: several times faster for the batches of small clients.
        if not reuse:
            return tuple(t.index_select(0, index) for t in self.tensors)
        n = len(index)
        if n not in self._places:
            self._places[n] = tuple(t.new_empty(n, *t.shape[1:]) for t in self.tensors)
        for tensor, place in zip(self.tensors, self._places[n], strict=True):
            torch.index_select(tensor, 0, index, out=place)
        return self._places[n]


class Changed(Dataset[Any]):
    """A map-style data set, some of whose samples are changed when they are read."""

    def __init__(self, data: Any, index: Tensor, change: Change) -> None:
        self.data, self.index, self.change = data, set(index.tolist()), change

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        x, *rest, y = self.data[i]
        if i in self.index:
            (x,), (label,) = self.change(x[None], torch.as_tensor(y)[None])
            y = label if isinstance(y, Tensor) else int(label)
        return (x, *rest, y)


@dataclass(frozen=True)
class Batch:
    """Which samples a batch holds, and the keys of the randomness that their transforms may use.

    With several clients or local steps in it each has a key.
    """

    index: Tensor
    keys: Sequence[tuple[int, ...]]
    #: Number of samples of each client and local step, which are collated apart from each other;
    #: None collates all samples together.
    sizes: Sequence[int] | None = None
    #: Local steps, of equally many samples, of which only the first is fetched; 0 fetches all.
    stepwise: int = 0


class Batches(Dataset[Any]):
    """What a loader reads: whole batches of a map-style data set, by :class:`Batch`.

    A sample's transforms draw from the batch's own stream, so that neither the order of clients
    nor the number of loader workers changes what they draw.
    """

    def __init__(self, data: Dataset[Any], collate: Collate, seed: int = 0) -> None:
        self.data, self.collate, self.seed = data, collate, seed
        #: What is left to fetch of the batches that were handed out, ``[steps, n]`` each.
        self.waiting: deque[Tensor] = deque()

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]  # torch's Dataset does not promise a length

    def __getitems__(self, index: list[int]) -> Any:
        """Return a batch of torch's own sampler, in prediction."""
        return self[self.evaluation(torch.tensor(index))]

    def evaluation(self, index: Tensor) -> Batch:
        """Return a batch of validation, test or prediction."""
        return Batch(index, [(self.seed, Purpose.EVALUATION_SAMPLES, int(index[0]))])

    def __getitem__(self, batch: Batch) -> Any:
        if batch.stepwise:
            assert isinstance(self.data, InMemory)
            steps = batch.index.view(batch.stepwise, -1)
            self.waiting.append(steps)
            return self.data.fetch(steps[0])
        if batch.sizes is None:
            return self._collated(batch.index, batch.keys[0])
        parts = zip(batch.index.split(list(batch.sizes)), batch.keys, strict=True)
        return ClientBatches(
            self._collated(index, key) if len(index) else None for index, key in parts
        )

    def _collated(self, index: Tensor, key: tuple[int, ...]) -> Any:
        if isinstance(self.data, InMemory) and self.collate is default_collate:
            return self.data.fetch(index)
        with seeded_rng(derive_seed(*key)):
            if hasattr(self.data, "__getitems__"):
                return self.collate(self.data.__getitems__(index.tolist()))
            return self.collate([self.data[i] for i in index.tolist()])


class RoundLoader(DataLoader[Any]):
    """A loader that Lightning may resume: the plan alone says what it yields."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no state beside the plan."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing."""


def _as_it_is(batch: Any) -> Any:
    return batch


def client_batches(
    part: Tensor,
    batch_size: int | None,
    generator: torch.Generator,
    replacement: bool = False,
    drop_last: bool = False,
) -> Iterator[Tensor]:
    """Yield a client's batches without end, one shuffled pass over its samples after another.

    Args:
        part: Indices of the client's samples, ``[n]``.
        batch_size: Samples a batch; None, or more than the client has: all of them.
        generator: Where the order comes from.
        replacement: Draw every batch anew from all samples instead of passing over them.
        drop_last: Leave out the incomplete batch of a pass, unless it is the only one.

    Example:
        >>> batches = client_batches(torch.arange(5), 2, torch.Generator().manual_seed(0))
        >>> sorted(torch.cat([next(batches) for _ in range(3)]).tolist())
        [0, 1, 2, 3, 4]
    """
    n = len(part)
    size = n if batch_size is None else min(batch_size, n)
    while True:
        if replacement:
            yield part[torch.randint(n, (size,), generator=generator)]
            continue
        order = part.index_select(0, torch.randperm(n, generator=generator))
        for at in range(0, n - n % size if drop_last else n, size):
            yield order[at : at + size]


class OwnBatches(DistributedSampler[Batch]):
    """Whole batches, for a loader with ``batch_size=None``.

    A DistributedSampler in name alone: Lightning leaves it as it is on several processes, instead
    of sharing the batches out once more.
    """

    def __init__(self) -> None:
        """Take nothing of torch's, which shares samples out."""

    def set_epoch(self, epoch: int) -> None:
        """Take nothing: the plan alone says what comes."""


class RoundBatches(OwnBatches):
    """The batches of a round, client after client; asking twice gives the same batches.

    With several lanes or local steps in a batch the samples are in the order ``[steps, lanes,
    samples]``. A lane with fewer samples than another, or none left, is filled with its own first,
    unless each client's samples are collated apart from the others'.

    Args:
        plan: The round's.
        parts: Indices of each client's samples.
        rank: Which share of every batch's samples to take,
        world_size: of how many (DDP inside a client).
        apart: Whether to collate the samples of each client and local step by themselves.
        batches: Options of :func:`client_batches`.
    """

    def __init__(
        self,
        plan: RoundPlan,
        parts: Sequence[Tensor],
        rank: int = 0,
        world_size: int = 1,
        apart: bool = False,
        **batches: Any,
    ) -> None:
        self.plan, self.parts, self.apart, self.batches = plan, parts, apart, batches
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return len(self.plan.schedule)

    def __iter__(self) -> Iterator[Batch]:
        plan, steps, clients = self.plan, self.plan.num_steps.tolist(), self.plan.clients.tolist()
        streams: dict[int, Iterator[Tensor]] = {}
        for step in plan.schedule:
            if not step.rows:  # a sample that nobody looks at
                yield Batch(self.parts[clients[0]][:1], [(plan.seed, Purpose.SAMPLES)])
                continue
            if step.first:
                streams = {row: self._client(clients[row]) for row in step.rows}
            index, keys = [], []
            for i in range(step.start, step.start + step.steps):
                for row in step.rows:
                    client = clients[row]
                    rest = self.parts[client][: 0 if self.apart else 1]
                    index.append(next(streams[row]) if i < steps[row] else rest)
                    keys.append((plan.seed, Purpose.SAMPLES, plan.round, client, i))
            if self.apart:
                yield Batch(torch.cat(index), keys, [len(part) for part in index])
                continue
            samples = torch.cat(_filled(index))
            # Who has none left takes one, which the loop gives no weight.
            share = samples[self.rank :: self.world_size]
            stepwise = step.steps if plan.stepwise else 0
            yield Batch(share if len(share) else samples[:1], keys, stepwise=stepwise)

    def _client(self, client: int) -> Iterator[Tensor]:
        order = generator(self.plan.seed, Purpose.BATCHES, self.plan.round, client)
        return client_batches(self.parts[client], generator=order, **self.batches)


def _filled(rows: list[Tensor]) -> list[Tensor]:
    """Bring rows to one length with their own first elements."""
    length = max(len(row) for row in rows)
    return [
        row if len(row) == length else torch.cat([row, row[:1].expand(length - len(row))])
        for row in rows
    ]


class EvaluationBatches(OwnBatches):
    """Samples in order, in batches of at most ``batch_size``, the same number on every process."""

    def __init__(self, data: Batches, batch_size: int, rank: int, world_size: int) -> None:
        n = len(data)
        if n < world_size:
            raise FederationError(
                f"{n} samples cannot be evaluated by {world_size} processes, each needs one at"
                " least: lower devices, or use more samples"
            )
        if world_size == 1:
            batches = torch.arange(n).split(batch_size)
        else:
            each = min(-(-n // (batch_size * world_size)), n // world_size)
            batches = torch.arange(n).tensor_split(each * world_size)
        self.data, self.batches = data, batches[rank::world_size]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.data.evaluation, self.batches)


class EpochBatches(OwnBatches):
    """The batches of an epoch, asked for anew each time that a loader begins one.

    Args:
        epoch: Returns the epoch's batches, and how many of them a checkpoint has behind it.
    """

    def __init__(self, epoch: Callable[[], tuple[RoundBatches, int]]) -> None:
        self.ask = epoch

    def __len__(self) -> int:
        return len(self.ask()[0])

    def __iter__(self) -> Iterator[Batch]:
        batches, done = self.ask()
        return islice(batches, done, None)


def _position(trainer: Trainer | None) -> tuple[int, int]:
    """Return the epoch that a loader begins, and how many of its batches are done already."""
    if trainer is None:
        return 0, 0
    loop: Any = trainer.fit_loop  # its counters are typed as their base class, with fewer fields
    if not loop.is_resuming:
        return trainer.current_epoch, 0
    # The loader begins before the loop has put right what the checkpoint holds: of a checkpoint
    # at the end of an epoch, or in its last batch, current_epoch still is that epoch.
    epoch, batch = loop.epoch_progress.current, loop.epoch_loop.batch_progress
    if epoch.started == epoch.processed:
        return epoch.processed, 0
    if batch.is_last_batch:
        return epoch.processed + 1, 0
    return epoch.processed, batch.current.processed


def labels_of(data: Dataset[Any]) -> Tensor | None:
    """Return the labels that a data set holds ready (``targets``, ``labels``, last tensor)."""
    if isinstance(data, Subset):
        labels = labels_of(data.dataset)
        return None if labels is None else labels[torch.as_tensor(data.indices)]
    if isinstance(data, TensorDataset | InMemory):
        return data.tensors[-1]
    for name in ("targets", "labels"):
        if (labels := _numbers(getattr(data, name, None))) is not None:
            return labels
    return None


def _numbers(values: Any) -> Tensor | None:
    """Values as a tensor; None for what is no numbers, such as names, boxes or a method."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        return None


def hold_out(labels: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Split indices into (kept, held out), ``count`` held out with the labels' proportions.

    Example:
        >>> kept, held = hold_out(torch.tensor([0] * 8 + [1] * 4), 3, torch.Generator())
        >>> len(kept), sorted((held >= 8).tolist())
        (9, [False, False, True])
    """
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]
    # Sorted by label, every n/count-th sample: each label gets its share, rounded up or down.
    at = ((torch.arange(count, dtype=torch.float64) + 0.5) * len(labels) / count).long()
    mask = torch.ones(len(labels), dtype=torch.bool)
    mask[at] = False
    return order[mask].sort().values, order[~mask].sort().values


class FederatedDataModule(LightningDataModule):
    """Federate map-style data sets: clients hold disjoint parts of ``train``.

    Under a :class:`~lightning_fl.callbacks.FederatedLoop` the training loader yields the batches
    of the round's clients, one client after the other. Without one it yields shuffled batches of
    all training data, the centralized baseline, with a warning. A child class overrides
    :meth:`load`.

    Args:
        train: Training samples. A ``TensorDataset`` is fetched a batch at a time.
        val: The server's validation samples; None holds them out of ``train`` before the split.
        test: Test samples.
        partition: Rule that splits ``train`` over clients; None is
            :class:`~lightning_fl.partition.IID`.
        num_clients: Number of clients; None, where the rule knows it (``ByKey``, ``FromManifest``).
        batch_size: Samples a local step; None is a client's whole data.
        val_size: How much to hold out: a fraction of ``train`` or a count; 0 for none. The held-out
            samples have the labels' proportions.
        local_test_size: Fraction of each client's samples, in [0, 1), that it does not train on:
            its own test samples, for :class:`~lightning_fl.callbacks.PersonalizedEvaluation`. They
            have the proportions of its labels.
        arrivals: A stream: each client's samples arrive in so many parts, drawn at random, and a
            round has one of them, the next round the next; after the last the first comes again.
        labels: Labels of ``train`` for the rule, ``[n]``; None reads them off the data set.
        keys: Key of each training sample for ``ByKey``, ``[n]``, names or numbers (speaker,
            writer...); None reads the data set's attribute ``keys``.
        replacement: Draw each batch anew from all samples of the client, instead of passing over
            them in a random order.
        drop_last: Leave out the incomplete batch at the end of a pass, unless it is the only one.
            A BatchNorm layer cannot train on a batch of one sample.
        eval_batch_size: Samples a batch in validation, test and prediction.
        num_workers: Loader processes; 0 loads in the main process, best for data in memory.
        collate_fn: Turns the samples of one client's local step into a batch; None is torch's own.
        seed: Seed of hold-out and split; None is that of ``seed_everything``, else 0.

    Raises:
        FederationError: If an option is out of range, a data set is missing or iterable-style, or
            the rule cannot split it.

    Example:
        >>> x, y = torch.randn(100, 4), torch.arange(100) % 10
        >>> data = FederatedDataModule(TensorDataset(x, y), num_clients=5, val_size=20)
        >>> data.setup("fit")
        >>> data.num_samples
        tensor([16, 16, 16, 16, 16])
    """

    def __init__(
        self,
        train: Dataset[Any] | None = None,
        val: Dataset[Any] | None = None,
        test: Dataset[Any] | None = None,
        partition: Partition | None = None,
        num_clients: int | None = 10,
        batch_size: int | None = 32,
        *,
        val_size: int | float = 0.1,
        local_test_size: float = 0.0,
        arrivals: int = 1,
        labels: Sequence[int] | None = None,
        keys: Sequence[int | str] | None = None,
        replacement: bool = False,
        drop_last: bool = False,
        eval_batch_size: int = 250,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if partition is not None and not isinstance(partition, Partition):
            raise FederationError(
                f"partition must be a rule, as in partition=IID(), or None, got {partition!r}"
            )
        self.train, self.val, self.test = train, val, test
        self._unchanged: Dataset[Any] | None = None
        self.partition = IID() if partition is None else partition
        self.num_clients = None if num_clients is None else _integer("num_clients", num_clients, 1)
        self.batch_size = None if batch_size is None else _integer("batch_size", batch_size, 1)
        self.val_size, self.labels, self.keys = _share(val_size), labels, keys
        self.replacement, self.drop_last = replacement, drop_last
        if not 0 <= local_test_size < 1:
            raise FederationError(f"local_test_size must be in [0, 1), got {local_test_size}")
        self.local_test_size = local_test_size
        self.arrivals = _integer("arrivals", arrivals, 1)
        self.eval_batch_size = _integer("eval_batch_size", eval_batch_size, 1)
        self.num_workers = _integer("num_workers", num_workers, 0)
        self.collate_fn = collate_fn or default_collate
        self.seed = None if seed is None else _integer("seed", seed, 0)
        self.plan: Callable[[], RoundPlan] | None = None
        self.shares_validation = True
        #: Whether it was said that a fit is no federation.
        self._has_warned = False
        #: Each client's training samples, of the whole stream.
        self.parts: list[Tensor] = []
        #: Those of them that are there to be trained on.
        self.present: list[Tensor] = []
        self._arrivals: list[list[Tensor]] = []
        #: Each client's own test samples, which are in no part.
        self.local_tests: list[Tensor] = []
        self._num_samples = torch.zeros(0, dtype=torch.int64)
        #: Class of each training sample, ``[n]``, where it is known.
        self.class_labels: Tensor | None = None

    @property
    def trainer(self) -> Trainer | None:
        """The Trainer, which sets itself here at the start of a fit or test."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        check_package(trainer, Trainer)
        self._trainer = trainer

    def load(self, train: bool) -> Dataset[Any] | None:
        """Return the training or the test samples; a child class reads its files here."""
        return self.train if train else self.test

    def setup(self, stage: str | None = None) -> None:
        """Load the data, hold out validation samples and split the rest, once."""
        if stage in {"test", "predict", None}:
            test = self.load(train=False) if self.test is None else self.test
            self.test = _in_memory(test, "test")
        if self.parts or stage in {"test", "predict"}:
            self.present, self._num_samples = self.parts, self._num_samples[:0]
            return
        train = _in_memory(self.load(train=True), "train")
        if train is None:
            raise FederationError("FederatedDataModule needs training samples: pass train=")
        self.train, self.val = train, _in_memory(self.val, "val")
        n, seed = len(train), run_seed(self.seed)
        self.class_labels = self._class_labels(train, n)
        rule, held = self.partition, self._held_out(n, seed)
        kept = torch.ones(n, dtype=torch.bool)
        kept[held] = False
        by = self._split_by(train, n)[kept]
        clients = rule.count_clients(by) if self.num_clients is None else self.num_clients
        split = rule(by, clients, generator(seed, Purpose.PARTITION))
        held_out = len(held) if self.val is None else len(self.val)  # type: ignore[arg-type]
        if 0 < held_out < (processes := self._processes()[1]):
            raise FederationError(
                f"{held_out} validation samples cannot be shared by {processes} processes, each"
                " needs one at least: raise val_size, or lower devices"
            )
        parts = [kept.nonzero()[:, 0][part] for part in split]
        parts, tests = self._local_tests(parts, seed)
        arrivals = self._in_steps(parts, seed)
        # From here on nothing fails: a second try would take held-out samples for given ones.
        if self.val is None and len(held):
            fast = isinstance(train, InMemory)
            self.val = InMemory(*train.fetch(held)) if fast else Subset(train, held.tolist())
        self.num_clients = clients
        self.parts, self.local_tests = parts, tests
        self.present, self._arrivals = parts, arrivals

    def _class_labels(self, train: Dataset[Any], n: int) -> Tensor | None:
        """Return one number a training sample, those that were given or that the data set has."""
        labels = labels_of(train) if self.labels is None else _numbers(self.labels)
        if labels is not None and labels.shape == (n,):
            return labels
        if self.labels is not None:
            got = "none" if labels is None else f"shape {tuple(labels.shape)}"
            raise FederationError(
                f"labels must be one number for each of the {n} training samples, got {got}"
            )
        return None

    def _held_out(self, n: int, seed: int) -> Tensor:
        """Return the training samples that no client holds."""
        if (held := self.partition.held_out(n)) is not None:
            return held
        if self.val is not None:
            return torch.zeros(0, dtype=torch.int64)
        strata = torch.zeros(n) if self.class_labels is None else self.class_labels
        return hold_out(strata, self._val_count(n), generator(seed, Purpose.HOLD_OUT))[1]

    def _local_tests(self, parts: list[Tensor], seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """Take each client's own test samples out of its part."""
        if not self.local_test_size:
            return parts, []
        kept, tests = [], []
        for client, part in enumerate(parts):
            if len(part) < 2:
                raise FederationError(
                    f"local_test_size={self.local_test_size}, but client {client} has one sample"
                    " alone: give every client two or more (min_size of a partition), or set it to"
                    " 0"
                )
            count = min(max(1, round(self.local_test_size * len(part))), len(part) - 1)
            labels = self.class_labels
            strata = torch.zeros(len(part)) if labels is None else labels[part]
            random = generator(seed, Purpose.LOCAL_TEST, client)
            train, test = hold_out(strata, count, random)
            kept.append(part[train])
            tests.append(part[test])
        return kept, tests

    def _in_steps(self, parts: list[Tensor], seed: int) -> list[list[Tensor]]:
        """Return each client's samples in each step of the stream."""
        if self.arrivals == 1:
            return [parts]
        steps: list[list[Tensor]] = [[] for _ in range(self.arrivals)]
        for client, part in enumerate(parts):
            if len(part) < self.arrivals:
                raise FederationError(
                    f"arrivals={self.arrivals}, but client {client} has {len(part)} samples, less"
                    " than one for each step: lower it, or give every client more (min_size of a"
                    " partition)"
                )
            random = generator(seed, Purpose.ARRIVALS, client)
            order = part[torch.randperm(len(part), generator=random)]
            for step, chunk in zip(steps, order.tensor_split(self.arrivals), strict=True):
                step.append(chunk.sort().values)
        return steps

    def arrive(self, round: int) -> bool:
        """Let the samples of a round arrive: those of its step of the stream.

        Args:
            round: Counted from 0.

        Returns:
            Whether there is a stream, in which rounds have samples of their own.
        """
        if self.arrivals == 1:
            return False
        self.present = self._arrivals[round % self.arrivals]
        self._num_samples = self._num_samples[:0]
        return True

    def _val_count(self, n: int) -> int:
        count = round(self.val_size * n) if isinstance(self.val_size, float) else self.val_size
        if count >= n:
            raise FederationError(
                f"val_size={self.val_size} holds out all of the {n} training samples: lower it"
            )
        return count

    def _split_by(self, train: Dataset[Any], n: int) -> Tensor:
        """Return what the rule splits by: keys, labels, or nothing that it would look at."""
        rule = type(self.partition).__name__
        if self.partition.splits_by == "keys":
            keys = self.keys if self.keys is not None else getattr(train, "keys", None)
            if keys is None or callable(keys):
                raise FederationError(f"{rule} needs a key for each training sample: pass keys=")
            # Names and numbers alike: clients come in ascending order of their keys.
            by = torch.as_tensor(np.unique(np.asarray(keys), return_inverse=True)[1])
        elif self.partition.splits_by == "labels":
            labels = self.class_labels
            if labels is None:
                raise FederationError(
                    f"{rule} needs a label for each training sample, and {type(train).__name__} has"
                    " neither targets nor labels (one number a sample): pass labels="
                )
            by = labels
        else:
            labels = self.class_labels
            by = torch.zeros(n, dtype=torch.int64) if labels is None else labels
        if by.shape != (n,):
            raise FederationError(
                f"{rule} needs one {self.partition.splits_by[:-1]} for each of the {n} training"
                f" samples, got {tuple(by.shape)}"
            )
        return by

    @property
    def num_samples(self) -> Tensor:
        """Training samples of each client that are there, ``[num_clients]``."""
        if len(self._num_samples) != len(self.present):
            self._num_samples = torch.tensor([len(part) for part in self.present])
        return self._num_samples

    @property
    def class_counts(self) -> Tensor | None:
        """Training samples of each client and class that are there, ``[num_clients, classes]``.

        None if they are unknown. Classes are numbers from 0 up.
        """
        labels = self.class_labels
        if labels is None or labels.is_floating_point() or int(labels.min()) < 0:
            return None
        most = int(labels.max()) + 1
        return torch.stack([labels[part].bincount(minlength=most) for part in self.present])

    @property
    def batches_per_epoch(self) -> Tensor:
        """Batches in one pass over each client's samples, ``[num_clients]``."""
        return self._num_batches(self.num_samples)

    @property
    def smallest_batch(self) -> Tensor:
        """Samples in the smallest batch of one pass over each client's samples, ``[num_clients]``.

        BatchNorm cannot train on a batch of one sample; ``drop_last`` leaves out the incomplete
        batch, yet a client of one sample keeps its own.
        """
        smallest = []
        for parts in self._arrivals:
            n = torch.tensor([len(part) for part in parts])
            size = self._full_batch(n)
            whole = self.drop_last or self.replacement
            smallest.append(size if whole else (n - 1) % size + 1)
        return torch.stack(smallest).amin(0)

    def batch_sizes(self, clients: Tensor, start: int, count: int) -> Tensor:
        """Return the samples in local steps ``start`` to ``start + count`` of clients.

        Args:
            clients: Ids, ``[k]``.
            start: Steps before.
            count: Steps.

        Returns:
            Sizes, ``[count, k]``.
        """
        n = self.num_samples[clients]
        size = self._full_batch(n)
        if self.drop_last or self.replacement:
            return size.expand(count, -1)
        batches = self._num_batches(n)
        is_last = torch.arange(start, start + count)[:, None] % batches == batches - 1
        return torch.where(is_last, n - (batches - 1) * size, size)

    @cached_property
    def sample_bytes(self) -> int:
        """Memory that a training sample takes on the device, its numbers as float32."""
        with seeded_rng(0):  # its transforms may draw
            sample = self.train[0]  # type: ignore[index]  # there after setup
        return 4 * sum(t.numel() if isinstance(t, Tensor) else 1 for t in tree_leaves(sample))

    @property
    def module_dtype(self) -> torch.dtype:
        """The dtype of the module in training; torch's default without one."""
        module = None if self.trainer is None else self.trainer.lightning_module
        dtype = torch.get_default_dtype() if module is None else module.dtype
        assert isinstance(dtype, torch.dtype)  # Lightning says "or str"
        return dtype

    def example(self) -> Any:
        """Return two training samples (of one, if there is no other) as the module gets them."""
        with seeded_rng(0):  # their transforms may draw
            samples = [self.train[i] for i in range(min(2, len(self.train)))]  # type: ignore[index,arg-type]
            batch = self.on_before_batch_transfer(self.collate_fn(samples), 0)
            return self.on_after_batch_transfer(batch, 0)

    def _full_batch(self, n: Tensor) -> Tensor:
        return n if self.batch_size is None else n.clamp(max=self.batch_size)

    def _num_batches(self, n: Tensor) -> Tensor:
        size = self._full_batch(n)
        return n // size if self.drop_last else (n + size - 1) // size

    @property
    def checksum(self) -> str:
        """A digest of the split."""
        return checksum([part for parts in self._arrivals for part in parts])

    def manifest(self) -> Manifest:
        """Describe the split: rule, parameters, seed, indices and class counts of each client."""
        labels = self.class_labels
        if labels is None:
            labels = torch.zeros(len(self.train))  # type: ignore[arg-type]  # real numbers: no classes
        parts = self.parts
        if self.local_tests:  # the split, before tests are taken out: it can be split so again
            parts = [
                torch.cat(both).sort().values for both in zip(parts, self.local_tests, strict=True)
            ]
        return Manifest.of(self.partition, parts, labels, run_seed(self.seed))

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the round's batches, or shuffled batches of all clients without a loop."""
        if self.plan is not None:
            plan = self.plan()  # with it the round's samples arrive
            batches: OwnBatches = self._batches(plan, self.present)
        else:
            batches = EpochBatches(self._epoch)
        loader = self._loader(self.train, lambda data: batches)
        assert isinstance(loader.dataset, Batches)
        self._fetched = loader.dataset
        return loader

    def _warn_of_no_federation(self) -> None:
        """Say once that a fit without a loop is no federation."""
        if self.trainer is None or self._has_warned:
            return
        self._has_warned = True
        rank_zero_warn(
            "this fit is no federation: the Trainer has no FederatedLoop, so the module trains on"
            f" the samples of all {self.num_clients} clients together, as a centralized baseline."
            " To train a federation, use Trainer(callbacks=[FederatedLoop(), ...])"
        )

    @property
    def has_samples_in_front(self) -> bool:
        """Whether the first axis of every tensor in a batch is known to be that of the samples.

        It is for tensors in memory, unless a hook of a child class may change whole batches. All
        other samples are collated client by client.
        """
        hooks = (getattr(type(self), name) for name in TRANSFER_HOOKS)
        return (
            isinstance(self.train, InMemory)
            and self.collate_fn is default_collate
            and all(hook.__module__.partition(".")[0] in _SAMPLEWISE for hook in hooks)
        )

    @property
    def can_fetch_steps(self) -> bool:
        """Whether a round's batches can be fetched one local step at a time: only from memory."""
        return self.has_samples_in_front and self.num_workers == 0

    def local_steps(self) -> Callable[[int, bool], Any]:
        """Return how to fetch the local steps of the next batch of a plan that is ``stepwise``."""
        data, steps = self._fetched.data, self._fetched.waiting.popleft()
        assert isinstance(data, InMemory)
        return lambda step, reuse: data.fetch(steps[step], reuse)

    def samples_of(self, client: int, test: bool = False) -> Iterator[Any]:
        """Yield all training samples of a client in order, in batches of ``eval_batch_size``.

        Args:
            client: Whose.
            test: Its own test samples instead.
        """
        batches = Batches(cast("Dataset[Any]", self.train), self.collate_fn, run_seed(self.seed))
        part = (self.local_tests if test else self.present)[client]
        for index in part.split(self.eval_batch_size):
            yield batches[batches.evaluation(index)]

    def steps_of(self, client: int, generator: torch.Generator) -> Iterator[Any]:
        """Yield batches of a client's training samples without end, as a round would."""
        batches = Batches(cast("Dataset[Any]", self.train), self.collate_fn, run_seed(self.seed))
        parts = client_batches(
            self.present[client], self.batch_size, generator, self.replacement, self.drop_last
        )
        for index in parts:
            yield batches[Batch(index, [(generator.initial_seed(),)])]

    def _processes(self) -> tuple[int, int]:
        """Return which process this is, of how many."""
        trainer = self.trainer
        return (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)

    def _batches(self, plan: RoundPlan, parts: Sequence[Tensor]) -> RoundBatches:
        # Processes share the clients, or else the samples of each batch.
        rank, world_size = self._processes() if plan.world_size == 1 else (0, 1)
        is_alone = plan.lanes == plan.steps_per_batch == 1
        return RoundBatches(
            plan,
            parts,
            rank,
            world_size,
            not is_alone and not self.has_samples_in_front,
            batch_size=self.batch_size,
            replacement=self.replacement,
            drop_last=self.drop_last,
        )

    def _epoch(self) -> tuple[RoundBatches, int]:
        """Return the epoch's batches, those of one client that holds everything; and those done."""
        self._warn_of_no_federation()
        pooled = torch.cat(self.parts).sort().values
        epoch, done = _position(self.trainer)
        steps = self._num_batches(torch.tensor([len(pooled)]))
        everyone = RoundPlan(run_seed(self.seed), epoch, torch.zeros_like(steps), steps)
        return self._batches(everyone, [pooled]), done

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return the server's validation samples in order."""
        if self.val is None:
            warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
            return []
        fits = self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        return self.evaluation_loader(self.val, self.shares_validation or not fits)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the test samples in order."""
        return self.evaluation_loader(self._test_samples())

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return the test samples in order."""
        return self._loader(self._test_samples(), batch_size=self.eval_batch_size)

    def _test_samples(self) -> Dataset[Any]:
        if self.test is None:
            raise FederationError(f"{type(self).__name__} has no test samples: pass test=")
        return self.test

    def change_samples(self, index: Tensor, change: Change) -> None:
        """Train on other samples in the place of some, until :meth:`restore_samples`.

        Args:
            index: Which of the training samples.
            change: As in :meth:`with_changes`.
        """
        self._unchanged = self._unchanged or self.train
        self.train = self.with_changes(self.train, index, change)

    def restore_samples(self) -> None:
        """Train on the samples as they were."""
        self.train, self._unchanged = self._unchanged or self.train, None

    @staticmethod
    def with_changes(data: Any, index: Tensor, change: Change) -> Dataset[Any]:
        """Return a data set some of whose samples are others.

        Args:
            data: Samples are tuples; the first part is the input, the last the label.
            index: Which.
            change: From inputs and labels, ``[n, ...]`` and ``[n]``, to others.

        Example:
            >>> data = InMemory(torch.zeros(3), torch.arange(3))
            >>> other = lambda x, y: (x + 1, y - 2)
            >>> FederatedDataModule.with_changes(data, torch.tensor([2]), other)[2]
            (tensor(1.), tensor(0))
        """
        if not isinstance(data, InMemory):
            return Changed(data, index, change)
        x, *rest, y = data.tensors
        new_x, new_y = change(x[index], y[index])
        return InMemory(x.index_copy(0, index, new_x), *rest, y.index_copy(0, index, new_y))

    def evaluation_loader(self, data: Any, shared: bool = True) -> DataLoader[Any]:
        """Return any samples in order, as the server's own are read.

        Args:
            data: The samples.
            shared: Whether several processes share them out; else each reads all, in the batches
                that one process reads.
        """
        size, processes = self.eval_batch_size, self._processes() if shared else (0, 1)
        return self._loader(data, lambda data: EvaluationBatches(data, size, *processes))

    def _loader(
        self,
        data: Any,
        sampler: Callable[[Batches], OwnBatches] | None = None,
        batch_size: int | None = None,
    ) -> DataLoader[Any]:
        if self.num_workers == 0 and isinstance(data, InMemory):
            warnings.filterwarnings("ignore", ".*does not have many workers.*")
        device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
        if self.num_workers == 0 and isinstance(data, InMemory) and _fits(data, device):
            data = data.on(device)
        batches = Batches(data, self.collate_fn, run_seed(self.seed))
        return RoundLoader(
            batches,
            sampler=None if sampler is None else sampler(batches),
            batch_size=batch_size,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            pin_memory=device.type == "cuda" and not _is_on(data, device),
            # A loader without one draws a seed from the global generator, a validation loader too.
            generator=torch.Generator(),
        )


def _fits(data: InMemory, device: torch.device) -> bool:
    """Say whether samples can stay on a GPU: they may take a quarter of its memory."""
    if device.type != "cuda":
        return False
    return data.bytes <= torch.cuda.get_device_properties(device).total_memory / 4


def _is_on(data: Any, device: torch.device) -> bool:
    return isinstance(data, InMemory) and data.tensors[0].device == device


def _integer(name: str, value: Any, least: int, allowed: str = "") -> int:
    """Return a whole number, of numpy too, as one of Python."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        allowed = allowed or f"an integer of at least {least}"
        raise FederationError(f"{name} must be {allowed}, got {value!r}")
    return number


def _share(val_size: Any) -> int | float:
    if isinstance(val_size, float | np.floating) and 0 <= val_size < 1:
        return float(val_size)
    return _integer("val_size", val_size, 0, "a fraction in [0, 1) or a count of samples")


def _in_memory(data: Any, name: str) -> Any:
    """Check that a data set is map-style; give tensors their fast path."""
    if data is None:
        return None
    mapped = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if isinstance(data, IterableDataset) or not mapped:
        raise FederationError(
            f"{name} must be a map-style data set (with len() and []), got {type(data).__name__}:"
            " clients hold parts of it by index"
        )
    if not len(data):
        raise FederationError(f"{name} has no samples")
    return InMemory(*data.tensors) if type(data) is TensorDataset else data
