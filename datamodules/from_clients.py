"""Data of clients that are given as one data set each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import groupby
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_fl.datamodules.classes import with_classes
from lightning_fl.datamodules.federated import FederatedDataModule
from lightning_fl.datamodules.splits import labels_of
from lightning_fl.datamodules.storage import AnyDataset, InMemory, check_map_style, sample_ids
from lightning_fl.errors import FederationError
from lightning_fl.files import short_repr
from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.options import check_integer, check_that, is_list
from lightning_fl.partition import Natural

#: A data set, or one for training and one for local tests.
OneClient: TypeAlias = AnyDataset | tuple[AnyDataset, AnyDataset]
#: Options that choose samples by index, which streams do not have, and their values for streams.
BY_INDEX: dict[str, Any] = {"val_size": 0, "local_test_size": 0, "stream_steps": 1}
BY_INDEX |= {"replacement": False, "labels": None, "_classes": None, "num_workers": 0}


class FromClients(FederatedDataModule):
    """Clients that are given as one data set each, such as the hospitals of a study.

    Client ``i`` is the ``i``-th data set. Tables show the names of the clients. Nothing is copied,
    except that tensors of ``TensorDataset`` objects with equal shapes are concatenated, which makes
    batches faster.

    The data sets may be streams: each an ``IterableDataset``, or a ``DataLoader`` of one with
    ``batch_size=None`` and workers. A stream has no length: ``num_samples`` is the number of
    samples in a local epoch, and the weight of the client. Each client reads its stream in order
    and goes on from round to round. A stream that ends starts again. Streams train in one process.

    If all streams have the methods ``state_dict`` and ``load_state_dict``, as a
    ``StatefulDataLoader`` of torchdata, a run resumes bit for bit. Vectorization, fine-tuning,
    unseen clients and losses over all samples then read the next samples, and go back. Without
    these methods, a stream is read once, for training, and all these are refused.

    Args:
        clients: Data sets by the name of their client, or in a sequence: all map-style, or all
            streams. A pair of data sets, ``(train, test)``, has the local test samples of the
            client, too, for example later ones of a time series. They are map-style, and replace
            those of ``local_test_size``.
        num_samples: Number of samples of streams in a local epoch, for all or by the name of the
            client; None for map-style data sets.
        options: Options of :class:`FederatedDataModule`, such as ``val``, ``test`` and
            ``batch_size``. Without ``val``, ``val_size`` of all training samples are held out.

    Raises:
        FederationError: If there is no client, a name is not a text, some clients have a test set
            or a stream and others none, or a data set is empty or a tensor. If clients are streams,
            for ``val_size`` and other options that choose samples by index.

    Example:
        >>> def hospital(n):
        ...     return TensorDataset(torch.randn(n, 4), torch.arange(n) % 2)
        >>> both = {"north": hospital(30), "south": hospital(10)}
        >>> data = FromClients(both, val_size=4, seed=0)
        >>> data.setup("fit")
        >>> data.client_names, data.num_samples
        (['north', 'south'], tensor([27,  9]))
    """

    def __init__(
        self,
        clients: Mapping[str, OneClient] | Sequence[OneClient],
        num_samples: int | Mapping[str, int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(train=None, partition=Natural(), num_clients=None, keys=None, **options)
        pairs = _named(clients)
        self.clients = {name: data_sets[0] for name, data_sets in pairs.items()}
        #: Test sets of the clients, if they have any.
        self._tests = [test for _, *tests in pairs.values() for test in tests]
        #: Whether the samples of clients are streams.
        self.is_stream = any(map(_is_stream, self.clients.values()))
        has_sizes = self.is_stream or num_samples is not None
        self._streams = self._with_sizes(num_samples) if has_sizes else []

    def _with_sizes(self, given: int | Mapping[str, int] | None) -> list[Stream]:
        """Return the streams of the clients, each with its number of samples."""
        one = dict.fromkeys(self.clients, given)
        by_name: Mapping[str, Any] = given if isinstance(given, Mapping) else one
        if not self.is_stream or by_name.keys() != self.clients.keys():
            raise FederationError(
                "num_samples must be None, or for streams a number of samples, or one for each of"
                f" {short_repr(list(self.clients))}, got {given!r:.200}"
            )
        for option, value in BY_INDEX.items():
            if vars(self)[option] != value and (option != "val_size" or self.holds_out):
                raise FederationError(
                    f"{option.strip('_')} needs samples with an index, and the clients are streams:"
                    f" set it to {value}"
                )
        for name, size in by_name.items():
            check_integer("num_samples", size, min=1, hint=f"the stream of {name!r} has no length")
        return [Stream(name, data, by_name[name]) for name, data in self.clients.items()]

    def setup(self, stage: str | None = None) -> None:
        """Load and split the data, and start streams from the beginning; see the base class."""
        super().setup(stage)
        for stream in self._streams if stage == "fit" else ():
            stream.restart()

    def load(self, train: bool) -> Any:
        """Return the samples of all clients, or the test samples."""
        if not train:
            return self.test
        for stream in self._streams[:2]:
            stream.read_examples()
        parts = [*(self._streams or self.clients.values()), *self._tests]
        samples = joined(list(self.clients), [with_classes(part, self._classes) for part in parts])
        sizes = [len(test) for test in self._tests]
        self._own_tests = list(torch.arange(len(samples) - sum(sizes), len(samples)).split(sizes))
        return samples

    def _data_sets(self) -> list[tuple[str, Any]]:
        kinds = ("client", "the test set of client")
        names = [f"{kind} {name!r}" for kind in kinds for name in self.clients]
        parts = [*self.clients.values(), *self._tests]
        return [*zip(names, parts, strict=False), *super()._data_sets()]

    # --- streams ----------------------------------------------------------------------------------

    @contextmanager
    def _ahead(self, client: int, test: bool = False) -> Iterator[None]:
        """Read a stream on, and go back to where it is now."""
        if not self.is_stream or test:
            yield
            return
        self._check_states("is read once, for training, and cannot be read ahead")
        stream = self._streams[self.train.part_of(int(self.present[client][0]))]
        state = stream.state()
        try:
            yield
        finally:
            stream.go_to(state)

    def _check_states(self, why: str) -> None:
        """Raise an error that gives a reason if a client has a stream without a state."""
        for stream in self._streams:
            if not stream.has_state:
                raise FederationError(
                    f"the stream of client {stream.name!r} {why}: give it the methods state_dict"
                    " and load_state_dict, as a StatefulDataLoader of torchdata has them"
                )

    def samples_of(self, client: int, test: bool = False, most: int = 0) -> Iterator[Any]:
        """Yield the samples of a client; of a stream the next ones, which are read again later."""
        with self._ahead(client, test):
            yield from super().samples_of(client, test, most)

    def steps_of(self, client: int, generator: torch.Generator) -> Iterator[Any]:
        """Yield training batches of a client; of a stream the next ones, which are read again."""
        with self._ahead(client):
            yield from super().steps_of(client, generator)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the round's batches; see the base class. Streams are read by one process."""
        if self.is_stream and self._processes()[1] > 1:
            raise FederationError(
                "clients that are streams train in one process, because another one would not read"
                " a stream on: set devices=1, or use map-style data sets"
            )
        return super().train_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of streams, for checkpoints."""
        return {stream.name: stream.state() for stream in self._streams}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states of streams when a fit is resumed."""
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self._check_states("has no state with which a run could be resumed")
            for stream in self._streams:
                stream.go_to(state_dict[stream.name])


def _named(clients: Any) -> dict[str, tuple[Any, ...]]:
    """Return ``(train,)`` or ``(train, test)`` by the name of the client, for lists its number."""
    is_named = isinstance(clients, Mapping)
    if not (is_named or is_list(clients)) or not clients:
        raise FederationError(
            "clients must be a dictionary or list with one data set per client, got"
            f" {short_repr(clients)}: to split one data set, call FederatedDataModule(train=...)"
        )
    named = dict(clients) if is_named else {str(i): data for i, data in enumerate(clients)}
    for name, data in named.items():
        hint = "quote it, since YAML reads 010 as 8 and no as false"
        check_that("the name of a client", name, isinstance(name, str), "a text", hint)
        named[name] = data if isinstance(data, tuple) and len(data) == 2 else (data,)
        for part in named[name]:
            if part is not named[name][0] or not _is_stream(part):
                check_map_style(part, f"the data set of client {name!r}")
    if len({(len(data_sets), _is_stream(data_sets[0])) for data_sets in named.values()}) > 1:
        raise FederationError(
            "clients must all have streams or all data sets, with test sets, (train, test), for all"
            " or for none"
        )
    return named


def _is_stream(data: Any) -> bool:
    return isinstance(data, IterableDataset) or (
        isinstance(data, DataLoader) and data.batch_size is None
    )


class Joined(ConcatDataset[Any]):
    """Concatenation of the data sets of clients, and their test sets.

    Args:
        names: Names of the clients.
        parts: Data sets of the clients, and then their test sets, if they have any.
    """

    def __init__(self, names: Sequence[str], parts: Sequence[Any]) -> None:
        super().__init__(parts)
        sizes = [len(part) for part in parts]
        #: Index of the client of each sample, and the names of the clients, for ``Natural``.
        self.keys, self.key_names = np.repeat(np.arange(len(parts)) % len(names), sizes), names
        known = [each for part in parts if (each := labels_of(part)) is not None and each.ndim == 1]
        #: Labels of all samples, if all data sets have them.
        self.targets: Tensor | None = torch.cat(known) if len(known) == len(parts) else None

    def part_of(self, index: int) -> int:
        """Return the position of the data set with a sample."""
        return bisect_right(self.cumulative_sizes, index)

    def __getitems__(self, index: list[int]) -> list[Any]:
        """Return samples; consecutive ones of one data set are read together."""
        samples: list[Any] = []
        for at, some in groupby(index, self.part_of):
            part: Any = self.datasets[at]
            rows = [i - (self.cumulative_sizes[at] - len(part)) for i in some]
            many = getattr(part, "__getitems__", None)
            samples += [part[row] for row in rows] if many is None else many(rows)
        return samples


def joined(names: Sequence[str], parts: Sequence[Any]) -> Any:
    """Return the samples of :class:`Joined` as tensors in memory, if all are."""
    whole = Joined(names, parts)
    if any(type(part) not in (TensorDataset, InMemory) for part in parts):
        return whole
    kinds = {tuple((t.shape[1:], t.dtype, t.device) for t in part.tensors) for part in parts}
    if len(kinds) > 1:
        return whole
    samples = InMemory(*map(torch.cat, zip(*(part.tensors for part in parts), strict=True)))
    samples.keys, samples.key_names = whole.keys, whole.key_names
    samples.indices = sample_ids(whole)
    return samples


@runtime_checkable
class Stateful(Protocol):
    """Stream that can go back to a state."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Go to a state."""


class Stream(Dataset[Any]):
    """Stream of the samples of a client, which is read in order: any rows are the next samples.

    Args:
        name: Name of the client.
        data: The stream.
        size: Number of samples in a local epoch.
    """

    def __init__(self, name: str, data: Any, size: int) -> None:
        self.name, self.data, self.size = name, data, size
        self._reader: Iterator[Any] | None = None
        #: Whether it can go back. Otherwise it is read once, for training.
        self.has_state = isinstance(data, Stateful)
        self._first, self._examples = self.state(), list[Any]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        """Return one of the first two samples, as an example."""
        return self._examples[index]

    def __getitems__(self, rows: list[int]) -> list[Any]:
        """Return the next samples."""
        return [self._next() for _ in rows]

    def _next(self) -> Any:
        for _ in range(2):
            if self._reader is None:
                self._reader = iter(self.data)
            for sample in self._reader:
                return sample
            self._reader = None  # it has ended, and starts again
        raise FederationError(f"the stream of client {self.name!r} has no samples")

    def read_examples(self) -> None:
        """Read two samples, and go back to the beginning."""
        with seeded_rng(0):
            self._examples = self.__getitems__([0, 1])
        self.restart()

    def state(self) -> Any:
        """Return the state of the stream; None if it has none."""
        return deepcopy(self.data.state_dict()) if self.has_state else None

    def go_to(self, state: Any) -> None:
        """Go to a state of the stream."""
        self._reader = None
        if self.has_state:
            self.data.load_state_dict(deepcopy(state))

    def restart(self) -> None:
        """Go to the beginning."""
        self.go_to(self._first)
