"""Base classes of image data sets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fl.datamodules.batches import Draws
from lightning_fl.datamodules.federated import FederatedDataModule
from lightning_fl.datamodules.loader import module_dtype
from lightning_fl.datamodules.storage import InMemory, not_found
from lightning_fl.files import data_root
from lightning_fl.functional.augmentation import choices, crop_and_flip
from lightning_fl.options import check_flag, check_integer, check_that


class ImageDataModule(FederatedDataModule):
    """Keep images in memory as bytes, ``[n, channels, height, width]``; normalize on the device.

    Subclasses define the files, the number of classes, and the mean and standard deviation.

    Args:
        client_rotations: Rotations, in degrees and multiples of 90, that make groups of clients
            with different feature distributions. The images of client ``i`` are rotated by
            ``client_rotations[i % len(client_rotations)]``. Validation and test images are rotated
            by each of the angles in turn.
        augment: Augment the training images on the device: random crops with a black border of
            :attr:`crop_padding` pixels and, if :attr:`flips`, a horizontal flip with probability
            1/2, drawn for each sample in each local step.
        options: Options of :class:`FederatedDataModule`, such as ``partition``, ``num_clients`` and
            ``batch_size``.

    Raises:
        FederationError: If an option is out of range, or the rule cannot split the data.
    """

    num_classes: ClassVar[int] = 10
    #: Pixel value of white.
    white: ClassVar[float] = 255.0
    #: Mean and standard deviation of each channel over the training set, in units of ``white``.
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    #: Width of the border of crops, in pixels.
    crop_padding: ClassVar[int] = 4
    #: Whether a mirrored image keeps its label.
    flips: ClassVar[bool] = False

    def __init__(
        self, *, client_rotations: Sequence[int] = (), augment: bool = False, **options: Any
    ) -> None:
        for angle in client_rotations:
            check_integer("a value of client_rotations", angle)
            check_that("client_rotations", angle, angle % 90 == 0, "multiples of 90 degrees")
        self.client_rotations = list(client_rotations)
        self.draws = 3 if check_flag("augment", augment) else 0
        super().__init__(train=None, val=None, test=None, **options)

    def setup(self, stage: str | None = None) -> None:
        """Load and split the data, and rotate each client's images, once."""
        is_split, is_tested = bool(self.parts), self.test is not None
        super().setup(stage)
        if not self.client_rotations:
            return
        if self.parts and not is_split:
            self._turn(self.train, self.split.clients)
            self._turn(self.val, self._dealt(self.val))
        if not is_tested:
            self._turn(self.test, self._dealt(self.test))

    def _dealt(self, data: Any) -> list[Tensor]:
        """Assign samples to the angles in turn."""
        n, each = 0 if data is None else len(data), len(self.client_rotations)
        return [torch.arange(n)[i::each] for i in range(each)]

    def _turn(self, data: Any, groups: Sequence[Tensor]) -> None:
        for i, group in enumerate(groups):
            turns = self.client_rotations[i % len(self.client_rotations)] // 90
            if len(group) and turns % 4:
                images = data.tensors[0]
                images[group] = images[group].rot90(turns, (2, 3))

    @property
    def checksum(self) -> str:
        """Checksum of the split and the client_rotations."""
        turned = f"-turned-{self.client_rotations}" if self.client_rotations else ""
        return super().checksum + turned

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Augment training images, and normalize to mean 0 and standard deviation 1.

        Images get the module's dtype.
        """
        x, *rest = batch
        if rest and isinstance(rest[-1], Draws):
            x = self._augmented(x, rest.pop().uniform())
        dtype = module_dtype(self.trainer)
        shift, scale = (_scaled(v, self.white, dtype, x.device) for v in (self.mean, self.std))
        return x.to(dtype).sub_(shift).div_(scale), *rest

    def _augmented(self, x: Tensor, uniform: Tensor) -> Tensor:
        """Crop and flip images by the random numbers of each, ``[n, 3]``."""
        top, left = choices(uniform[:, :2], 2 * self.crop_padding + 1).unbind(1)
        is_flipped = (uniform[:, 2] < 0.5) & self.flips
        return crop_and_flip(x, top, left, is_flipped, self.crop_padding)


@cache  # a new tensor would cost a transfer to the device in each step
def _scaled(
    values: tuple[float, ...], white: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).mul_(white)[:, None, None]


class TorchvisionDataModule(ImageDataModule, ABC):
    """Base class of torchvision data sets, read from ``root`` in torchvision's layout.

    The test set is the official one. Requires torchvision: ``pip install "lightning_fl[vision]"``.

    Args:
        root: Folder of data sets. None means the folder in the environment variable
            ``LIGHTNING_FL_DATA``, or ``data`` if it is not set.
        download: Download the files into ``root`` if they are missing.
        options: Options of :class:`ImageDataModule`.

    Raises:
        FederationError: If the files are missing and ``download`` is off, or an option is out of
            range.
    """

    def __init__(self, root: str | None = None, download: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.root, self.download = data_root(root), check_flag("download", download)

    @abstractmethod
    def open(self, train: bool, download: bool) -> Any:
        """Return torchvision's data set."""

    def prepare_data(self) -> None:
        """Download the files if ``download`` is set."""
        if self.download:
            self.open(train=True, download=True)
            self.open(train=False, download=True)

    def load(self, train: bool) -> InMemory:
        """Read images and labels into memory."""
        try:
            data = self.open(train, download=False)
        except (RuntimeError, FileNotFoundError) as error:
            raise not_found(self, f"root={self.root!r}") from error
        images = torch.as_tensor(data.data)
        images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
        return InMemory(images, torch.as_tensor(data.targets))
