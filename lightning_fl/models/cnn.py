"""Convolutional networks used in the papers, in the order convolution, pooling, ReLU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_fl.options import check_flag, check_integer


class _ConvNet(nn.Sequential):
    """Blocks of convolutions, 2x2 pooling and ReLU, then fully connected layers."""

    def __init__(
        self,
        blocks: list[list[nn.Module]],
        shape: tuple[int, ...],
        head: list[int],
        batch_norm: bool = False,
    ) -> None:
        check_flag("batch_norm", batch_norm)
        layers: list[nn.Module] = []
        for block in blocks:
            for layer in block:
                layers.append(layer)
                if batch_norm and isinstance(layer, nn.Conv2d):
                    layers.append(nn.BatchNorm2d(layer.out_channels))
            layers += [nn.MaxPool2d(2), nn.ReLU()]
        layers.append(nn.Flatten())
        with torch.no_grad():  # in evaluation mode, which does not change BatchNorm statistics
            features = nn.Sequential(*layers).eval()(torch.zeros(1, *shape)).shape[1]
        for width in head[:-1]:
            layers += [nn.Linear(features, width), nn.ReLU()]
            features = width
        super().__init__(*layers, nn.Linear(features, head[-1]))
        self.train()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, ``[batch, classes]``."""
        return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]  # torch's own annotations


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        check_integer(name, size, min=1)


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

    def __init__(
        self,
        width: int = 32,
        hidden: int = 1024,
        num_classes: int = 10,
        in_channels: int = 3,
        batch_norm: bool = False,
    ) -> None:
        _check(width=width, hidden=hidden, num_classes=num_classes, in_channels=in_channels)
        blocks: list[list[nn.Module]] = [
            [nn.Conv2d(in_channels, width, 5, padding=2)],
            [nn.Conv2d(width, 2 * width, 5, padding=2)],
        ]
        super().__init__(blocks, (in_channels, 32, 32), [hidden, num_classes], batch_norm)


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

    def __init__(
        self, width: int = 64, hidden: int = 1024, num_classes: int = 10, in_channels: int = 1
    ) -> None:
        _check(width=width, hidden=hidden, num_classes=num_classes, in_channels=in_channels)
        blocks: list[list[nn.Module]] = [
            [
                nn.Conv2d(channels, width, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
            ]
            for channels in (in_channels, width)
        ]
        super().__init__(blocks, (in_channels, 32, 32), [hidden, num_classes])


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

    def __init__(
        self,
        width: int = 32,
        hidden: int | None = None,
        num_classes: int = 10,
        batch_norm: bool = False,
    ) -> None:
        _check(width=width, num_classes=num_classes)
        check_integer("hidden", hidden, min=1, optional=True)
        blocks: list[list[nn.Module]] = [
            [nn.Conv2d(1, width, 3)],
            [nn.Conv2d(width, 2 * width, 3)],
        ]
        head = [num_classes] if hidden is None else [hidden, num_classes]
        super().__init__(blocks, (1, 28, 28), head, batch_norm)


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

    def __init__(
        self, width: int = 20, hidden: int = 500, num_classes: int = 10, in_channels: int = 1
    ) -> None:
        _check(width=width, hidden=hidden, num_classes=num_classes, in_channels=in_channels)
        blocks: list[list[nn.Module]] = [
            [nn.Conv2d(in_channels, width, 5)],
            [nn.Conv2d(width, 5 * width // 2, 5)],
        ]
        super().__init__(blocks, (in_channels, 28, 28), [hidden, num_classes])


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

    def __init__(self, width: int = 32, hidden: int = 2048, num_classes: int = 62) -> None:
        _check(width=width, hidden=hidden, num_classes=num_classes)
        blocks: list[list[nn.Module]] = [
            [nn.Conv2d(1, width, 5, padding=2)],
            [nn.Conv2d(width, 2 * width, 5, padding=2)],
        ]
        super().__init__(blocks, (1, 28, 28), [hidden, num_classes])
