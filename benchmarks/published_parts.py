"""What the configurations of ``benchmarks/published`` name: data sets and networks of other papers.

Their tables show accuracies on the test set over rounds, so the validation samples of these data
modules are the test samples, and clients train on all training samples.
"""

from __future__ import annotations

import torch
from torch import nn

from lightning_fl.datamodules import CIFAR10, MNIST, FashionMNIST, InMemory
from lightning_fl.datamodules.images import TorchvisionDataModule


class Tested(TorchvisionDataModule):
    """Validate on the test samples."""

    def setup(self, stage: str | None = None) -> None:
        """Load the test samples first."""
        if self.val is None:
            self.val = self.load(train=False)
        super().setup(stage)


class TestedMNIST(Tested, MNIST):
    """MNIST."""


class TestedCIFAR10(Tested, CIFAR10):
    """CIFAR-10."""


class PlainMNIST(TestedMNIST):
    """MNIST with pixels from 0 to 1, not normalized, as in NIID-Bench."""

    mean, std = (0.0,), (1.0,)


class PlainFashionMNIST(Tested, FashionMNIST):
    """Fashion-MNIST with pixels from 0 to 1."""

    mean, std = (0.0,), (1.0,)


class PlainCIFAR10(TestedCIFAR10):
    """CIFAR-10 with pixels from 0 to 1."""

    mean, std = (0.0,) * 3, (1.0,) * 3


class LeNet5(nn.Sequential):
    """Convolutions with 6 and 16 channels, then 120 and 84 units, of NIID-Bench (Li et al., 2022).

    Args:
        channels: Channels of the images.
        size: Width of the images.
    """

    def __init__(self, channels: int = 1, size: int = 28) -> None:
        features = 16 * (((size - 4) // 2 - 4) // 2) ** 2
        super().__init__(
            *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(features, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()),
            nn.Linear(84, 10),
        )


class PflCNN(nn.Sequential):
    """The CNN of pfl-research for CIFAR-10, with dropout."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()),
            *(nn.Linear(64 * 14**2, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
        )


class PooledFashionMNIST(FashionMNIST):
    """All 70,000 samples of Fashion-MNIST, of which each client holds out its own test samples.

    Pixels are from -1 to 1, as in PFLlib.
    """

    mean, std = (0.5,), (0.5,)

    def load(self, train: bool) -> InMemory:
        """Return the training samples and the test samples as training samples."""
        if not train:
            return super().load(train=False)
        pairs = zip(
            super().load(train=True).tensors, super().load(train=False).tensors, strict=True
        )
        return InMemory(*map(torch.cat, pairs))


class PfllibCNN(nn.Sequential):
    """The CNN of PFLlib for images of one channel, 582,026 parameters."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)),
        )
