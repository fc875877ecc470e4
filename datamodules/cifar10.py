"""CIFAR-10."""

from __future__ import annotations

from typing import Any

import torchvision

from lightning_fl.datamodules.images import TorchvisionDataModule


class _Unchecked(torchvision.datasets.CIFAR10):  # type: ignore[misc]  # it carries no types
    """Files with other checksums than the canonical ones, such as JPEG-sourced pixels."""

    train_list = [[name, None] for name, _ in torchvision.datasets.CIFAR10.train_list]  # noqa: RUF012
    test_list = [[name, None] for name, _ in torchvision.datasets.CIFAR10.test_list]  # noqa: RUF012
    meta = torchvision.datasets.CIFAR10.meta | {"md5": None}


class CIFAR10(TorchvisionDataModule):
    """CIFAR-10: 50,000 + 10,000 pictures in ten classes, ``[3, 32, 32]``."""

    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def open(self, train: bool, download: bool) -> Any:
        """Return torchvision's data set; what was downloaded is checked, what is there is read."""
        kind = torchvision.datasets.CIFAR10 if download else _Unchecked
        return kind(self.root, train, download=download)
