"""CIFAR-10."""

from __future__ import annotations

import codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torchvision

from lightning_fl.datamodules.images import TorchvisionDataModule
from lightning_fl.types import FederationError

#: How pickles make arrays, old ones and new ones.
_RECONSTRUCT, _FROM_BUFFER = (np.zeros(1).__reduce_ex__(protocol)[0] for protocol in (2, 5))
#: What an array is made of, by the names that old and new versions of numpy give it.
ARRAYS = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.numeric", "_frombuffer"): _FROM_BUFFER,
}


class _Arrays(pickle.Unpickler):
    """Pickles that hold nothing but arrays: others could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ARRAYS:
            raise pickle.UnpicklingError(f"it holds more than arrays: {module}.{name}"[:200])
        return ARRAYS[module, name]


class _Unchecked:
    """Files with other checksums than the canonical ones, such as JPEG-sourced pixels."""

    def __init__(self, root: str, train: bool) -> None:
        official = torchvision.datasets.CIFAR10
        files = official.train_list if train else official.test_list
        parts = [_read(Path(root, official.base_folder, name)) for name, _ in files]
        self.data = np.concatenate([x for x, _ in parts]).reshape(-1, 3, 32, 32)
        self.data = self.data.transpose(0, 2, 3, 1)
        self.targets = np.concatenate([y for _, y in parts])


def _read(path: Path) -> tuple[Any, Any]:
    """Return pictures, ``[n, 3072]``, and labels, ``[n]``."""
    with open(path, "rb") as file:
        try:
            entry = _Arrays(file, encoding="latin1").load()
            x, y = np.asarray(entry["data"]), np.asarray(entry["labels"])
        except Exception as error:  # of many kinds, where a file is damaged
            raise FederationError(f"{path} is not of CIFAR-10: {error}") from error
    is_labels = y.ndim == 1 and set(y.tolist()) <= set(range(10))
    if not is_labels or x.dtype != np.uint8 or x.shape != (len(y), 3072):
        raise FederationError(
            f"{path} is not of CIFAR-10: it has {x.dtype} of shape {x.shape}, labels of {y.shape}"
        )
    return x, y


class CIFAR10(TorchvisionDataModule):
    """CIFAR-10: 50,000 + 10,000 pictures in ten classes, ``[3, 32, 32]``."""

    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def open(self, train: bool, download: bool) -> Any:
        """Return torchvision's data set; what was downloaded is checked, what is there is read."""
        if download:
            return torchvision.datasets.CIFAR10(self.root, train, download=True)
        return _Unchecked(self.root, train)
