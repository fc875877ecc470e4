"""Samples in memory, indexed by whole batches, and kept on the device if they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from lightning_fl.errors import FederationError

if TYPE_CHECKING:
    AnyDataset: TypeAlias = Dataset[Any]
else:  # jsonargparse cannot construct subclasses of Dataset[Any] from a config
    AnyDataset = Dataset


class InMemory(TensorDataset):
    """Tensors of equal length in memory. A batch takes one indexing operation per tensor.

    Example:
        >>> InMemory(torch.arange(4.0), torch.tensor([0, 1, 0, 1])).fetch(torch.tensor([3, 0]))
        [tensor([3., 0.]), tensor([1, 0])]
    """

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self._memory: list[Tensor] = []
        self._copy: InMemory | None = None
        #: Key of each sample for ``Natural``, and names of keys that are indices; None if unknown.
        self.keys: Any = None
        self.key_names: Sequence[str] | None = None
        #: Numbers of the samples, if they were copied; see ``sample_ids``.
        self.indices: Sequence[int] | Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Device of the samples."""
        return self.tensors[0].device

    def on(self, device: torch.device) -> InMemory:
        """Return the samples on a device: this data set, or a cached copy."""
        if all(t.device == device for t in self.tensors):
            return self
        if self._copy is None or self._copy.device != device:
            self._copy = InMemory(*(t.to(device) for t in self.tensors))
        return self._copy

    def fetch(self, index: Tensor, reuse: bool = False) -> list[Tensor]:
        """Return the samples of a batch, stacked, in a list as from a ``DataLoader``.

        Args:
            index: Indices of the samples, ``[n]``.
            reuse: Whether to write to the memory of the last batch with ``reuse``. To allocate
                memory takes longer than the copy.
        """
        index, n = index.to(self.device, non_blocking=True), len(index)
        if reuse and not (self._memory and len(self._memory[0]) >= n):
            self._memory = [t.new_empty(n, *t.shape[1:]) for t in self.tensors]
        places = [m[:n] for m in self._memory] if reuse else [None] * len(self.tensors)
        # index_select is several times faster than t[index] for small batches.
        pairs = zip(self.tensors, places, strict=True)
        return [torch.index_select(tensor, 0, index, out=place) for tensor, place in pairs]


def not_found(data: object, where: str, remedy: str = "") -> FederationError:
    """Return the error that the files of a data module are missing.

    Args:
        data: The data module.
        where: Where they were looked for.
        remedy: How to obtain them; by default with ``download=true``.
    """
    remedy = remedy or "download it with download=true (data.init_args.download)"
    text = f"was not found in {where}: set root to the folder that contains it, or {remedy}"
    return FederationError(f"{type(data).__name__} {text}")


def check_map_style(data: Any, name: str) -> None:
    """Refuse what is not a map-style data set with samples.

    A list is a data set of samples. Tuples, dictionaries and arrays are columns of samples.

    Args:
        data: Data set.
        name: Name of the option, for error messages.

    Raises:
        FederationError: If the data set is iterable-style, empty, or columns of samples.
    """
    is_map_style = isinstance(data, Sized) and hasattr(data, "__getitem__")
    is_columns = isinstance(data, Mapping | tuple | str | Tensor | np.ndarray)
    if isinstance(data, IterableDataset) or is_columns or not is_map_style:
        raise FederationError(
            f"{name} must be a map-style data set (with len() and []), got {type(data).__name__}:"
            " use TensorDataset(x, y) for tensors, and FederatedDataModule.from_datamodule,"
            " from_clients or from_hf for other data"
        )
    if not len(data):
        raise FederationError(f"{name} has no samples")


def in_memory(data: Any, name: str) -> Any:
    """Check that a data set is map-style, and convert a ``TensorDataset`` to :class:`InMemory`.

    A ``Subset`` of one, as ``random_split`` returns it, is copied.

    Args:
        data: Data set or None.
        name: Name of the option, for error messages.

    Raises:
        FederationError: If the data set is iterable-style or empty.
    """
    if data is None:
        return None
    check_map_style(data, name)
    if type(data) is Subset and type(data.dataset) is TensorDataset:
        samples = InMemory(*(t[torch.as_tensor(data.indices)] for t in data.dataset.tensors))
        samples.keys, samples.key_names = keys_of(data)
        samples.indices = data.indices
        return samples
    if type(data) is not TensorDataset:  # subclasses may change their samples
        return data
    samples = InMemory(*data.tensors)
    vars(samples).update(vars(data))  # such as keys and targets
    return samples


def keys_of(data: Any) -> tuple[Any, Sequence[str] | None]:
    """Return the keys of the samples, ``[n]``, and the names of keys that are indices, or None.

    A ``Subset`` has those of its samples.

    Args:
        data: Map-style data set.
    """
    if isinstance(data, Subset):
        keys, names = keys_of(data.dataset)
        if keys is not None:  # as objects, because numpy would make texts of numbers among texts
            keys = np.asarray(keys, dtype=object)[np.asarray(data.indices)]
        return keys, names
    keys = getattr(data, "keys", None)
    return None if callable(keys) else keys, getattr(data, "key_names", None)


def sample_ids(data: Any, known: dict[Any, Tensor] | None = None) -> Tensor:
    """Return a number for each row, ``[n]``, which is the same for rows that are one sample.

    Such rows have the same index in the same data set, also within ``Subset``, ``ConcatDataset``
    and ``TensorDataset`` of the same tensors.

    Args:
        data: Map-style data set.
        known: Numbers of data sets that were met before.

    Example:
        >>> ten = range(10)
        >>> sample_ids(ConcatDataset([Subset(ten, [3, 5]), Subset(ten, [5])]))
        tensor([3, 5, 5])
    """
    known = {} if known is None else known
    if isinstance(data, Subset):
        return sample_ids(data.dataset, known)[torch.as_tensor(data.indices)]
    if isinstance(data, ConcatDataset):
        return torch.cat([sample_ids(part, known) for part in data.datasets])
    if isinstance(data, InMemory) and data.indices is not None:
        return torch.as_tensor(data.indices)
    key = tuple(map(id, data.tensors)) if isinstance(data, TensorDataset) else id(data)
    if key not in known:
        known[key] = torch.arange(len(data)) + (len(known) << 40)
    return known[key]


def subset(data: Any, index: Tensor) -> InMemory | Subset[Any]:
    """Return a subset of a map-style data set; a copy if the samples are in memory."""
    if isinstance(data, InMemory):
        return InMemory(*data.fetch(index))
    return Subset(data, index.tolist())


def fits(data: InMemory, device: torch.device) -> bool:
    """Return whether samples fit on a GPU, in at most a quarter of its memory."""
    if device.type != "cuda":
        return False
    size = sum(tensor.nbytes for tensor in data.tensors)
    return size <= torch.cuda.get_device_properties(device).total_memory / 4
