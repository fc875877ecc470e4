"""Data of clients that are given as one data set each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lightning_fl.datamodules.federated import FederatedDataModule
from lightning_fl.datamodules.splits import labels_of
from lightning_fl.datamodules.storage import AnyDataset, InMemory, check_map_style
from lightning_fl.errors import FederationError
from lightning_fl.files import short_repr
from lightning_fl.partition import Natural


class FromClients(FederatedDataModule):
    """Clients that are given as one data set each, such as the hospitals of a study.

    Client ``i`` is the ``i``-th data set. Tables show the names of the clients. Nothing is copied,
    except that tensors of ``TensorDataset`` objects with equal shapes are concatenated, which makes
    batches faster.

    Args:
        clients: Map-style data sets by the name of their client, or in a sequence.
        options: Options of :class:`FederatedDataModule`, such as ``val``, ``test`` and
            ``batch_size``. Without ``val``, ``val_size`` of all samples are held out.

    Raises:
        FederationError: If there is no client, two names are equal, or a data set is empty,
            iterable-style or a tensor.

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
        self, clients: Mapping[str, AnyDataset] | Sequence[AnyDataset], **options: Any
    ) -> None:
        super().__init__(train=None, partition=Natural(), num_clients=None, keys=None, **options)
        self.clients = _named(clients)

    def load(self, train: bool) -> Any:
        """Return the samples of all clients, or the test samples."""
        return joined(self.clients) if train else self.test


def _named(clients: Any) -> dict[str, Any]:
    """Return the data sets by the name of their client. Clients of a sequence have numbers."""
    if not isinstance(clients, Mapping | Sequence) or isinstance(clients, str) or not clients:
        raise FederationError(
            "clients must be a dictionary or list with one data set per client, got"
            f" {short_repr(clients)}: to split one data set, call FederatedDataModule(train=...)"
        )
    pairs = list(clients.items() if isinstance(clients, Mapping) else enumerate(clients))
    named = {str(name): data for name, data in pairs}
    if len(named) < len(pairs):
        raise FederationError(
            "clients must have distinct names as texts, got"
            f" {short_repr([name for name, _ in pairs])}: rename one"
        )
    for name, data in named.items():
        check_map_style(data, f"the data set of client {name!r}")
    return named


class ByClient(Dataset[Any]):
    """Samples that are stored client by client. Subclasses define :meth:`samples_of`.

    Args:
        sizes: Number of samples by the name of the client.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        counts = list(sizes.values())
        self.starts = np.cumsum([0, *counts])
        #: Index of the client of each sample, and the names of the clients, for ``Natural``.
        self.keys, self.key_names = np.repeat(np.arange(len(counts)), counts), list(sizes)

    def samples_of(self, client: int, rows: list[int]) -> list[Any]:
        """Return samples of a client.

        Args:
            client: Index of the client.
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


class Joined(ByClient):
    """Concatenation of the data sets of clients.

    Args:
        clients: Data sets by the name of their client.
    """

    def __init__(self, clients: Mapping[str, Any]) -> None:
        super().__init__({name: len(part) for name, part in clients.items()})
        self.parts = list(clients.values())
        labels = [labels_of(part) for part in self.parts]
        known = [each for each in labels if each is not None and each.ndim == 1]
        #: Labels of all samples, if all data sets have them.
        self.targets: Tensor | None = torch.cat(known) if len(known) == len(labels) else None

    def samples_of(self, client: int, rows: list[int]) -> list[Any]:
        """Return samples of a client."""
        part = self.parts[client]
        many = getattr(part, "__getitems__", None)
        samples: list[Any] = many(rows) if many is not None else [part[row] for row in rows]
        return samples


def joined(clients: Mapping[str, Any]) -> Any:
    """Return the samples of all clients as one data set: tensors in memory, if all are."""
    whole, parts = Joined(clients), list(clients.values())
    if any(type(part) not in (TensorDataset, InMemory) for part in parts):
        return whole
    kinds = {tuple((t.shape[1:], t.dtype, t.device) for t in part.tensors) for part in parts}
    if len(kinds) > 1:
        return whole
    samples = InMemory(*map(torch.cat, zip(*(part.tensors for part in parts), strict=True)))
    samples.keys, samples.key_names = whole.keys, whole.key_names
    return samples
