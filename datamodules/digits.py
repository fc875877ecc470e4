"""Scikit-learn's digits, the default data set, which needs no download."""

from __future__ import annotations

import torch

from lightning_fl.datamodules.images import ImageDataModule
from lightning_fl.datamodules.splits import hold_out
from lightning_fl.datamodules.storage import InMemory
from lightning_fl.extras import imported
from lightning_fl.functional.randomness import RandomStream, generator


class Digits(ImageDataModule):
    """1,797 handwritten digits, ``[1, 8, 8]``, which are part of scikit-learn.

    There is no official test set. This class uses a fixed, stratified test set of 359 samples.
    Requires scikit-learn: ``pip install "lightning_fl[sklearn]"``. Options are those of
    :class:`ImageDataModule`.

    Raises:
        FederationError: If an option is out of range.

    Example:
        >>> data = Digits(num_clients=5)
        >>> data.setup("fit")
        >>> data.num_samples.sum(), len(data.val)
        (tensor(1294), 144)
    """

    white = 16.0
    mean, std = (0.3053,), (0.3760,)
    crop_padding = 1

    def load(self, train: bool) -> InMemory:
        """Return the training or the test samples."""
        digits = imported("sklearn.datasets", "Digits", "sklearn").load_digits()
        images = torch.as_tensor(digits.images).to(torch.uint8)[:, None]
        labels = torch.as_tensor(digits.target)
        kept, held = hold_out(labels, 359, generator(0, RandomStream.HOLD_OUT))
        index = kept if train else held
        return InMemory(images[index], labels[index])
