"""MNIST."""

from __future__ import annotations

from typing import Any

from lightning_fl.datamodules.images import TorchvisionDataModule
from lightning_fl.extras import imported


class MNIST(TorchvisionDataModule):
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, ``[1, 28, 28]``."""

    mean, std = (0.1307,), (0.3081,)

    def open(self, train: bool, download: bool) -> Any:
        """Return torchvision's data set."""
        datasets = imported("torchvision.datasets", "MNIST", "vision")
        return datasets.MNIST(self.root, train, download=download)
