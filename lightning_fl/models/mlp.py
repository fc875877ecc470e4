"""Multilayer perceptrons."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from lightning_fl.options import check_integer, check_that, is_list


class MLPClassifier(nn.Sequential):
    """Fully connected layers with ReLU activations, from flattened inputs to logits.

    Args:
        sizes: Widths from input to classes; Mostafa (2019) uses ``[784, 100, 100, 10]`` for MNIST.

    Raises:
        FederationError: If there are fewer than two sizes, or a size is not positive.

    Example:
        >>> import torch
        >>> MLPClassifier([64, 30, 10])(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        wanted = "two or more widths, from input to classes"
        check_that("sizes", sizes, is_list(sizes) and len(sizes) > 1, wanted)
        for i, size in enumerate(sizes):
            check_integer(f"sizes[{i}]", size, min=1)
        layers: list[nn.Module] = [nn.Flatten()]
        for width_in, width_out in pairwise(sizes):
            layers += [nn.Linear(width_in, width_out), nn.ReLU()]
        super().__init__(*layers[:-1])
