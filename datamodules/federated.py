"""Any map-style data set, split over clients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_fl.datamodules.batches import (
    Batch,
    Batching,
    EvaluationBatches,
    OwnBatches,
    RoundBatches,
    client_batches,
)
from lightning_fl.datamodules.centralized import EpochBatches
from lightning_fl.datamodules.loader import Batches, Collate, has_samples_in_front, round_loader
from lightning_fl.datamodules.options import fraction_or_count, integer
from lightning_fl.datamodules.splits import Split, split_samples
from lightning_fl.datamodules.storage import in_memory, subset
from lightning_fl.functional.randomness import run_seed, seeded_rng
from lightning_fl.partition import IID, Manifest, Partition
from lightning_fl.types import FederationError, RoundPlan, check_package


class FederatedDataModule(LightningDataModule):
    """Federate map-style data sets: clients hold disjoint parts of ``train``.

    Under a :class:`~lightning_fl.callbacks.FederatedLoop` the training loader yields the batches
    of the round's clients, one client after the other. Without one it yields shuffled batches of
    all training data, the centralized baseline, with a warning. A child class overrides
    :meth:`load`.

    Args:
        train: Training samples. A ``TensorDataset`` is read one whole batch at a time.
        val: The server's validation samples; None holds them out of ``train`` before the split.
        test: Test samples.
        partition: Rule that splits ``train`` over clients; None is
            :class:`~lightning_fl.partition.IID`.
        num_clients: Number of clients; None if the rule knows it (``Natural``, ``FromManifest``).
        batch_size: Samples per local step; None is all samples of a client.
        val_size: How much to hold out: a fraction of ``train`` or a count; 0 for none. The held-out
            samples have the labels' proportions.
        local_test_size: Fraction of each client's samples, in [0, 1), that it does not train on:
            its own test samples, for :class:`~lightning_fl.callbacks.PersonalizedEvaluation`. They
            have the proportions of its labels.
        stream_steps: Number of steps of a stream: each client's samples arrive in so many parts,
            drawn at random, one per round; after the last the first comes again.
        labels: Labels of ``train`` for the rule, ``[n]``; None reads them from the data set.
        keys: Key of each training sample for ``Natural``, ``[n]``, names or numbers (speaker,
            writer...); None reads the data set's attribute ``keys``.
        replacement: Draw each batch from all samples of the client, instead of passing over them in
            a random order.
        drop_last: Leave out the incomplete batch at the end of a pass, unless it is the only one.
            A BatchNorm layer cannot train on a batch of one sample.
        eval_batch_size: Samples per batch in validation, test and prediction.
        num_workers: Loader processes; 0 loads in the main process, best for data in memory.
        collate_fn: Makes a batch of the samples of one client's local step; None is torch's own.
        seed: Seed of hold-out and split; None is that of ``seed_everything``, else 0.

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
        stream_steps: int = 1,
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
        if not 0 <= local_test_size < 1:
            raise FederationError(f"local_test_size must be in [0, 1), got {local_test_size}")
        #: Map-style data sets; None before :meth:`setup`, or where there is none.
        self.train: Any = train
        self.val: Any = val
        self.test: Any = test
        self.partition = IID() if partition is None else partition
        self.num_clients = None if num_clients is None else integer("num_clients", num_clients, 1)
        self.batch_size = None if batch_size is None else integer("batch_size", batch_size, 1)
        self.val_size = fraction_or_count("val_size", val_size)
        self.local_test_size = local_test_size
        self.stream_steps = integer("stream_steps", stream_steps, 1)
        self.labels, self.keys = labels, keys
        self.replacement, self.drop_last = replacement, drop_last
        self.eval_batch_size = integer("eval_batch_size", eval_batch_size, 1)
        self.num_workers = integer("num_workers", num_workers, 0)
        self.collate_fn = collate_fn or default_collate
        self.seed = None if seed is None else integer("seed", seed, 0)
        #: Returns the plan of the round; set by the loop.
        self.plan: Callable[[], RoundPlan] | None = None
        #: Whether processes share the validation samples in a fit; set by the loop.
        self.shares_validation = True
        self.split = Split()
        self._present([])
        self._original: Any = None
        self._has_warned = False

    def _present(self, parts: list[Tensor]) -> None:
        #: Training samples of each client that have arrived.
        self.present = parts
        #: Number of them, ``[num_clients]``.
        self.num_samples = torch.tensor([len(part) for part in parts], dtype=torch.int64)

    @property
    def trainer(self) -> Trainer | None:
        """The Trainer, which sets itself here at the start of a fit or test."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        check_package(trainer, Trainer)
        self._trainer = trainer

    def load(self, train: bool) -> Dataset[Any] | None:
        """Return the training or the test samples; a child class reads its files here.

        Args:
            train: Whether training samples are wanted.
        """
        samples: Dataset[Any] | None = self.train if train else self.test
        return samples

    # --- the split --------------------------------------------------------------------------------

    def setup(self, stage: str | None = None) -> None:
        """Load the data, hold out validation samples and split the rest, once.

        Args:
            stage: Lightning's stage; None is all.
        """
        if stage in {"test", "predict", None}:
            test = self.load(train=False) if self.test is None else self.test
            self.test = in_memory(test, "test")
        if self.parts or stage in {"test", "predict"}:
            self._present(self.parts)
            return
        train = in_memory(self.load(train=True), "train")
        if train is None:
            raise FederationError("FederatedDataModule needs training samples: pass train=")
        self.train, self.val = train, in_memory(self.val, "val")
        split = split_samples(
            train,
            self.partition,
            self.num_clients,
            labels=self.labels,
            keys=self.keys,
            val_size=self.val_size if self.val is None else 0,
            local_test_size=self.local_test_size,
            stream_steps=self.stream_steps,
            seed=run_seed(self.seed),
        )
        count = len(split.held_out if self.val is None else self.val)
        if 0 < count < (processes := self._processes()[1]):
            raise FederationError(
                f"{count} validation samples cannot be shared by {processes} processes, each"
                " needs one at least: raise val_size, or lower devices"
            )
        # From here on nothing fails: a second try would take held-out samples for given ones.
        if self.val is None and len(split.held_out):
            self.val = subset(train, split.held_out)
        self.split, self.num_clients = split, len(split.parts)
        self._present(split.parts)

    @property
    def parts(self) -> list[Tensor]:
        """Training samples of each client, over the whole stream; empty before :meth:`setup`."""
        return self.split.parts

    @property
    def local_tests(self) -> list[Tensor]:
        """Each client's own test samples, which are in no part; empty without them."""
        return self.split.local_tests

    @property
    def class_labels(self) -> Tensor | None:
        """Label of each training sample, ``[n]``; None if labels are unknown."""
        return self.split.labels

    def advance(self, round: int) -> bool:
        """Let the samples of a round arrive: those of its step of the stream.

        Args:
            round: Index of the round.

        Returns:
            Whether there is a stream, in which rounds have samples of their own.
        """
        if self.stream_steps == 1:
            return False
        self._present(self.split.stream_steps[round % self.stream_steps])
        return True

    @property
    def class_counts(self) -> Tensor | None:
        """Number of each client's samples of each class that have arrived, ``[clients, classes]``.

        None if classes are unknown. Classes are numbers from 0 up.
        """
        return self.split.class_counts(self.present)

    @property
    def checksum(self) -> str:
        """A digest of the split."""
        return self.split.checksum

    def manifest(self) -> Manifest:
        """Describe the split: rule, parameters, seed, indices and class counts of each client."""
        return self.split.manifest(self.partition, len(self.train), run_seed(self.seed))

    # --- batches of clients -----------------------------------------------------------------------

    @property
    def _batching(self) -> Batching:
        return Batching(self.batch_size, self.replacement, self.drop_last)

    @property
    def batches_per_epoch(self) -> Tensor:
        """Batches in one pass over each client's samples, ``[num_clients]``."""
        return self._batching.count(self.num_samples)

    @property
    def smallest_batch(self) -> Tensor:
        """Samples in the smallest batch of one pass over each client's samples, ``[num_clients]``.

        BatchNorm cannot train on a batch of one sample; ``drop_last`` leaves out the incomplete
        batch, yet a client of one sample keeps its own.
        """
        sizes = torch.tensor([[len(part) for part in parts] for parts in self.split.stream_steps])
        return self._batching.smallest(sizes).amin(0)

    def batch_sizes(self, clients: Tensor, start: int, count: int) -> Tensor:
        """Return the samples in local steps ``start`` to ``start + count`` of clients.

        Args:
            clients: Ids of the clients, ``[k]``.
            start: Number of steps before.
            count: Number of steps.

        Returns:
            Sizes, ``[count, k]``.
        """
        return self._batching.sizes(self.num_samples[clients], start, count)

    @property
    def has_samples_in_front(self) -> bool:
        """Whether the first axis of every tensor in a batch is known to be that of the samples.

        All other samples are collated client by client.
        """
        return has_samples_in_front(self.train, self.collate_fn, type(self))

    @property
    def can_fetch_steps(self) -> bool:
        """Whether a round's batches can be fetched one local step at a time: only from memory."""
        return self.has_samples_in_front and self.num_workers == 0

    def local_steps(self) -> Callable[[int, bool], Any]:
        """Return how to fetch the local steps of the next batch of a plan that is ``stepwise``."""
        return self._reader.local_steps()

    def samples_of(self, client: int, test: bool = False) -> Iterator[Any]:
        """Yield all training samples of a client in order, in batches of ``eval_batch_size``.

        Args:
            client: Id of the client.
            test: Whether to yield its own test samples instead.
        """
        batches = self._batches(self.train)
        part = (self.local_tests if test else self.present)[client]
        for index in part.split(self.eval_batch_size):
            yield batches[Batch.evaluation(index, batches.seed)]

    def steps_of(self, client: int, generator: torch.Generator) -> Iterator[Any]:
        """Yield batches of a client's training samples without end, as a round would.

        Args:
            client: Id of the client.
            generator: Source of the order.
        """
        batches = self._batches(self.train)
        for index in client_batches(self.present[client], self._batching, generator):
            yield batches[Batch(index, [(generator.initial_seed(),)])]

    # --- loaders ----------------------------------------------------------------------------------

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the round's batches, or shuffled batches of all clients without a loop."""
        self._reader = self._batches(self.train)
        sampler = self._epochs() if self.plan is None else self._round(self.plan())
        return self._loader(self._reader, sampler)

    def _round(self, plan: RoundPlan) -> RoundBatches:
        # Processes share the clients, or else the samples of each batch.
        processes = self._processes() if plan.world_size == 1 else (0, 1)
        is_alone = plan.group_size == plan.steps_per_batch == 1
        apart = not is_alone and not self.has_samples_in_front
        return RoundBatches(plan, self.present, self._batching, *processes, apart)

    def _epochs(self) -> EpochBatches:
        """Return the batches of the centralized baseline, with a warning that it is one."""
        if self.trainer is not None and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                "this fit is no federation: the Trainer has no FederatedLoop, so the module trains"
                f" on the samples of all {self.num_clients} clients together, as a centralized"
                " baseline. To train a federation, use Trainer(callbacks=[FederatedLoop(), ...])"
            )
        pooled, seed = torch.cat(self.parts).sort().values, run_seed(self.seed)
        return EpochBatches(self.trainer, pooled, self._batching, seed, *self._processes())

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
        return self._loader(self._batches(self._test_samples()), batch_size=self.eval_batch_size)

    def _test_samples(self) -> Any:
        if self.test is None:
            raise FederationError(f"{type(self).__name__} has no test samples: pass test=")
        return self.test

    def evaluation_loader(self, data: Any, shared: bool = True) -> DataLoader[Any]:
        """Return a loader of any samples, in order, as the server's own are read.

        Args:
            data: The samples, a map-style data set.
            shared: Whether several processes share them; else each reads all, in the batches that
                one process reads.
        """
        processes = self._processes() if shared else (0, 1)
        batches = self._batches(in_memory(data, "data"))
        sampler = EvaluationBatches(len(data), self.eval_batch_size, batches.seed, *processes)
        return self._loader(batches, sampler)

    def _batches(self, data: Any) -> Batches:
        return Batches(data, self.collate_fn, run_seed(self.seed))

    def _loader(
        self, batches: Batches, sampler: OwnBatches | None = None, batch_size: int | None = None
    ) -> DataLoader[Any]:
        device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
        return round_loader(batches, sampler, device, self.num_workers, batch_size)

    def _processes(self) -> tuple[int, int]:
        """Return the index of this process, and the number of processes."""
        trainer = self.trainer
        return (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)

    # --- samples ----------------------------------------------------------------------------------

    def replace_samples(self, train: Dataset[Any]) -> None:
        """Train on other samples at the same indices, until :meth:`restore_samples`.

        Args:
            train: As many samples as there are, a map-style data set.
        """
        self._original = self._original or self.train
        self.train = in_memory(train, "train")

    def restore_samples(self) -> None:
        """Train on the original samples again."""
        self.train, self._original = self._original or self.train, None

    def example(self) -> Any:
        """Return two training samples (one, if there is no other) as the module gets them."""
        with seeded_rng(0):  # their transforms may draw
            samples = [self.train[i] for i in range(min(2, len(self.train)))]
            batch = self.on_before_batch_transfer(self.collate_fn(samples), 0)
            return self.on_after_batch_transfer(batch, 0)

    @cached_property
    def sample_bytes(self) -> int:
        """Memory that a training sample takes on the device, with its numbers as float32."""
        with seeded_rng(0):  # its transforms may draw
            sample = self.train[0]
        return 4 * sum(t.numel() if isinstance(t, Tensor) else 1 for t in tree_leaves(sample))

    @property
    def module_dtype(self) -> torch.dtype:
        """The dtype of the module in training; torch's default without one."""
        module = None if self.trainer is None else self.trainer.lightning_module
        dtype = torch.get_default_dtype() if module is None else module.dtype
        assert isinstance(dtype, torch.dtype)  # Lightning says "or str"
        return dtype
