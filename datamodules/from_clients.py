"""Data of clients that are given as one data set each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from lightning_fl.datamodules.classes import with_classes
from lightning_fl.datamodules.federated import FederatedDataModule
from lightning_fl.datamodules.splits import labels_of
from lightning_fl.datamodules.storage import AnyDataset, InMemory, check_map_style, sample_ids
from lightning_fl.errors import FederationError
from lightning_fl.files import short_repr
from lightning_fl.options import is_list
from lightning_fl.partition import Natural

#: A data set, or one for training and one for local tests.
OneClient: TypeAlias = AnyDataset | tuple[AnyDataset, AnyDataset]


class FromClients(FederatedDataModule):
    """Clients that are given as one data set each, such as the hospitals of a study.

    Client ``i`` is the ``i``-th data set. Tables show the names of the clients. Nothing is copied,
    except that tensors of ``TensorDataset`` objects with equal shapes are concatenated, which makes
    batches faster.

    Args:
        clients: Map-style data sets by the name of their client, or in a sequence. A pair of data
            sets, ``(train, test)``, has the local test samples of the client, too, for example
            later ones of a time series. They replace those of ``local_test_size``.
        options: Options of :class:`FederatedDataModule`, such as ``val``, ``test`` and
            ``batch_size``. Without ``val``, ``val_size`` of all training samples are held out.

    Raises:
        FederationError: If there is no client, a name is not a text, some clients have a test set
            and others none, or a data set is empty, iterable-style or a tensor.

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
        self, clients: Mapping[str, OneClient] | Sequence[OneClient], **options: Any
    ) -> None:
        super().__init__(train=None, partition=Natural(), num_clients=None, keys=None, **options)
        pairs = _named(clients)
        self.clients = {name: data_sets[0] for name, data_sets in pairs.items()}
        #: Data sets of the clients, and then their test sets, if they have any.
        self._parts = [part for column in zip(*pairs.values(), strict=True) for part in column]

    def load(self, train: bool) -> Any:
        """Return the samples of all clients, or the test samples."""
        if not train:
            return self.test
        samples = joined(list(self.clients), [with_classes(x, self._classes) for x in self._parts])
        sizes = [len(test) for test in self._parts[len(self.clients) :]]
        self._own_tests = list(torch.arange(len(samples) - sum(sizes), len(samples)).split(sizes))
        return samples

    def _data_sets(self) -> list[tuple[str, Any]]:
        kinds = ("client", "the test set of client")
        names = [f"{kind} {name!r}" for kind in kinds for name in self.clients]
        return [*zip(names, self._parts, strict=False), *super()._data_sets()]


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
            check_map_style(part, f"the data set of client {name!r}")
    if len({len(data_sets) for data_sets in named.values()}) > 1:
        raise FederationError("give each client a test set, (train, test), or give none to any")
    return named


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
