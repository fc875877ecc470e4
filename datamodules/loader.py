"""Read whole batches of a map-style data set."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ReferenceType, ref

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from lightning_fl.contracts.data import ClientBatches
from lightning_fl.datamodules.batches import Batch, Draws, OwnBatches
from lightning_fl.datamodules.storage import InMemory, fits
from lightning_fl.errors import FederationError
from lightning_fl.files import short_repr
from lightning_fl.functional.randomness import derive_seed, seeded_rng

Collate = Callable[[list[Any]], Any]


class Batches(Dataset[Any]):
    """Data set of whole batches of another data set, indexed by :class:`Batch`.

    The transforms of samples draw from the random stream of their batch. Their random numbers do
    not depend on the order of clients or the number of loader workers.

    Args:
        data: Map-style data set.
        collate: Function that makes a batch from a list of samples.
        seed: Seed of the run.
        use: What the samples are used for, for error messages.
    """

    def __init__(self, data: Any, collate: Collate, seed: int = 0, use: str = "train") -> None:
        self.data, self.collate, self.seed, self.use = data, collate, seed, use
        #: Function that a loader process calls first, with its index.
        self.worker_init: Callable[[int], None] | None = None
        #: Local steps of the stepwise batches that were fetched, by place. Others than the Trainer
        #: may iterate over a loader, too, and fetch batches again.
        self.waiting: dict[tuple[int, int], list[Batch]] = {}

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, index: list[int]) -> Any:
        """Return a batch of torch's sampler, which prediction uses."""
        return self[Batch.evaluation(torch.tensor(index), self.seed)]

    def __getitem__(self, batch: Batch) -> Any:
        if batch.stepwise:
            n = len(batch.index) // batch.stepwise
            self.waiting[batch.place] = steps = batch.split([n] * batch.stepwise)
            return self._fetched(steps[0])
        if batch.sizes is None:
            return self._collated(batch, batch.keys[0])
        parts = zip(batch.split(batch.sizes), batch.keys, strict=True)
        return ClientBatches(
            self._collated(part, key) if len(part.index) else None for part, key in parts
        )

    def _fetched(self, batch: Batch, reuse: bool = False) -> list[Any]:
        """Return samples in memory, with their random numbers for augmentation."""
        draws = [] if batch.draws is None else [Draws(batch.draws)]
        return [*self.data.fetch(batch.index, reuse), *draws]

    def _collated(self, batch: Batch, key: tuple[int, ...]) -> Any:
        if isinstance(self.data, InMemory) and self.collate is default_collate:
            return self._fetched(batch)
        index, doing, remedy = batch.index, "reading", ""
        with seeded_rng(derive_seed(*key)):
            try:
                if hasattr(self.data, "__getitems__"):
                    samples = self.data.__getitems__(index.tolist())
                else:
                    samples = [self.data[i] for i in index.tolist()]
                doing, remedy = "collating", ": give them the same shape, or pass collate_fn"
                collated = self.collate(samples)
            except Exception as error:
                error.add_note(f"While {doing} {self._which(batch, key)}{remedy}")
                raise
        if collated is None:  # Lightning would skip it, and with it the start of a client
            raise FederationError(
                f"collate_fn returned None for {self._which(batch, key)}, but a client cannot skip"
                " a batch: remove these samples from the data set, or return an empty batch, and"
                " None from training_step"
            )
        if batch.draws is None:
            return collated
        return [*collated, Draws(batch.draws)]

    def _which(self, batch: Batch, key: tuple[int, ...]) -> str:
        """Return the samples of a batch, their client if they have one, and its local step."""
        whose = self.use if batch.client is None else f"client {batch.client}"
        if len(key) > 4:
            whose = f"client {key[3]} in local step {key[4] + 1}"
        return f"the samples {short_repr(batch.index.tolist())} of {whose}"

    def start_worker(self, worker: int) -> None:
        """Call ``worker_init`` in a loader process. It finds its own data set there.

        Args:
            worker: Index of the loader process.
        """
        assert self.worker_init is not None
        object.__setattr__(get_worker_info(), "dataset", self.data)  # the object is frozen
        self.worker_init(worker)

    def local_steps(self, round: int, position: int) -> Callable[[int], Any]:
        """Return a function that fetches the local steps of a stepwise batch, given their index.

        Args:
            round: The round, from 0.
            position: Position of the batch in the round, from 0.
        """
        steps = self.waiting.pop((round, position))
        for place in [place for place in self.waiting if place[0] < round]:
            del self.waiting[place]  # fetched by others
        return lambda step: self._fetched(steps[step], reuse=True)


class Workers:
    """Loader processes that serve the loaders of all rounds, one after another.

    Args:
        batches: Data set of batches.
        options: Further options of a ``DataLoader``.
    """

    def __init__(self, batches: Batches, options: dict[str, Any]) -> None:
        #: Batches of the loader that is served; empty between loaders.
        self._order: list[Any] = []
        self._loader = DataLoader(batches, sampler=self._order, persistent_workers=True, **options)

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the batches of a loader, with processes of its own while these serve another."""
        if self._order:
            yield from DataLoader.__iter__(loader)
            return
        self._order[:] = loader.sampler
        try:
            yield from self._loader
        finally:
            self._order.clear()


class RoundLoader(DataLoader[Any]):
    """Loader that Lightning can resume, because its batches depend only on the plan."""

    #: Reference to loader processes that outlive this loader, until the end of the fit.
    workers: ReferenceType[Workers] | None = None

    def __iter__(self) -> Any:
        """Return an iterator; in this process it is a plain one, since torch's takes longer."""
        sampler: Any = self.sampler
        if self.num_workers and isinstance(sampler, OwnBatches):
            self.generator.manual_seed(derive_seed(*sampler.worker_key()))
        if self.workers is not None and (workers := self.workers()) is not None:
            return workers.batches(self)
        if self.num_workers or self.pin_memory or not isinstance(sampler, OwnBatches):
            return super().__iter__()
        return map(self.dataset.__getitem__, sampler)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dictionary: there is no state besides the plan."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing; see :meth:`state_dict`."""


def round_loader(
    batches: Batches,
    sampler: OwnBatches | None,
    device: torch.device,
    num_workers: int = 0,
    batch_size: int | None = None,
    kept: dict[Any, Workers] | None = None,
) -> RoundLoader:
    """Return a loader. It keeps the samples on the GPU if they fit.

    Args:
        batches: Data set of batches.
        sampler: Sampler of batches; None reads all samples in order.
        device: Device of the training.
        num_workers: Number of loader processes.
        batch_size: Samples per batch if there is no sampler.
        kept: Loader processes that outlive the loader, by their data; None starts new ones.
    """
    is_near = False
    if isinstance(batches.data, InMemory):
        if num_workers == 0:
            _ignore(".*does not have many workers.*")
            if fits(batches.data, device):
                batches.data = batches.data.on(device)
        is_near = batches.data.device == device
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "collate_fn": _identity,
        "num_workers": num_workers,
        "pin_memory": device.type == "cuda" and not is_near,
        "worker_init_fn": None if batches.worker_init is None else batches.start_worker,
        # Without this generator, every loader would draw a seed from the global generator.
        "generator": torch.Generator(),
    }
    loader = RoundLoader(batches, sampler=sampler, **options)
    if num_workers and kept is not None:
        _ignore(".*Consider setting `persistent_workers=True`.*")
        key = id(batches.data), id(batches.collate)
        kept[key] = kept.get(key) or Workers(batches, options)
        loader.workers = ref(kept[key])
    return loader


def module_dtype(trainer: Trainer | None) -> torch.dtype:
    """Return the dtype of the module in training; torch's default dtype without a module."""
    module = None if trainer is None else trainer.lightning_module
    dtype = torch.get_default_dtype() if module is None else module.dtype
    assert isinstance(dtype, torch.dtype)  # Lightning's annotation also allows str
    return dtype


def _ignore(message: str) -> None:
    """Ignore a warning. A new filter each time would show others again that are shown once."""
    if not any(known and known.pattern == message for _, known, *_ in warnings.filters):
        warnings.filterwarnings("ignore", message)


def _identity(batch: Any) -> Any:
    return batch
