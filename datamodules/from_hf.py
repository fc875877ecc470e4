"""Data sets of the Hugging Face package ``datasets``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fl.datamodules.federated import FederatedDataModule
from lightning_fl.datamodules.storage import check_absent, check_map_style
from lightning_fl.extras import imported
from lightning_fl.partition import Natural, Partition
from lightning_fl.types import FederationError


class FromHuggingFace(FederatedDataModule):
    """Split a data set of the Hugging Face package ``datasets`` over clients.

    Rows stay on disk (memory-mapped), and only those of a batch are read and decoded. A sample is
    ``(input, label)`` if ``input`` names one column, and a dictionary of columns if it names
    several. Without ``transform``, numbers become tensors, and images become tensors ``[channels,
    height, width]`` with values from 0 to 1; texts stay strings. A format or transform that the
    data set has itself (``set_format``, ``set_transform``) is kept.

    Requires the package datasets: ``pip install "lightning_fl[hf]"``.

    Args:
        dataset: A ``Dataset``, a ``DatasetDict``, the folder of either (``save_to_disk``), or a
            name for ``datasets.load_dataset``. A ``DatasetDict`` provides the samples for training,
            for validation and for test under the names ``train``, ``validation`` and ``test``.
        input: Column of the model's input, or several columns.
        label: Column of the label. ``auto`` is the only column of type ``ClassLabel``, or one named
            ``label`` or ``labels``. None means no label.
        partition_by: Column with the client of each row, such as the writer. Each value is a
            client, unless ``num_clients`` is smaller. None leaves the split to ``partition``.
        transform: Function of the input as ``datasets`` decodes it (a PIL image, text, list); with
            several input columns, of the dictionary with them and the label.
        label_transform: Function of the label, for a single input column.
        partition: Rule of the split; None means :class:`~lightning_fl.partition.Natural` with
            ``partition_by``, otherwise :class:`~lightning_fl.partition.IID`.
        num_clients: Number of clients; None if the rule determines it.
        batch_size: Samples per local step; None means all samples of a client.
        val: The server's validation rows, a ``Dataset``; None means those of a ``DatasetDict``, or
            rows that are held out.
        test: Test rows, a ``Dataset``; None means those of a ``DatasetDict``.
        load_options: Options of ``load_dataset``, such as ``{"name": "plain_text"}``.
        options: Further options of :class:`FederatedDataModule`.

    Raises:
        FederationError: If the package is missing, the data set streams or cannot be loaded, or has
            no such column.
    """

    def __init__(
        self,
        dataset: Any,
        input: str | Sequence[str] = "image",
        label: str | None = "auto",
        partition_by: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        label_transform: Callable[[Any], Any] | None = None,
        partition: Partition | None = None,
        num_clients: int | None = None,
        batch_size: int | None = 32,
        val: Any = None,
        test: Any = None,
        load_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        _package()  # raises if it is missing
        if partition_by is not None:
            partition = Natural() if partition is None else partition
            if partition.splits_by != "keys":
                raise FederationError(
                    f"{type(partition).__name__} does not use the column"
                    f" partition_by={partition_by!r}: leave out one of them, or use Natural"
                )
        if label_transform is not None and not (isinstance(input, str) and label):
            raise FederationError(
                "label_transform needs a label and a single input column: transform the dictionary"
                " with transform"
            )
        check_absent(options, "the data set determines", "train", "labels", "keys")
        self._given = {"val": val, "test": test}
        super().__init__(
            train=None,
            val=None,
            test=None,
            partition=partition,
            num_clients=num_clients,
            batch_size=batch_size,
            labels=None,
            keys=None,
            **options,
        )
        self.dataset, self.load_options = dataset, dict(load_options or {})
        self.input, self.label = input, label
        self.partition_by, self.transforms = partition_by, (transform, label_transform)
        if not isinstance(dataset, str | Path):
            self._rows("train")  # raises for unknown columns

    def prepare_data(self) -> None:
        """Download the data set if it has a name, and is not in the cache of ``datasets``."""
        if isinstance(self.dataset, str | Path):
            self._opened()

    def load(self, train: bool) -> Any:
        """Return the rows for training or for test."""
        if not train:
            return self._rows("test")
        self.val = self._rows("val")
        return self._rows("train")

    def _opened(self) -> Any:
        """Return the data set; a folder or name is opened once."""
        if not isinstance(self.dataset, str | Path):
            return self.dataset
        path = Path(self.dataset)
        is_saved = any((path / name).exists() for name in ("dataset_dict.json", "state.json"))
        try:
            if is_saved:
                self.dataset = _package().load_from_disk(str(path))
            else:
                self.dataset = _package().load_dataset(str(self.dataset), **self.load_options)
        except (OSError, ValueError, TypeError) as error:  # missing, offline, or a wrong option
            raise FederationError(
                f"the data set {str(self.dataset)!r} cannot be loaded ({type(error).__name__}:"
                f" {error}): pass the folder of a saved data set, or check the name and"
                " load_options"
            ) from error
        return self.dataset

    def _rows(self, part: str) -> Rows | None:
        """Return the rows for ``train``, ``val`` or ``test``; None if there are none."""
        data, names = self._opened(), {"train": "train", "val": "validation", "test": "test"}
        found = data if part == "train" else None
        if isinstance(data, Mapping):
            found = data.get(names[part])
            if found is None and part == "train":
                raise FederationError(
                    f"the data set has no split 'train', only {', '.join(map(repr, data))}: pass"
                    " the Dataset to train on"
                )
        if self._given.get(part) is not None:
            found = self._given[part]
        if found is None:
            return None
        if isinstance(found, _package().IterableDataset):
            raise FederationError(
                "clients hold rows by index, but the data set streams: load it without"
                " streaming=True"
            )
        check_map_style(found, part)
        return Rows(found, self.input, self.label, self.partition_by, *self.transforms)


def _package() -> Any:
    return imported("datasets", "FromHuggingFace", "hf")


class Rows(Dataset[Any]):
    """Rows of a data set of the package ``datasets`` as samples.

    Args:
        data: The data set.
        input: Column of the input, or several columns.
        label: Column of the label, ``auto`` or None; see :class:`FromHuggingFace`.
        key: Column of the clients; None if there is none.
        transform: Function of the input, or of the dictionary.
        label_transform: Function of the label.
    """

    def __init__(
        self,
        data: Any,
        input: str | Sequence[str],
        label: str | None,
        key: str | None,
        transform: Callable[[Any], Any] | None = None,
        label_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        package, self._all = _package(), data
        self.is_pair = isinstance(input, str)
        self.inputs = [input] if isinstance(input, str) else list(input)
        self.label = self._label_column([*self.inputs, *([key] if key else [])], label)
        self.key, self.transform, self.label_transform = key, transform, label_transform
        wanted = [*self.inputs, *([self.label] if self.label else [])]
        for name in [*wanted, *([key] if key else [])]:
            if name not in data.column_names:
                raise FederationError(
                    f"the data set has no column {name!r}: choose from {list(data.column_names)}"
                )
        self.wanted = list(dict.fromkeys(wanted))
        selected = data.select_columns(self.wanted) if data.format["type"] != "custom" else data
        is_raw = transform is not None or data.format["type"] is not None
        self.data = selected if is_raw else selected.with_format("torch")
        self._images = (
            set()
            if is_raw
            else {
                name for name in self.wanted if isinstance(data.features.get(name), package.Image)
            }
        )

    def _label_column(self, others: Sequence[str], label: str | None) -> str | None:
        """Return the column of the label; ``auto`` finds it by its type, or by its name."""
        if label != "auto":
            return label
        features = self._all.features or {}
        rest = {name: kind for name, kind in features.items() if name not in others}
        classes = [n for n, kind in rest.items() if isinstance(kind, _package().ClassLabel)]
        found: list[str] = classes or [name for name in ("label", "labels") if name in rest]
        if len(found) == 1:
            return found[0]
        which = "several columns are labels" if found else "no column is known as a label"
        raise FederationError(
            f"{which}: pass label, one of {found or list(rest)}, or None for no label"
        )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, index: list[int]) -> list[Any]:
        """Return samples, which are read together."""
        columns = self.data[index]
        return [
            self._sample({name: self._value(name, columns[name][i]) for name in self.wanted})
            for i in range(len(index))
        ]

    def _value(self, name: str, value: Any) -> Any:
        if name not in self._images:
            return value
        value = value if value.ndim == 3 else value[None]
        return value / torch.iinfo(value.dtype).max

    def _sample(self, row: dict[str, Any]) -> Any:
        if not self.is_pair:
            return row if self.transform is None else self.transform(row)
        x = row[self.inputs[0]]
        x = x if self.transform is None else self.transform(x)
        if self.label is None:
            return x
        y = row[self.label]
        return x, y if self.label_transform is None else self.label_transform(y)

    # --- columns as a whole -----------------------------------------------------------------------

    def _column(self, name: str) -> Any:
        """Return a column as an Arrow array."""
        table = self._all.with_format("arrow").select_columns([name])[:]
        return table.column(0).combine_chunks()

    @cached_property
    def targets(self) -> Tensor | None:
        """Label of each row, ``[n]``; None without labels, or if they are not single numbers."""
        if self.label is None:
            return None
        column = self._column(self.label)
        try:
            return torch.from_numpy(np.array(column.to_numpy(zero_copy_only=False)))
        except TypeError:  # texts or lists
            return None

    @cached_property
    def _coded(self) -> tuple[np.ndarray[Any, Any], list[str]]:
        """Return the client of each row as an index, and the names of the clients."""
        assert self.key is not None
        coded = self._column(self.key).dictionary_encode()
        if coded.null_count:
            raise FederationError(
                f"the column {self.key!r} has no value in {coded.null_count} rows: remove these"
                " rows"
            )
        values = coded.dictionary.to_pylist()
        order = sorted(range(len(values)), key=values.__getitem__)
        rank = np.empty(len(values), dtype=np.int64)
        rank[order] = np.arange(len(values))
        return rank[coded.indices.to_numpy()], [str(values[i]) for i in order]

    @property
    def keys(self) -> np.ndarray[Any, Any] | None:
        """Client of each row, as an index in ascending order of the column's values, ``[n]``."""
        return None if self.key is None else self._coded[0]

    @property
    def key_names(self) -> list[str] | None:
        """Names of the clients."""
        return None if self.key is None else self._coded[1]
