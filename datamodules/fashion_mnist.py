"""Fashion-MNIST."""

from __future__ import annotations

from typing import Any

from lightning_fl.datamodules.images import TorchvisionDataModule
from lightning_fl.extras import imported


class FashionMNIST(TorchvisionDataModule):
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothing, ``[1, 28, 28]``."""

    mean, std = (0.2860,), (0.3530,)
    flips = True

    def open(self, train: bool, download: bool) -> Any:
        """Return torchvision's data set."""
        datasets = imported("torchvision.datasets", "FashionMNIST", "vision")
        return datasets.FashionMNIST(self.root, train, download=download)
