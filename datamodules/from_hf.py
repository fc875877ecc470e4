"""Data sets of the Hugging Face package ``datasets``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fl.datamodules.federated import FederatedDataModule
from lightning_fl.datamodules.inputs import pixels
from lightning_fl.datamodules.storage import check_map_style
from lightning_fl.errors import FederationError
from lightning_fl.extras import imported
from lightning_fl.files import error_context
from lightning_fl.partition import Natural, Partition

#: Names of the splits of a ``DatasetDict``.
SPLITS = {"train": "train", "val": "validation", "test": "test"}


class FromHuggingFace(FederatedDataModule):
    """Split a data set of the Hugging Face package ``datasets`` over clients.

    Rows stay on disk (memory-mapped), and only those of a batch are read and decoded. A sample is
    ``(input, label)`` if ``input`` names one column, and a dictionary of columns if it names
    several. Numbers become tensors, texts stay strings, and an image of the input in 8-bit gray or
    RGB becomes a tensor ``[channels, height, width]`` with values from 0 to 1. Other images need
    ``transform``, and a label that is an image, such as a mask, needs ``label_transform``. A format
    or transform that the data set has itself (``set_format``, ``set_transform``) is kept.

    Requires the package datasets: ``pip install "lightning_fl[hf]"``.

    Args:
        dataset: A ``Dataset``, a ``DatasetDict``, the folder of either (``save_to_disk``), or a
            name for ``datasets.load_dataset``. A ``DatasetDict`` provides the samples for training,
            for validation and for test under the names ``train``, ``validation`` and ``test``.
        input: Column of the model's input, or several columns.
        label: Column of the label; None means no label.
        partition_by: Column with the client of each row, such as the writer. Each value is a
            client, unless ``num_clients`` is smaller. None leaves the split to ``partition``.
        transform: Function of the input as ``datasets`` decodes it (a PIL image, text, list); with
            several input columns, of the dictionary with them and the (transformed) label.
        label_transform: Function of the label as ``datasets`` decodes it. The partition uses the
            labels that it returns.
        partition: Rule of the split; None means :class:`~lightning_fl.partition.Natural` with
            ``partition_by``, otherwise :class:`~lightning_fl.partition.IID`.
        num_clients: Number of clients; None if the rule determines it.
        val: The server's validation rows, a ``Dataset``; None means those of a ``DatasetDict``, or
            rows that are held out.
        test: Test rows, a ``Dataset``; None means those of a ``DatasetDict``.
        load_options: Options of ``load_dataset``, such as ``{"name": "plain_text"}``.
        options: Further options of :class:`FederatedDataModule`.

    Raises:
        FederationError: If the package is missing, or the data set streams or cannot be loaded.
    """

    def __init__(
        self,
        dataset: Any,
        input: str | Sequence[str] = "image",
        label: str | None = "label",
        partition_by: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        label_transform: Callable[[Any], Any] | None = None,
        partition: Partition | None = None,
        num_clients: int | None = None,
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
                    f"{type(partition).__name__} does not read the column partition_by: leave out"
                    " one of them, or use Natural"
                )
        self._given = {"train": None, "val": val, "test": test}
        super().__init__(
            train=None, val=None, test=None, partition=partition, num_clients=num_clients, **options
        )
        self.dataset, self.load_options = dataset, dict(load_options or {})
        self.input, self.label = input, label
        self.partition_by, self.transforms = partition_by, (transform, label_transform)

    def prepare_data(self) -> None:
        """Download the data set if it has a name, and is not in the cache of ``datasets``."""
        self._opened()

    def load(self, train: bool) -> Any:
        """Return the rows for training or for test."""
        if not train:
            return self._rows("test")
        if self.test is None:  # its classes are compared
            self.test = self._rows("test")
        self.val = self._rows("val")
        return self._rows("train")

    def _opened(self) -> Any:
        """Return the data set; a folder or name is opened once."""
        if isinstance(self.dataset, str | Path):
            name, package = str(self.dataset), _package()
            files = (Path(name, file) for file in ("dataset_dict.json", "state.json"))
            with error_context(
                f"the data set {name!r} cannot be loaded", OSError, ValueError, TypeError
            ):
                if any(file.exists() for file in files):
                    self.dataset = package.load_from_disk(name)
                else:
                    self.dataset = package.load_dataset(name, **self.load_options)
        return self.dataset

    def _rows(self, part: str) -> Rows | None:
        """Return the rows for ``train``, ``val`` or ``test``; None if there are none."""
        data = self._opened()
        splits = data if isinstance(data, Mapping) else {"train": data}
        rows = splits.get(SPLITS[part]) if self._given[part] is None else self._given[part]
        if rows is None and part != "train":
            return None
        if not isinstance(rows, _package().Dataset):
            raise FederationError(
                f"{part} must be a Dataset of the package datasets that does not stream, got"
                f" {type(rows).__name__} in a data set with the splits {list(splits)}"
            )
        check_map_style(rows, part)
        key = self.partition_by if part == "train" else None  # others belong to no client
        return Rows(rows, self.input, self.label, key, *self.transforms)


def _package() -> Any:
    return imported("datasets", "FromHuggingFace", "hf")


def _pixels(image: Any) -> Tensor:
    """Return the tensor of a PIL image, ``[channels, height, width]``, from 0 to 1."""
    if image is None or image.mode not in ("L", "RGB"):
        got = "no image" if image is None else f"the mode {image.mode}"
        raise FederationError(
            f"images must be 8-bit gray or RGB, got {got}: pass transform, a function of the image"
            " that returns a tensor, or remove rows without an image"
        )
    return pixels(image)


class Rows(Dataset[Any]):
    """Rows of a data set of the package ``datasets`` as samples.

    Args:
        data: The data set.
        input: Column of the input, or several columns.
        label: Column of the label, or None.
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
        self._all, self.label, self.key = data, label, key
        self.is_pair = isinstance(input, str)
        self.inputs = [input] if isinstance(input, str) else list(input)
        self.transform, self.label_transform = transform, label_transform
        self.wanted = list(dict.fromkeys([*self.inputs, *([label] if label else [])]))
        kind = data.format["type"]
        #: Input columns of images that become tensors here.
        self._images: set[str] = set()
        #: Data set that reads the columns of a sample.
        self._view = data if kind == "custom" else data.select_columns(self.wanted)
        if kind is None:
            self._decode()

    def _decode(self) -> None:
        """Read what functions take as the package decodes it, and other values as tensors."""
        given = {self.label} if self.label_transform is not None else set()
        if self.transform is not None:
            given |= set(self.inputs if self.is_pair else self.wanted)
        features, image = self._all.features, _package().Image
        images = {name for name in self.wanted if isinstance(features[name], image)}
        self._images = images.intersection(self.inputs) - given
        tensors = [name for name in self.wanted if name not in images | given]
        self._view = self._view.with_format("torch", tensors, output_all_columns=True)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, index: list[int]) -> list[Any]:
        """Return samples, which are read together."""
        columns = self._view[index]
        for name in self._images:
            columns[name] = [_pixels(image) for image in columns[name]]
        rows = range(len(index))
        return [self._sample({name: columns[name][i] for name in self.wanted}) for i in rows]

    def _sample(self, row: dict[str, Any]) -> Any:
        if self.label is not None and self.label_transform is not None:
            row[self.label] = self.label_transform(row[self.label])
        x = row[self.inputs[0]] if self.is_pair else row
        x = x if self.transform is None else self.transform(x)
        return (x, row[self.label]) if self.is_pair and self.label is not None else x

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
        if column.null_count:
            return None
        try:
            coded = column.dictionary_encode()
            values = coded.dictionary.to_pylist()
            if self.label_transform is not None:
                values = [self.label_transform(value) for value in values]
            return torch.as_tensor(values)[torch.tensor(coded.indices.to_pylist())]
        except (TypeError, ValueError, NotImplementedError):  # texts or lists
            return None

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes of a ``ClassLabel``; None if labels are no such classes."""
        feature = self._all.features.get(self.label) if self.label_transform is None else None
        return getattr(feature, "names", None)

    @property
    def keys(self) -> list[Any] | None:
        """Client of each row, ``[n]``."""
        return None if self.key is None else self._column(self.key).to_pylist()
