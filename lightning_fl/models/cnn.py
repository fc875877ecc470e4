"""Convolutional networks used in the papers, in the order convolution, pooling, ReLU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_fl.options import check_flag, check_integer, check_sizes


class _ConvNet(nn.Sequential):
    """Blocks of convolutions, 2x2 pooling and ReLU, then fully connected layers.

    Args:
        blocks: Channels of each convolution of each block.
        head: Widths of the fully connected layers.
        in_channels: Channels of the images.
        batch_norm: Whether each convolution is followed by a BatchNorm layer.
    """

    #: Width of images and kernels, and padding of the convolutions.
    image: ClassVar[int]
    kernel: ClassVar[int]
    padding: ClassVar[int] = 0

    def __init__(
        self,
        blocks: Sequence[Sequence[int]],
        head: Sequence[int],
        in_channels: int = 1,
        batch_norm: bool = False,
    ) -> None:
        check_flag("batch_norm", batch_norm)
        layers: list[nn.Module] = []
        channels = in_channels
        for block in blocks:
            for i, width in enumerate(block):
                layers += [nn.ReLU()] if i else []
                layers.append(nn.Conv2d(channels, width, self.kernel, padding=self.padding))
                layers += [nn.BatchNorm2d(width)] if batch_norm else []
                channels = width
            layers += [nn.MaxPool2d(2), nn.ReLU()]
        layers.append(nn.Flatten())
        x = torch.zeros(1, in_channels, self.image, self.image)
        with torch.no_grad():  # in evaluation mode, which does not change BatchNorm statistics
            features = nn.Sequential(*layers).eval()(x).shape[1]
        for width in head[:-1]:
            layers += [nn.Linear(features, width), nn.ReLU()]
            features = width
        super().__init__(*layers, nn.Linear(features, head[-1]))
        self.train()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, ``[batch, classes]``."""
        return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]  # torch's own annotations


class CifarCNN(_ConvNet):
    """5x5 convolutions with 32 and 64 channels, and 1024 hidden units (Mostafa, 2019, section 5).

    Args:
        width: Channels of the first convolution; the second convolution has twice as many.
        hidden: Units of the fully connected layer.
        num_classes: Number of classes.
        in_channels: Channels of the 32x32 inputs.
        batch_norm: Whether each convolution is followed by a BatchNorm layer.

    Raises:
        FederationError: If a size is not positive.

    Example:
        >>> CifarCNN(width=4, hidden=8)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    image, kernel, padding = 32, 5, 2

    def __init__(
        self,
        width: int = 32,
        hidden: int = 1024,
        num_classes: int = 10,
        in_channels: int = 3,
        batch_norm: bool = False,
    ) -> None:
        check_sizes(width=width, hidden=hidden, num_classes=num_classes, in_channels=in_channels)
        super().__init__([[width], [2 * width]], [hidden, num_classes], in_channels, batch_norm)


class KeywordCNN(_ConvNet):
    """Four 3x3 convolutions with 64 channels, pooled after each pair (Mostafa, 2019, section 4).

    A fully connected layer of 1024 units follows. Inputs are 32x32 log-mel spectrograms.

    Args:
        width: Channels of each convolution.
        hidden: Units of the fully connected layer.
        num_classes: Number of classes.
        in_channels: Channels of the 32x32 inputs.

    Raises:
        FederationError: If a size is not positive.

    Example:
        >>> KeywordCNN(width=4, hidden=8)(torch.zeros(2, 1, 32, 32)).shape
        torch.Size([2, 10])
    """

    image, kernel, padding = 32, 3, 1

    def __init__(
        self, width: int = 64, hidden: int = 1024, num_classes: int = 10, in_channels: int = 1
    ) -> None:
        check_sizes(width=width, hidden=hidden, num_classes=num_classes, in_channels=in_channels)
        super().__init__([[width, width]] * 2, [hidden, num_classes], in_channels)


class FashionCNN(_ConvNet):
    """Unpadded 3x3 convolutions with 32 and 64 channels, 28x28 inputs (Ben Mansour et al., 2022).

    The 64 x 5 x 5 = 1600 features after two poolings are connected directly to the classes.

    Args:
        width: Channels of the first convolution; the second convolution has twice as many.
        hidden: Units of an additional fully connected layer; None for no such layer.
        num_classes: Number of classes.
        batch_norm: Whether each convolution is followed by a BatchNorm layer.

    Raises:
        FederationError: If a size is not positive.

    Example:
        >>> FashionCNN()[-1]
        Linear(in_features=1600, out_features=10, bias=True)
    """

    image, kernel = 28, 3

    def __init__(
        self,
        width: int = 32,
        hidden: int | None = None,
        num_classes: int = 10,
        batch_norm: bool = False,
    ) -> None:
        check_sizes(width=width, num_classes=num_classes)
        check_integer("hidden", hidden, min=1, optional=True)
        head = [num_classes] if hidden is None else [hidden, num_classes]
        super().__init__([[width], [2 * width]], head, batch_norm=batch_norm)


class LeNet(_ConvNet):
    """Unpadded 5x5 convolutions with 20 and 50 channels, 28x28 inputs, and 500 hidden units.

    This is the "LeNet" of papers on neural matching (Wang et al., 2020), after LeCun et al. (1998).

    Args:
        width: Channels of the first convolution; the second convolution has 2.5 times as many.
        hidden: Units of the fully connected layer.
        num_classes: Number of classes.
        in_channels: Channels of the inputs.

    Raises:
        FederationError: If a size is not positive.

    Example:
        >>> LeNet()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    image, kernel = 28, 5

    def __init__(
        self, width: int = 20, hidden: int = 500, num_classes: int = 10, in_channels: int = 1
    ) -> None:
        check_sizes(width=width, hidden=hidden, num_classes=num_classes, in_channels=in_channels)
        super().__init__([[width], [5 * width // 2]], [hidden, num_classes], in_channels)


class FemnistCNN(_ConvNet):
    """5x5 convolutions with 32 and 64 channels, and 2048 hidden units (LEAF; Caldas et al., 2018).

    Args:
        width: Channels of the first convolution; the second convolution has twice as many.
        hidden: Units of the fully connected layer.
        num_classes: Number of classes: 62 digits and letters, or 10 digits.

    Raises:
        FederationError: If a size is not positive.

    Example:
        >>> FemnistCNN()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 62])
    """

    image, kernel, padding = 28, 5, 2

    def __init__(self, width: int = 32, hidden: int = 2048, num_classes: int = 62) -> None:
        check_sizes(width=width, hidden=hidden, num_classes=num_classes)
        super().__init__([[width], [2 * width]], [hidden, num_classes])
