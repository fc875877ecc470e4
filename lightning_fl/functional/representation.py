"""Representation matching (Mostafa, 2019, section 3.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from lightning_fl.options import check_choice


def matching_error(guess: Tensor, target: Tensor, reduction: Literal["sum", "mean"]) -> Tensor:
    r"""Return the squared error :math:`\frac1{|b|} \sum_i \lVert g_i - a_i \rVert^2`.

    Args:
        guess: Reconstruction from the next higher layer, ``[batch, ...]``.
        target: Activations of the global model, of the same shape.
        reduction: Reduction over features. ``sum`` follows the paper (eq. 1). ``mean`` is
            independent of the number of features.

    Returns:
        The mean over the batch, a scalar.

    Raises:
        FederationError: If the reduction is unknown.

    Example:
        >>> import torch
        >>> matching_error(torch.ones(2, 3), torch.zeros(2, 3), "sum")
        tensor(3.)
    """
    check_choice("reduction", reduction, "sum", "mean")
    squares = (guess - target).square().flatten(1)
    return (squares.sum(1) if reduction == "sum" else squares.mean(1)).mean()


def unpool(x: Tensor, index: Tensor, size: Sequence[int]) -> Tensor:
    """Reverse max pooling: place values at the indices of the maxima, and zeros elsewhere.

    If windows overlap, values with the same index are averaged. The implementation uses a scatter,
    because ``max_unpool2d`` does not support overlaps and is slow under ``vmap``.

    Args:
        x: Pooled values, ``[batch, channels, ...]``.
        index: Indices of the maxima in the flattened input, as returned by ``max_pool2d``.
        size: Spatial size of the pooling input, without batch and channels.

    Returns:
        Unpooled values, ``[batch, channels, *size]``.

    Example:
        >>> import torch
        >>> unpool(torch.tensor([[[[5.0]]]]), torch.tensor([[[[3]]]]), (2, 2)).tolist()
        [[[[0.0, 0.0], [0.0, 5.0]]]]
    """
    flat, places = x.flatten(2), index.flatten(2)
    zeros = flat.new_zeros(*flat.shape[:2], math.prod(size))
    count = zeros.scatter_add(2, places, flat.new_ones(flat.shape)).clamp(min=1)
    means: Tensor = zeros.scatter_add(2, places, flat) / count
    return means.view(*means.shape[:2], *size)


def pad_to(x: Tensor, size: Sequence[int]) -> Tensor:
    """Pad maps with zeros or crop them to a size, equally on both sides.

    Of an odd difference, the larger half is padded at the end, or cropped at the start.

    Args:
        x: Maps, ``[batch, channels, ...]``.
        size: Target spatial size, without batch and channels.

    Example:
        >>> import torch
        >>> pad_to(torch.ones(1, 1, 2), (5,)).tolist()
        [[[0.0, 1.0, 1.0, 0.0, 0.0]]]
    """
    pads: list[int] = []
    for have, want in zip(reversed(x.shape[2:]), reversed(size), strict=True):
        pads += [(want - have) // 2, (want - have) - (want - have) // 2]
    return F.pad(x, pads) if any(pads) else x
