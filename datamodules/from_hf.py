"""Data sets of the Hugging Face package ``datasets``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fl.datamodules.federated import FederatedDataModule
from lightning_fl.datamodules.storage import check_absent, check_map_style
from lightning_fl.extras import imported
from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.partition import Natural, Partition
from lightning_fl.types import FederationError


class FromHuggingFace(FederatedDataModule):
    """Split a data set of the Hugging Face package ``datasets`` over clients.

    Rows stay on disk (memory-mapped), and only those of a batch are read and decoded. A sample is
    ``(input, label)`` if ``input`` names one column, and a dictionary of columns if it names
    several. Without ``transform``, numbers become tensors, and images become tensors ``[channels,
    height, width]`` with values from 0 to 1; texts stay strings. A label that is an image, such as
    a mask, becomes a tensor of its values, ``[height, width]``. A format or transform that the data
    set has itself (``set_format``, ``set_transform``) is kept.

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
        label_transform: Function of the label as ``datasets`` decodes it, for a single input
            column. The partition uses the labels that it returns.
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
            for part in ("train", "val", "test"):
                self._rows(part)  # raises for unknown columns

    def prepare_data(self) -> None:
        """Download the data set if it has a name, and is not in the cache of ``datasets``."""
        if isinstance(self.dataset, str | Path):
            self._opened()

    def load(self, train: bool) -> Any:
        """Return the rows for training or for test."""
        if not train:
            return self._rows("test")
        self._warn_of_unused()
        self.val = self._rows("val")
        return self._rows("train")

    def _warn_of_unused(self) -> None:
        """Warn of splits of a ``DatasetDict`` that are neither known by name nor given."""
        data = self._opened()
        if not isinstance(data, Mapping):
            return
        given = {id(part) for part in self._given.values()}
        names = [n for n in data if n not in SPLITS.values() and id(data[n]) not in given]
        if names:
            rank_zero_warn(
                f"the data set has splits that are not used: {', '.join(map(repr, names))}. To"
                f" validate or test on one, pass it as val or test"
            )

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
        data = self._opened()
        found = data if part == "train" else None
        if isinstance(data, Mapping):
            found = data.get(SPLITS[part])
            if found is None and part == "train":
                raise FederationError(
                    f"the data set has no split 'train', only {', '.join(map(repr, data))}: pass"
                    " the Dataset to train on"
                )
        if self._given.get(part) is not None:
            found = self._given[part]
        if found is None:
            return None
        _check_rows(found, part)
        label, key = self.label, self.partition_by
        if part != "train":  # the server's rows belong to no client
            label, key = getattr(self._rows("train"), "label", None), None
        return Rows(found, self.input, label, key, *self.transforms)


def _check_rows(data: Any, part: str) -> None:
    """Refuse what is no ``Dataset`` of the package, or has no rows."""
    package = _package()
    if isinstance(data, package.IterableDataset):
        raise FederationError(
            "clients hold rows by index, but the data set streams: load it without streaming=True"
        )
    if not isinstance(data, package.Dataset):
        use = "FederatedDataModule(train=...)" if part == "train" else "Dataset.from_generator(...)"
        raise FederationError(
            f"{part} must be a Dataset of the package datasets, got {type(data).__name__}: use"
            f" {use} for other samples"
        )
    check_map_style(data, part)


#: Names of the splits of a ``DatasetDict``.
SPLITS = {"train": "train", "val": "validation", "test": "test"}


def _package() -> Any:
    return imported("datasets", "FromHuggingFace", "hf")


def _columns(data: Any) -> list[str]:
    """Return the columns of a row, which a transform of the data set may have made."""
    if data.format["type"] == "custom" and len(data):
        with seeded_rng(0):
            return list(data[0])
    return list(data.format["columns"])


def _check_columns(names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse unknown columns."""
    if unknown := [name for name in names if name not in known]:
        raise FederationError(
            f"the data set has no column {unknown[0]!r}: choose from {list(known)}"
        )


def pixels(image: Any) -> Tensor:
    """Return the tensor of a PIL image, ``[channels, height, width]``, from 0 to 1.

    Raises:
        FederationError: If there is no image, or its range of values is unknown.

    Example:
        >>> from PIL import Image
        >>> pixels(Image.new("L", (2, 1), 255))
        tensor([[[1., 1.]]])
    """
    if image is None:
        raise FederationError("a row has no image: remove it, for example with filter")
    if image.mode.startswith("I;16"):
        return torch.from_numpy(np.array(image).astype(np.float32))[None] / 65535
    if image.mode in ("I", "F"):
        raise FederationError(
            f"an image of mode {image.mode!r} has no known range of values: pass transform, a"
            " function of the image that returns a tensor"
        )
    if image.mode not in ("L", "LA", "RGB", "RGBA"):  # such as a palette
        image = image.convert("L" if image.mode == "1" else "RGB")
    values = torch.from_numpy(np.array(image))
    return (values[None] if values.ndim == 2 else values.permute(2, 0, 1)) / 255


def mask(image: Any) -> Tensor:
    """Return the values of a PIL image as they are, ``[height, width]``, such as a class per pixel.

    Several channels come first, ``[channels, height, width]``.

    Example:
        >>> from PIL import Image
        >>> mask(Image.new("L", (2, 1), 3))
        tensor([[3, 3]])
    """
    values = np.array(image)
    whole = torch.from_numpy(values if values.dtype.kind == "f" else values.astype(np.int64))
    return whole if whole.ndim == 2 else whole.permute(2, 0, 1)


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
        self._all = data
        self.is_pair = isinstance(input, str)
        self.inputs = [input] if isinstance(input, str) else list(input)
        self._columns = _columns(data)
        self.label = self._label_column([*self.inputs, *([key] if key else [])], label)
        self.key, self.transform, self.label_transform = key, transform, label_transform
        self.wanted = list(dict.fromkeys([*self.inputs, *([self.label] if self.label else [])]))
        _check_columns(self.wanted, self._columns)
        _check_columns([key] if key else [], data.column_names)
        #: Columns of a sample with the data set that reads them, and functions of their values.
        self._views: list[tuple[list[str], Any]] = [(self.wanted, data)]
        self._changes: dict[str, Callable[[Any], Any]] = {}
        if data.format["type"] is None:
            self._decode()
        elif data.format["type"] != "custom":
            self._views = [(self.wanted, data.select_columns(self.wanted))]

    def _decode(self) -> None:
        """Choose how columns are read if the data set has no format of its own.

        Transforms get what the package decodes. Other values become tensors.
        """
        features, kind = self._all.features, _package().Image
        images = {name for name in self.wanted if isinstance(features.get(name), kind)}
        to_transforms = {self.label} if self.label_transform is not None else set()
        if self.transform is not None:
            to_transforms |= set(self.inputs if self.is_pair else self.wanted)
        self._changes = {
            name: pixels if name in self.inputs else mask for name in images - to_transforms
        }
        raw = [name for name in self.wanted if name in images | to_transforms]
        rest = [name for name in self.wanted if name not in raw]
        self._views = [
            (names, self._all.select_columns(names).with_format(format))
            for names, format in ((raw, None), (rest, "torch"))
            if names
        ]

    def _label_column(self, others: Sequence[str], label: str | None) -> str | None:
        """Return the column of the label; ``auto`` finds it by its type, or by its name."""
        if label != "auto":
            return label
        features = self._all.features or {}
        rest = {name: features.get(name) for name in self._columns if name not in others}
        classes = [n for n, kind in rest.items() if isinstance(kind, _package().ClassLabel)]
        found: list[str] = classes or [name for name in ("label", "labels") if name in rest]
        if len(found) == 1:
            return found[0]
        which = "several columns are labels" if found else "no column is known as a label"
        raise FederationError(
            f"{which}: pass label, one of {found or list(rest)}, or None for no label"
        )

    @property
    def remedies(self) -> dict[str, str]:
        """What to do if a rule lacks labels or keys."""
        labels = (
            "encode the column with class_encode_column of the data set, or pass label_transform"
            " (such as Relabel)"
        )
        name = self.label
        is_column = name is not None and name in self._all.column_names
        if is_column and (missing := self._column(str(name)).null_count):
            labels = f"the column {name!r} has no value in {missing} rows: remove these rows"
        return {
            "labels": labels,
            "keys": "pass partition_by, the column with the client of each row",
        }

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, index: list[int]) -> list[Any]:
        """Return samples, which are read together."""
        columns: dict[str, Any] = {}
        for names, view in self._views:
            read = view[index]
            columns |= {name: read[name] for name in names}
        return [
            self._sample({name: self._value(name, columns[name][i]) for name in self.wanted})
            for i in range(len(index))
        ]

    def _value(self, name: str, value: Any) -> Any:
        return self._changes[name](value) if name in self._changes else value

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
        """Label of each row as in a sample, ``[n]``; None if labels are not single numbers."""
        if self.label is None or self.label not in self._all.column_names:
            return None
        column = self._column(self.label)
        try:
            if self.label_transform is None:
                if column.null_count:
                    return None
                return torch.from_numpy(np.array(column.to_numpy(zero_copy_only=False)))
            coded = column.dictionary_encode()
            values = [self.label_transform(value) for value in coded.dictionary.to_pylist()]
            return torch.as_tensor(values)[torch.tensor(coded.indices.to_pylist())]
        except (TypeError, ValueError, NotImplementedError):  # texts, lists or missing labels
            return None

    @cached_property
    def _coded(self) -> tuple[np.ndarray[Any, Any], list[str]]:
        """Return the client of each row as an index, and the names of the clients."""
        assert self.key is not None
        try:
            coded = self._column(self.key).dictionary_encode()
        except NotImplementedError as error:
            raise FederationError(
                f"the column {self.key!r} must have a name or number for each client, got values of"
                f" type {self._all.features[self.key]}"
            ) from error
        values = coded.dictionary.to_pylist()
        nan = [code for code, value in enumerate(values) if value != value]
        if missing := coded.null_count + int(np.isin(coded.indices.to_numpy(False), nan).sum()):
            raise FederationError(
                f"the column {self.key!r} has no value in {missing} rows: remove these rows"
            )
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
