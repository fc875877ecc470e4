"""Matching the representations of two networks (Mostafa, 2019, section 3.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor


def matching_error(guess: Tensor, target: Tensor, reduction: Literal["sum", "mean"]) -> Tensor:
    r"""Squared error of a reconstruction, :math:`\frac1{|b|} \sum_i \lVert g_i - a_i \rVert^2`.

    Args:
        guess: What was made of the layer above, ``[batch, ...]``.
        target: Activations of the fixed model, of the same shape.
        reduction: Over features: ``sum`` as in the paper (eq. 1), or ``mean``, which does not grow
            with their number.

    Returns:
        The mean over the batch, a scalar.

    Example:
        >>> import torch
        >>> matching_error(torch.ones(2, 3), torch.zeros(2, 3), "sum")
        tensor(3.)
    """
    squares = (guess - target).square().flatten(1)
    return (squares.sum(1) if reduction == "sum" else squares.mean(1)).mean()


def unpool(x: Tensor, index: Tensor, size: Sequence[int]) -> Tensor:
    """Put pooled values back where the winners were, zeros elsewhere.

    Where windows overlap, values that share a winner are averaged. By a scatter: ``max_unpool2d``
    does not know overlaps, and is slow under ``vmap``.

    Args:
        x: Pooled values, ``[batch, channels, ...]``.
        index: Places of the winners in the flattened input, as ``max_pool2d`` returns them.
        size: Of the pooling's input, without batch and channels.

    Returns:
        ``[batch, channels, *size]``.

    Example:
        >>> import torch
        >>> unpool(torch.tensor([[[[5.0]]]]), torch.tensor([[[[3]]]]), (2, 2)).tolist()
        [[[[0.0, 0.0], [0.0, 5.0]]]]
    """
    flat, places = x.flatten(2), index.flatten(2)
    zeros = flat.new_zeros(*flat.shape[:2], math.prod(size))
    count = zeros.scatter_add(2, places, flat.new_ones(flat.shape)).clamp(min=1)
    found: Tensor = zeros.scatter_add(2, places, flat) / count
    return found.view(*found.shape[:2], *size)


def pad_to(x: Tensor, size: Sequence[int]) -> Tensor:
    """Bring maps to a size by zeros, or by cutting, half on either side, the odd one at the end.

    Args:
        x: ``[batch, channels, ...]``.
        size: Wanted, without batch and channels.

    Example:
        >>> import torch
        >>> pad_to(torch.ones(1, 1, 2), (5,)).tolist()
        [[[0.0, 1.0, 1.0, 0.0, 0.0]]]
    """
    pads: list[int] = []
    for have, want in zip(reversed(x.shape[2:]), reversed(size), strict=True):
        pads += [(want - have) // 2, (want - have) - (want - have) // 2]
    return F.pad(x, pads) if any(pads) else x
