"""Augmentation of images, waveforms and spectrograms by given random numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def choices(uniform: Tensor, count: int) -> Tensor:
    r"""Map numbers of [0, 1) to the integers below a count, :math:`\lfloor u n \rfloor`.

    Args:
        uniform: Uniform random numbers, of any shape.
        count: Number :math:`n` of integers.

    Returns:
        int64, of the same shape.

    Example:
        >>> choices(torch.tensor([0.0, 0.5, 0.999]), 9)
        tensor([0, 4, 8])
    """
    return (uniform * count).long().clamp(max=count - 1)


def crop_and_flip(
    images: Tensor, top: Tensor, left: Tensor, is_flipped: Tensor, padding: int
) -> Tensor:
    r"""Crop images from their copies with a black border, and flip some of them horizontally.

    With the padded image :math:`p`, which is larger by ``padding`` on each side,
    :math:`y_{ij} = p_{t + i,\, l + j}`, or :math:`p_{t + i,\, l + w - 1 - j}` for a flipped image.

    Args:
        images: Images, ``[n, channels, h, w]``.
        top: First row :math:`t` of each crop, from 0 to 2 ``padding``, ``[n]``.
        left: First column :math:`l` of each crop, from 0 to 2 ``padding``, ``[n]``.
        is_flipped: Whether to flip each crop, ``[n]``.
        padding: Width of the border.

    Returns:
        Images of the same shape and dtype.

    Example:
        >>> zero = torch.tensor([0])
        >>> image = torch.tensor([[[[1, 2], [3, 4]]]])
        >>> crop_and_flip(image, zero, zero + 2, torch.tensor([True]), padding=1)
        tensor([[[[0, 0],
                  [0, 2]]]])
    """
    n, channels, height, width = images.shape
    padded = F.pad(images, (padding,) * 4).flatten(2)
    columns = torch.arange(width, device=images.device)
    columns = left[:, None] + torch.where(is_flipped[:, None], columns.flip(0), columns)
    rows = top[:, None] + torch.arange(height, device=images.device)
    index = (rows[:, :, None] * (width + 2 * padding) + columns[:, None]).view(n, 1, -1)
    return padded.gather(2, index.expand(-1, channels, -1)).view(images.shape)


def shift(waves: Tensor, by: Tensor) -> Tensor:
    r"""Shift waveforms in time, :math:`y_t = x_{t - s}`, and fill the gap with silence.

    Args:
        waves: Waveforms, ``[n, samples]``.
        by: Shift :math:`s` of each waveform in samples, ``[n]``; positive values shift to later
            times.

    Returns:
        Waveforms of the same shape and dtype.

    Example:
        >>> shift(torch.tensor([[1, 2, 3]]), torch.tensor([1]))
        tensor([[0, 1, 2]])
    """
    samples = waves.shape[1]
    at = torch.arange(samples, device=waves.device) - by[:, None]
    is_inside = (at >= 0) & (at < samples)
    return waves.gather(1, at.clamp(0, samples - 1)) * is_inside


def mask_span(x: Tensor, start: Tensor, width: Tensor, dim: int) -> Tensor:
    """Set a span of each sample to 0 (SpecAugment; Park et al., 2019).

    Args:
        x: Samples, ``[n, ...]``.
        start: First masked index of each sample, ``[n]``.
        width: Number of masked indices of each sample, ``[n]``.
        dim: Dimension of the span.

    Example:
        >>> mask_span(torch.ones(1, 4), torch.tensor([1]), torch.tensor([2]), dim=1)
        tensor([[1., 0., 0., 1.]])
    """
    at = torch.arange(x.shape[dim], device=x.device) - start[:, None]
    is_masked = (at >= 0) & (at < width[:, None])
    shape = [1] * x.ndim
    shape[0], shape[dim] = is_masked.shape
    return x.masked_fill(is_masked.view(shape), 0)
