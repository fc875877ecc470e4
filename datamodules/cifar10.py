"""CIFAR-10."""

from __future__ import annotations

import codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fl.datamodules.images import TorchvisionDataModule
from lightning_fl.errors import FederationError
from lightning_fl.extras import imported
from lightning_fl.files import error_context

#: Functions that restore arrays in pickles of protocol 2 and protocol 5.
_RECONSTRUCT, _FROM_BUFFER = (np.zeros(1).__reduce_ex__(protocol)[0] for protocol in (2, 5))
#: Objects that pickled arrays may refer to, by their names in old and new versions of numpy.
ARRAYS = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.numeric", "_frombuffer"): _FROM_BUFFER,
}


class _Arrays(pickle.Unpickler):
    """Load pickles of arrays only. Other pickles could run arbitrary code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ARRAYS:
            raise pickle.UnpicklingError(
                f"only arrays are allowed, it contains {module}.{name}"[:200]
            )
        return ARRAYS[module, name]


class _Unchecked:
    """Read CIFAR-10 files without checksums, such as files made from JPEG images."""

    def __init__(self, official: Any, root: str, train: bool) -> None:
        files = official.train_list if train else official.test_list
        parts = [_read(Path(root, official.base_folder, name)) for name, _ in files]
        self.data = np.concatenate([x for x, _ in parts]).reshape(-1, 3, 32, 32)
        self.data = self.data.transpose(0, 2, 3, 1)
        self.targets = np.concatenate([y for _, y in parts])


def _read(path: Path) -> tuple[Any, Any]:
    """Return images, ``[n, 3072]``, and labels, ``[n]``."""
    what = f"{path} is not a CIFAR-10 file"
    with open(path, "rb") as file, error_context(what, Exception):  # damaged files raise many types
        entry = _Arrays(file, encoding="latin1").load()
        x, y = np.asarray(entry["data"]), np.asarray(entry["labels"])
        is_labels = y.ndim == 1 and set(y.tolist()) <= set(range(10))
        if not is_labels or x.dtype != np.uint8 or x.shape != (len(y), 3072):
            raise FederationError(
                f"it contains {x.dtype} images of shape {x.shape} and labels of shape {y.shape}"
            )
    return x, y


class CIFAR10(TorchvisionDataModule):
    """CIFAR-10: 50,000 training and 10,000 test images in ten classes, ``[3, 32, 32]``."""

    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    flips = True

    def open(self, train: bool, download: bool) -> Any:
        """Return the data set. Checksums are verified only for a download."""
        official = imported("torchvision.datasets", "CIFAR10", "vision").CIFAR10
        if download:
            return official(self.root, train, download=True)
        return _Unchecked(official, self.root, train)
