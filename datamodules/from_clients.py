"""Data of clients that are given as one data set each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from itertools import groupby
from typing import Any, TypeAlias

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
from lightning_fl.options import check_integer, is_list
from lightning_fl.partition import Natural

#: A data set, or one for training and one for local tests.
OneClient: TypeAlias = AnyDataset | tuple[AnyDataset, AnyDataset]
#: Options that choose samples by index, which streams do not have: the value for streams, and what
#: to do instead.
BY_INDEX: dict[str, tuple[Any, str]] = {
    "val_size": (0, "pass validation samples as val="),
    "local_test_size": (0, "pass a pair of a stream and a test set for each client"),
    "stream_steps": (1, "each client reads on from round to round"),
    "replacement": (False, "draw the samples in the stream"),
    "labels": (None, "rules and terms that need labels need map-style data sets"),
    "_classes": (None, "number the classes in the stream"),
    "num_workers": (0, "give DataLoader(stream, batch_size=None, num_workers=1) instead of stream"),
}


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
        #: Data sets of the clients, and then their test sets, if they have any.
        self._parts = [part for column in zip(*pairs.values(), strict=True) for part in column]
        #: Whether the samples of clients are streams.
        self.is_stream = any(map(_is_stream, self._parts))
        self._sizes = self._checked_sizes(num_samples)

    def _checked_sizes(self, given: int | Mapping[str, int] | None) -> list[int]:
        """Return the number of samples of each stream; none for map-style data sets."""
        if not self.is_stream and given is None:
            return []
        by_name: dict[str, Any] = dict.fromkeys(self.clients, given)
        if isinstance(given, Mapping):
            by_name = dict(given)
        if not self.is_stream or by_name.keys() != self.clients.keys():
            raise FederationError(
                "num_samples must be None, or for streams a number of samples, or one for each of"
                f" {short_repr(list(self.clients))}, got {given!r:.200}"
            )
        for option, (value, remedy) in BY_INDEX.items():
            if getattr(self, option) != value and (option != "val_size" or self.holds_out):
                raise FederationError(
                    f"{option.strip('_')} needs samples with an index, and the clients are streams:"
                    f" set it to {value}, and {remedy}"
                )
        hint = "streams have no length"
        return [check_integer("num_samples", by_name[n], min=1, hint=hint) for n in self.clients]

    def setup(self, stage: str | None = None) -> None:
        """Load and split the data, and start streams from the beginning; see the base class."""
        super().setup(stage)
        if self.is_stream and stage == "fit":
            self.train.load_state_dict()

    def load(self, train: bool) -> Any:
        """Return the samples of all clients, or the test samples."""
        if not train:
            return self.test
        if self.is_stream:
            samples: Any = Streams(list(self.clients), self._parts, self._sizes)
        else:
            parts = [with_classes(part, self._classes) for part in self._parts]
            samples = joined(list(self.clients), parts)
        sizes = [len(test) for test in self._parts[len(self.clients) :]]
        self._own_tests = list(torch.arange(len(samples) - sum(sizes), len(samples)).split(sizes))
        return samples

    def _data_sets(self) -> list[tuple[str, Any]]:
        kinds = ("client", "the test set of client")
        names = [f"{kind} {name!r}" for kind in kinds for name in self.clients]
        return [*zip(names, self._parts, strict=False), *super()._data_sets()]

    # --- streams ----------------------------------------------------------------------------------

    def _ahead(self, client: int, test: bool = False) -> AbstractContextManager[None]:
        if not self.is_stream or test:
            return nullcontext()
        streams: Streams = self.train
        return streams.ahead(int(self.present[client][0]))

    def samples_of(self, client: int, test: bool = False) -> Iterator[Any]:
        """Yield the samples of a client; of a stream the next ones, which are read again later."""
        with self._ahead(client, test):
            yield from super().samples_of(client, test)

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
        return self.train.state_dict() if isinstance(self.train, Streams) else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states of streams when a fit is resumed."""
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self.train.check_states("has no state with which a run could be resumed")
            self.train.load_state_dict(state_dict)


def _named(clients: Any) -> dict[str, tuple[Any, ...]]:
    """Return ``(train,)`` or ``(train, test)`` by the name of the client, for lists its number."""
    if not (isinstance(clients, Mapping) or is_list(clients)) or not clients:
        raise FederationError(
            "clients must be a dictionary or list with one data set per client, got"
            f" {short_repr(clients)}: to split one data set, call FederatedDataModule(train=...)"
        )
    is_named = isinstance(clients, Mapping)
    named = dict(clients) if is_named else {str(i): data for i, data in enumerate(clients)}
    for name, data in named.items():
        if not isinstance(name, str):
            raise FederationError(
                f"the name of a client must be a text, got {short_repr(name)}: quote it, since YAML"
                " reads 010 as 8 and no as false"
            )
        named[name] = data if isinstance(data, tuple) and len(data) == 2 else (data,)
        for part in named[name]:
            if part is not named[name][0] or not _is_stream(part):
                check_map_style(part, f"the data set of client {name!r}")
    if len({len(data_sets) for data_sets in named.values()}) > 1:
        raise FederationError("give each client a test set, (train, test), or give none to any")
    if len({_is_stream(data_sets[0]) for data_sets in named.values()}) > 1:
        raise FederationError("give each client a stream, or a map-style data set to all")
    return named


def _is_stream(data: Any) -> bool:
    return isinstance(data, IterableDataset) or (
        isinstance(data, DataLoader) and data.batch_size is None
    )


class ByClient(Dataset[Any]):
    """Samples that are stored client by client. Subclasses define :meth:`samples_of`.

    Args:
        names: Names of the clients.
        sizes: Number of samples of each client, and then of the test set of each, if they have one.
    """

    def __init__(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        self.starts = np.cumsum([0, *sizes])
        #: Index of the client of each sample, and the names of the clients, for ``Natural``.
        self.keys, self.key_names = np.repeat(np.arange(len(sizes)) % len(names), sizes), names

    def samples_of(self, client: int, rows: list[int]) -> list[Any]:
        """Return samples of a client.

        Args:
            client: Index of the client in ``sizes``.
            rows: Indices of the samples among those of the client.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, index: list[int]) -> list[Any]:
        """Return samples; consecutive ones of one client are read together."""
        owners = np.searchsorted(self.starts, index, side="right") - 1
        samples: list[Any] = []
        for owner, pairs in groupby(zip(owners.tolist(), index, strict=True), lambda pair: pair[0]):
            samples += self.samples_of(owner, [i - int(self.starts[owner]) for _, i in pairs])
        return samples


class Joined(ByClient, ConcatDataset[Any]):
    """Concatenation of the data sets of clients, and their test sets.

    Args:
        names: Names of the clients.
        parts: Data sets of the clients, and then their test sets, if they have any.
    """

    def __init__(self, names: Sequence[str], parts: Sequence[Any]) -> None:
        super().__init__(names, [len(part) for part in parts])
        self.datasets = list(parts)
        labels = [labels_of(part) for part in self.datasets]
        known = [each for each in labels if each is not None and each.ndim == 1]
        #: Labels of all samples, if all data sets have them.
        self.targets: Tensor | None = torch.cat(known) if len(known) == len(labels) else None

    def samples_of(self, client: int, rows: list[int]) -> list[Any]:
        """Return samples of a client."""
        part = self.datasets[client]
        many = getattr(part, "__getitems__", None)
        samples: list[Any] = many(rows) if many is not None else [part[row] for row in rows]
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


class Streams(ByClient):
    """Streams of samples of clients, which are read in order, and test sets of clients.

    Any index of a client's samples reads the next sample of its stream.

    Args:
        names: Names of the clients.
        parts: Streams of the clients, and then their test sets, if they have any.
        sizes: Number of samples of each stream in a local epoch.
    """

    def __init__(self, names: Sequence[str], parts: Sequence[Any], sizes: Sequence[int]) -> None:
        super().__init__(names, [*sizes, *map(len, parts[len(sizes) :])])
        self.streams, self.tests = list(parts[: len(sizes)]), list(parts[len(sizes) :])
        self._readers: dict[int, Iterator[Any]] = {}
        #: Names of the clients whose streams have no state: they are read once, for training.
        self.once = [
            name
            for name, stream in zip(names, self.streams, strict=True)
            if not (hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict"))
        ]
        self._first = self.state_dict()
        with seeded_rng(0):
            self._examples = [self._next(0), self._next(0)]
        self.load_state_dict()

    def __getitem__(self, index: int) -> Any:
        """Return one of the first two samples of the first client, as an example."""
        return self._examples[index]

    def samples_of(self, client: int, rows: list[int]) -> list[Any]:
        """Return the next samples of a client, or samples of its test set."""
        if (test := client - len(self.streams)) >= 0:
            return [self.tests[test][row] for row in rows]
        return [self._next(client) for _ in rows]

    def _next(self, client: int) -> Any:
        for _ in range(2):
            if client not in self._readers:
                self._readers[client] = iter(self.streams[client])
            for sample in self._readers[client]:
                return sample
            del self._readers[client]  # it has ended, and starts again
        raise FederationError(f"the stream of client {self.key_names[client]!r} has no samples")

    @contextmanager
    def ahead(self, index: int) -> Iterator[None]:
        """Read on, and go back to where the stream of the client with a sample is now.

        Args:
            index: Index of the sample.

        Raises:
            FederationError: If a client has a stream without a state.
        """
        self.check_states("is read once, for training, and cannot be read ahead")
        client = int(np.searchsorted(self.starts, index, side="right")) - 1
        state = deepcopy(self.streams[client].state_dict())
        try:
            yield
        finally:
            self._go_to(client, state)

    def check_states(self, why: str) -> None:
        """Raise an error that gives a reason if a client has a stream without a state."""
        if self.once:
            raise FederationError(
                f"the stream of client {self.once[0]!r} {why}: give it the methods state_dict and"
                " load_state_dict, as a StatefulDataLoader of torchdata has them"
            )

    def _go_to(self, client: int, state: Any) -> None:
        self._readers.pop(client, None)
        if not self.once:
            self.streams[client].load_state_dict(deepcopy(state))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stream of each client by name; None if it has none."""
        streams = zip(self.key_names, self.streams, strict=True)
        return {n: None if self.once else deepcopy(each.state_dict()) for n, each in streams}

    def load_state_dict(self, states: Mapping[str, Any] | None = None) -> None:
        """Restore the states of all streams; None starts them from the beginning."""
        states = self._first if states is None else states
        for client, name in enumerate(self.key_names):
            self._go_to(client, states[name])
