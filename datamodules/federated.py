"""Data module that splits any map-style data set over clients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, default_collate

import lightning_fl.datamodules as kinds  # attributes are read on call: it imports this file
from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.datamodules.batches import (
    Batch,
    Batching,
    EvaluationBatches,
    OwnBatches,
    RoundBatches,
    client_batches,
)
from lightning_fl.datamodules.centralized import EpochBatches
from lightning_fl.datamodules.classes import check_classes, with_classes
from lightning_fl.datamodules.loader import Batches, Collate, Workers, round_loader
from lightning_fl.datamodules.split_datamodule import SplitDataModule
from lightning_fl.datamodules.splits import Split, split_samples
from lightning_fl.datamodules.storage import AnyDataset, InMemory, in_memory, subset
from lightning_fl.errors import FederationError, check_package
from lightning_fl.functional.randomness import run_seed, seeded_rng
from lightning_fl.hooks import TRANSFER_HOOKS
from lightning_fl.options import check_flag, check_integer, check_number, check_that, is_list
from lightning_fl.partition import IID, Partition


class FederatedDataModule(SplitDataModule):
    """Split map-style data sets over clients. Clients hold disjoint parts of ``train``.

    With a :class:`~lightning_fl.callbacks.FederatedLoop`, the training loader yields the batches of
    the sampled clients, one client after another. Without it, the loader yields shuffled batches of
    all training data (the centralized baseline) and a warning is shown. Subclasses override
    :meth:`load`. If the clients are given by the data (speakers, writers, hospitals), use
    :class:`~lightning_fl.partition.Natural`, ``keys`` and ``num_clients=None``.

    Args:
        train: Training samples. A ``TensorDataset`` is read one whole batch at a time.
        val: The server's validation samples; None holds them out of ``train`` before the split. A
            tuple of several data sets gives one validation loader for each, as ``(samples, None)``
            for given and held-out samples: ``validation_step`` has a ``dataloader_idx`` then.
            Policies learn from the first.
        test: Test samples.
        partition: Rule that splits ``train`` over clients; None means
            :class:`~lightning_fl.partition.IID`.
        num_clients: Number of clients, unseen ones included; None if the rule determines it
            (``Natural``, ``FromManifest``).
        batch_size: Samples per local step; None means all samples of a client.
        val_size: Validation samples to hold out: a fraction of ``train`` or a number of samples; 0
            for none. The hold-out is stratified by label. With ``keys``, each client keeps at
            least one sample.
        local_test_size: Fraction of each client's samples, in [0, 1), to hold out as local test
            samples for :class:`~lightning_fl.callbacks.PersonalizedEvaluation`. The hold-out is
            stratified by label.
        unseen_clients: Clients that never train, as a share of all clients in [0, 1), drawn by
            ``seed``, or as a list of names (numbers as texts, if the clients have no names). Their
            ids are the last ones. They count in ``num_clients`` and nowhere else: not in
            ``num_samples``, ``parts`` and ``class_counts``. With ``keys``, no validation sample is
            held out of them. A manifest with unseen clients replaces this option.
        stream_steps: Number of steps of a data stream. The samples of each client are divided at
            random into this number of parts, and each round trains on one part. After the last
            part, the stream starts again.
        labels: Labels of ``train`` for the rule, ``[n]``; None reads them from the data set
            (``targets``, ``labels`` or the last tensor) without a ``target_transform``.
        classes: Names of all classes in the order of their labels. Labels of data sets that name
            their classes in another order (``class_to_idx`` or ``classes``) are mapped by name;
            None refuses data sets with different orders.
        keys: Key of each training sample for ``Natural``, ``[n]``, names or numbers (such as
            speakers or writers); None reads the attribute ``keys`` of the data set.
        replacement: Draw each batch from all samples of the client, with replacement, instead of
            making passes over them in random order.
        drop_last: Drop the incomplete batch at the end of a pass, unless it is the only one. A
            BatchNorm layer cannot train on a batch of one sample.
        eval_batch_size: Samples per batch in validation, test and prediction.
        num_workers: Number of loader processes; 0 loads in the main process, which is fastest for
            data in memory.
        persistent_workers: Keep the loader processes for all rounds, as in a ``DataLoader``.
            They do not see later changes of the data set. Its own generators keep their states.
        collate_fn: Function that makes a batch from the samples of one client's local step; None
            means ``default_collate`` of torch.
        seed: Seed of the hold-out and the split; None means the seed of ``seed_everything``, or 0
            without one.

    Raises:
        FederationError: If an option is out of range, a data set is missing or iterable-style, or
            the rule cannot split it.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> x, y = torch.randn(100, 4), torch.arange(100) % 10
        >>> data = FederatedDataModule(TensorDataset(x, y), num_clients=5, val_size=20)
        >>> data.setup("fit")
        >>> data.num_samples
        tensor([16, 16, 16, 16, 16])
    """

    #: Whether clients have streams of samples, which training reads in order.
    is_stream = False
    #: Name of ``samples_checksum`` in a checkpoint.
    samples_are = "checksum of the training labels"
    #: Number of random numbers that each training sample gets for augmentation. If it is positive,
    #: the last element of a training batch is a ``Draws``, until ``on_after_batch_transfer``.
    draws = 0
    #: Function that returns the plan of the round; set by the loop.
    plan: Callable[[], RoundPlan] | None = None
    #: Whether processes share the validation samples during a fit; set by the loop.
    shares_validation = True

    def __init__(
        self,
        train: AnyDataset | None = None,
        val: AnyDataset | tuple[AnyDataset | None, ...] | None = None,
        test: AnyDataset | None = None,
        partition: Partition | None = None,
        num_clients: int | None = 10,
        batch_size: int | None = 32,
        *,
        val_size: int | float = 0.1,
        local_test_size: float = 0.0,
        unseen_clients: float | Sequence[str] = 0.0,
        stream_steps: int = 1,
        labels: Sequence[int] | None = None,
        classes: Sequence[str] | None = None,
        keys: Sequence[int | str] | None = None,
        replacement: bool = False,
        drop_last: bool = False,
        eval_batch_size: int = 250,
        num_workers: int = 0,
        persistent_workers: bool = False,
        collate_fn: Collate | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        #: Map-style data sets; None before :meth:`setup`, or if there is no such data set.
        self.train: Any = train
        self.val: Any
        #: Validation samples of further loaders.
        self.more_val: list[Any]
        self.val, *self.more_val = val if isinstance(val, tuple) and val else (val,)
        self.test: Any = test
        self.partition = IID() if partition is None else partition
        is_rule = isinstance(self.partition, Partition)
        check_that("partition", partition, is_rule, "a rule, such as IID()")
        self.num_clients = check_integer("num_clients", num_clients, min=1, optional=True)
        self.batch_size = check_integer("batch_size", batch_size, min=1, optional=True)
        hint = "pass a fraction in [0, 1) or a number of samples"
        self.val_size = check_number("val_size", val_size, min=0, hint=hint)
        self.local_test_size = check_number("local_test_size", local_test_size, min=0, below=1)
        if not is_list(unseen_clients):
            hint = "pass a share of the clients, or a list of their names"
            check_number("unseen_clients", unseen_clients, min=0, below=1, hint=hint)
        self.unseen_clients = unseen_clients
        self.stream_steps = check_integer("stream_steps", stream_steps, min=1)
        self.labels, self.keys, self._classes = labels, keys, classes
        self.replacement = check_flag("replacement", replacement)
        self.drop_last = check_flag("drop_last", drop_last)
        self.eval_batch_size = check_integer("eval_batch_size", eval_batch_size, min=1)
        self.num_workers = check_integer("num_workers", num_workers, min=0)
        self.persistent_workers = check_flag("persistent_workers", persistent_workers)
        self._workers: dict[Any, Workers] = {}
        self.collate_fn = collate_fn or default_collate
        self.seed = check_integer("seed", seed, min=0, optional=True)
        self.split = Split()
        self._present([])
        self._original: Any = None
        #: Rows of the test sets of clients, the last rows of ``train``; empty if they have none.
        self._own_tests: list[Tensor] = []
        self._reader: Batches | None = None

    @staticmethod
    def from_datamodule(
        datamodule: LightningDataModule, partition: Partition | None = None, **options: Any
    ) -> FederatedDataModule:
        """Split the data of a LightningDataModule; see :class:`FromDataModule`."""
        return kinds.FromDataModule(datamodule, partition, **options)

    @staticmethod
    def from_clients(
        clients: Mapping[str, AnyDataset] | Sequence[AnyDataset], **options: Any
    ) -> FederatedDataModule:
        """Take one data set per client; see :class:`FromClients`."""
        return kinds.FromClients(clients, **options)

    @staticmethod
    def from_hf(dataset: Any, **options: Any) -> FederatedDataModule:
        """Split a data set of the package ``datasets``; see :class:`FromHuggingFace`."""
        return kinds.FromHuggingFace(dataset, **options)

    @property
    def trainer(self) -> Trainer | None:
        """Trainer; set by Lightning at the start of a fit or test."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        check_package(trainer, Trainer)  # whose own error would not say why
        self._trainer = trainer

    def teardown(self, stage: str) -> None:
        """End the loader processes."""
        self._workers.clear()

    def load(self, train: bool) -> Dataset[Any] | None:
        """Return the training or the test samples. Subclasses read their files here.

        Args:
            train: Whether to return the training samples.
        """
        samples: Dataset[Any] | None = self.train if train else self.test
        return samples

    # --- the split --------------------------------------------------------------------------------

    def setup(self, stage: str | None = None) -> None:
        """Load the data, hold out validation samples and split the rest, once.

        Args:
            stage: Lightning's stage; None means all stages.
        """
        if stage in {"test", "predict", None}:
            test = self.load(train=False) if self.test is None else self.test
            self.test = self._prepared(test, "test")
        if not self.parts and stage not in {"test", "predict"}:
            self._load_and_split()
        if self._classes is None:
            check_classes(self._data_sets())
        self._present(self.parts)

    def _load_and_split(self) -> None:
        train = self._prepared(self.load(train=True), "train")
        if train is None:
            raise FederationError("FederatedDataModule needs training samples: pass train=")
        self.train, self.val = train, self._prepared(self.val, "val")
        self.more_val = [self._prepared(each, "val") for each in self.more_val]
        split = split_samples(train, self, run_seed(self.seed), self._own_tests)
        # Assigned only after all checks: a second setup() would mistake the held-out samples for
        # samples passed as val.
        held = subset(train, split.held_out) if len(split.held_out) else None
        every = [held if each is None else each for each in (self.val, *self.more_val)]
        self.val, *self.more_val = [each for each in every if each is not None] or [None]
        self.split, self.num_clients = split, len(split.clients)

    @property
    def holds_out(self) -> bool:
        """Whether validation samples are held out of ``train``."""
        return any(samples is None for samples in (self.val, *self.more_val))

    def _prepared(self, data: Any, name: str) -> Any:
        return in_memory(with_classes(data, self._classes), name)

    def _data_sets(self) -> list[tuple[str, Any]]:
        """Return names and data sets, whose labels must stand for the same classes."""
        val = (self.val, *self.more_val)
        return [("train", self.train), *(("val", each) for each in val), ("test", self.test)]

    # --- batches of clients -----------------------------------------------------------------------

    @property
    def _batching(self) -> Batching:
        return Batching(self.batch_size, self.replacement, self.drop_last)

    @property
    def batches_per_epoch(self) -> Tensor:
        """Number of batches in one pass over each client's samples, ``[num_clients]``."""
        return self._batching.count(self.num_samples)

    def batches_of(self, client: int) -> int:
        """Return the number of batches in one pass over a client's samples, unseen or not."""
        return int(self._batching.count(torch.tensor(len(self.present[client]))))

    def batch_sizes(self, clients: Tensor, start: int, count: int) -> Tensor:
        """Return the batch sizes of ``count`` local steps from ``start`` on, ``[count, k]``."""
        return self._batching.sizes(self.num_samples[clients], start, count)

    @property
    def has_samples_in_front(self) -> bool:
        """Whether the first axis of every tensor in a batch is known to be the sample axis.

        This holds for tensors in memory, unless a hook of a subclass may change whole batches.
        Otherwise the samples are collated client by client.
        """
        packages = {getattr(self, name).__module__ for name in TRANSFER_HOOKS}
        return (
            isinstance(self.train, InMemory)
            and self.collate_fn is default_collate
            and {name.partition(".")[0] for name in packages} <= {"lightning", "lightning_fl"}
        )

    @property
    def can_fetch_steps(self) -> bool:
        """Whether local steps can be fetched one at a time, which requires data in memory."""
        return self.has_samples_in_front and self.num_workers == 0

    def local_steps(self, round: int, position: int) -> Callable[[int], Any]:
        """Return a function that fetches the local steps of a ``stepwise`` batch.

        Rounds, and positions in a round, are counted from 0.
        """
        assert self._reader is not None  # the loader has fetched the batch
        return self._reader.local_steps(round, position)

    def samples_of(self, client: int, test: bool = False, most: int = 0) -> Iterator[Any]:
        """Yield the training samples of a client in order, in batches of nearly equal sizes.

        Batches have at most ``eval_batch_size`` samples. None is much smaller than the others,
        since BatchNorm cannot train on a single sample.

        Args:
            client: Id of the client.
            test: Whether to yield the client's local test samples instead.
            most: Maximum number of samples, spread evenly over the client's; 0 yields all.
        """
        batches = self._batches(self.train)
        part = (self.local_tests if test else self.present)[client]
        part = part[:: -(-len(part) // most) or 1] if most else part
        for index in part.tensor_split(-(-len(part) // self.eval_batch_size) or 1):
            yield batches[Batch.evaluation(index, batches.seed, client)]

    def steps_of(self, client: int, generator: torch.Generator) -> Iterator[Any]:
        """Yield an infinite stream of a client's training batches, batched as in a round."""
        batches, seed = self._batches(self.train), generator.initial_seed()
        stream = client_batches(self.present[client], self._batching, generator)
        for step, index in enumerate(stream):
            yield batches[Batch(index, [(seed, step)], client=client)]

    # --- loaders ----------------------------------------------------------------------------------

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the round's batches, or shuffled batches of all clients without a loop."""
        reader = self._batches(self.train)
        if self._reader is not None:  # a callback may ask for another loader within a round
            reader.waiting = self._reader.waiting
        self._reader = reader
        sampler = self._epochs() if self.plan is None else self._round(self.plan())
        return self._loader(self._reader, sampler)

    def _round(self, plan: RoundPlan) -> RoundBatches:
        # Processes share either the clients or the samples of each batch.
        processes = self._processes() if plan.world_size == 1 else (0, 1)
        is_alone = plan.group_size == plan.steps_per_batch == 1
        apart = not is_alone and not self.has_samples_in_front
        return RoundBatches(plan, self.present, self._batching, *processes, apart, self.draws)

    def _epochs(self) -> EpochBatches:
        """Return the batches of the centralized baseline."""
        pooled, seed = torch.cat(self.parts).sort().values, run_seed(self.seed)
        steps, share = self._batching.count(torch.tensor([len(pooled)])), self._processes()

        def batches(epoch: int) -> RoundBatches:  # a round with one client that has all samples
            plan = RoundPlan(seed, epoch, torch.zeros_like(steps), steps)
            return RoundBatches(plan, [pooled], self._batching, *share, draws=self.draws)

        return EpochBatches(self.trainer, batches)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return the server's validation samples in order; a list, if there are several sets."""
        if self.val is None:
            warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
            return []
        fits = self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        shared = self.shares_validation or not fits
        loaders = [
            self.evaluation_loader(samples, shared, f"val {i}" if i else "val")
            for i, samples in enumerate((self.val, *self.more_val))
        ]
        return loaders if self.more_val else loaders[0]

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the test samples in order."""
        return self.evaluation_loader(self._test_samples(), use="test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return the test samples in order."""
        return self._loader(self._batches(self._test_samples()), batch_size=self.eval_batch_size)

    def _test_samples(self) -> Any:
        if self.test is None:
            name = type(self).__name__
            raise FederationError(f"{name} has no test samples: pass them, or skip the test")
        return self.test

    def evaluation_loader(
        self, data: Any, shared: bool = True, use: str = "train"
    ) -> DataLoader[Any]:
        """Return a loader that reads samples in order, as in validation.

        Args:
            data: Map-style data set.
            shared: Whether several processes share the samples; if False, each process reads all of
                them, in the same batches as a single process.
            use: What the data set is used for, if it is one that is used for several purposes with
                different ``collate_fn``; see :class:`FromDataModule`.
        """
        processes = self._processes() if shared else (0, 1)
        batches = self._batches(in_memory(data, "data"), use)
        sampler = EvaluationBatches(len(data), self.eval_batch_size, batches.seed, *processes)
        return self._loader(batches, sampler)

    def _batches(self, data: Any, use: str = "train") -> Batches:
        return Batches(data, self.collate_fn, run_seed(self.seed), use)

    def _loader(
        self, batches: Batches, sampler: OwnBatches | None = None, batch_size: int | None = None
    ) -> DataLoader[Any]:
        device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
        is_kept = self.persistent_workers and any(batches.data is x for x in (self.train, self.val))
        kept = self._workers if is_kept else None
        return round_loader(batches, sampler, device, self.num_workers, batch_size, kept)

    def _processes(self) -> tuple[int, int]:
        """Return the index of this process and the number of processes."""
        trainer = self.trainer
        return (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)

    # --- samples ----------------------------------------------------------------------------------

    def replace_samples(self, train: Dataset[Any]) -> None:
        """Replace the training samples by as many others until :meth:`restore_samples`."""
        self._original = self._original or self.train
        self.train = in_memory(train, "train")

    def restore_samples(self) -> None:
        """Restore the original training samples."""
        self.train, self._original = self._original or self.train, None

    def example(self) -> Any:
        """Return a batch of the first two training samples (or the only one), as in training."""
        with seeded_rng(0):  # transforms may draw random numbers
            samples = [self.train[i] for i in range(min(2, len(self.train)))]
            batch = self.on_before_batch_transfer(self.collate_fn(samples), 0)
            return self.on_after_batch_transfer(batch, 0)

    @cached_property
    def sample_bytes(self) -> int:
        """Size of the tensors of a training sample as float32, in a batch before its transfer."""
        with seeded_rng(0):  # transforms may draw random numbers
            batch = self.collate_fn([self.train[0]])
        return 4 * sum(t.numel() for t in tree_leaves(batch) if isinstance(t, Tensor))
