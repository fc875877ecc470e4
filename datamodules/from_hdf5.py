"""Federated data sets in HDF5 files, in the layout of TensorFlow Federated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fl.datamodules.federated import FederatedDataModule
from lightning_fl.datamodules.from_clients import ByClient
from lightning_fl.errors import FederationError
from lightning_fl.extras import imported
from lightning_fl.files import error_context
from lightning_fl.options import check_integer
from lightning_fl.partition import Natural


class FromHDF5(FederatedDataModule):
    """Clients in an HDF5 file in the layout of TensorFlow Federated: ``examples/<client>/<field>``.

    EMNIST, Shakespeare, CIFAR-100 and Stack Overflow are distributed in this layout. Each client of
    the file is a client. Samples stay in the file; those of one client are read at a time. Numbers
    become tensors, with labels and indices in int64 and bytes of images as they are. Texts become
    strings. Clients without samples are left out.

    Requires the package h5py: ``pip install "lightning_fl[hdf5]"``.

    Args:
        path: File with the training samples.
        test_path: File with the test samples; those of all clients are pooled.
        fields: Fields of a sample, in order, or a single one. A sample is a tuple of them, or a
            single value if there is one field.
        label: Field of the label, for histograms and stratified hold-outs. None means no labels.
        transform: Function of a sample.
        max_clients: Number of clients to read, in ascending order of their names; None means all.
        options: Further options of :class:`FederatedDataModule`.

    Raises:
        FederationError: If the package is missing, or a file does not have this layout.
    """

    test_remedy = "pass test_path="

    def __init__(
        self,
        path: str,
        test_path: str | None = None,
        fields: str | Sequence[str] = ("pixels", "label"),
        label: str | None = "label",
        transform: Callable[[Any], Any] | None = None,
        max_clients: int | None = None,
        **options: Any,
    ) -> None:
        imported("h5py", "FromHDF5", "hdf5")
        super().__init__(
            train=None, test=None, partition=Natural(), num_clients=None, keys=None, **options
        )
        self.path, self.test_path = path, test_path
        self.fields = [fields] if isinstance(fields, str) else list(fields)
        self.label, self.transform = label, transform
        if not self.fields:
            raise FederationError("fields must name at least one field, got none")
        self.max_clients = check_integer("max_clients", max_clients, min=1, optional=True)

    def load(self, train: bool) -> Any:
        """Return the samples for training or for test."""
        path = self.path if train else self.test_path
        if path is None:
            return None
        return Examples(path, self.fields, self.label, self.transform, self.max_clients)


class Examples(ByClient):
    """Samples of all clients in a file.

    Args:
        path: The file.
        fields: Fields of a sample.
        label: Field of the label, or None.
        transform: Function of a sample.
        max_clients: Number of clients to read; None means all.
    """

    def __init__(
        self,
        path: str,
        fields: Sequence[str],
        label: str | None,
        transform: Callable[[Any], Any] | None,
        max_clients: int | None,
    ) -> None:
        self.path, self.fields, self.label, self.transform = path, list(fields), label, transform
        self._file: Any = None
        #: The client that was read last, and its fields.
        self._last: tuple[int, list[Any]] = (-1, [])
        names = sorted(self._examples)[:max_clients]
        sizes = {name: size for name in names if (size := self._size(name))}
        if not sizes:
            raise FederationError(f"{path!r} has no clients with samples under examples/")
        super().__init__(list(sizes), list(sizes.values()))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a loader process, which opens the file itself."""
        return vars(self) | {"_file": None, "_last": (-1, [])}

    @property
    def _examples(self) -> Any:
        """The groups of the clients."""
        if self._file is None:
            with error_context(f"the HDF5 file {self.path!r} cannot be read", OSError):
                self._file = imported("h5py", "FromHDF5", "hdf5").File(self.path, "r")
        return self._file.get("examples", {})

    def _size(self, client: str) -> int:
        """Return the number of samples of a client: the length of each of its fields."""
        group, sizes = self._examples[client], dict[str, int]()
        wanted = list(dict.fromkeys([*self.fields, *([self.label] if self.label else [])]))
        with suppress(KeyError, TypeError, ValueError):  # no such field, or a single value
            sizes = {field: len(group[field]) for field in wanted}
        if len(set(sizes.values())) != 1:
            raise FederationError(
                f"client {client!r} in {self.path!r} must have the fields {wanted} with one value"
                f" per sample ({sizes or 'one is missing'}): set fields and label"
            )
        return sizes[wanted[0]]

    def samples_of(self, client: int, rows: list[int]) -> list[Any]:
        """Return samples of a client."""
        fields, samples = self._client(client), []
        for row in rows:
            values = [_value(field[row]) for field in fields]
            sample = tuple(values) if len(values) > 1 else values[0]
            samples.append(sample if self.transform is None else self.transform(sample))
        return samples

    def _client(self, owner: int) -> list[Any]:
        """Return the fields of a client; those of the last one are kept."""
        if self._last[0] != owner:
            group = self._examples[self.key_names[owner]]
            self._last = owner, [_native(group[field][()]) for field in self.fields]
        return self._last[1]

    @cached_property
    def targets(self) -> Tensor | None:
        """Label of each sample, ``[n]``; None without labels, or if they are not numbers."""
        if self.label is None:
            return None
        each = [self._examples[name][self.label][()] for name in self.key_names]
        labels = _native(np.concatenate(each))
        return torch.from_numpy(labels) if labels.dtype.kind in "biuf" else None


def _native(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array in the byte order of this machine, as tensors need it."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _value(value: Any) -> Any:
    """Return a value of a field: bytes as a string, numbers as a tensor."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray) and value.dtype.kind in "OS":
        return [_value(each) for each in value.tolist()]
    tensor = torch.tensor(np.asarray(value))  # a copy: a transform may change it in place
    is_bytes = tensor.dtype == torch.uint8 and tensor.ndim > 0
    is_as_it_is = is_bytes or tensor.is_floating_point() or tensor.dtype == torch.bool
    return tensor if is_as_it_is else tensor.long()
