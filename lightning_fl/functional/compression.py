"""Compression of client updates: pure functions of vectors, ``[P]``."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fl.options import check_integer


def top_k(update: Tensor, count: int) -> Tensor:
    """Keep the entries of largest magnitude, and set the others to 0 (Stich et al., 2018).

    Args:
        update: Client update, ``[P]``.
        count: Number of entries to keep. Ties are resolved in favor of lower indices.

    Example:
        >>> top_k(torch.tensor([1.0, -3.0, 2.0, -2.0]), 2)
        tensor([ 0., -3.,  2.,  0.])
    """
    index = update.abs().argsort(descending=True, stable=True)[:count]
    return torch.zeros_like(update).index_copy(0, index, update[index])


def quantized(update: Tensor, bits: int, uniform: Tensor) -> Tensor:
    r"""Quantize to :math:`2^b - 1` values by stochastic, unbiased rounding (Alistarh et al., 2017).

    .. math:: Q(x) = s \Bigl\lfloor \frac{x}{s} + u \Bigr\rfloor, \qquad
        s = \frac{\max_i |x_i|}{2^{b - 1} - 1}, \qquad u \sim U[0, 1)

    The computation is in float64, since a sum :math:`x / s + u` that was rounded to half precision
    would be biased.

    Args:
        update: Client update :math:`x`, ``[P]``.
        bits: Number of bits :math:`b`, at least 2.
        uniform: Uniform random numbers :math:`u`, ``[P]``.

    Raises:
        FederationError: If there are fewer than two bits.

    Example:
        >>> quantized(torch.tensor([-3.0, 0.6, 3.0]), 3, torch.tensor([0.5, 0.5, 0.5]))
        tensor([-3.,  1.,  3.])
    """
    most = 2 ** (check_integer("bits", bits, min=2) - 1) - 1
    wide = update.double()
    scale = wide.abs().max() / most if len(wide) else 0.0  # nothing may be trained in a round
    if not scale:
        return torch.zeros_like(update)
    rounded: Tensor = scale * (wide / scale + uniform).floor().clamp(-most, most)
    return rounded.to(update.dtype)


def signs(update: Tensor) -> Tensor:
    r"""Return the signs, scaled by the mean magnitude (Karimireddy et al., 2019).

    .. math:: C(x) = \frac{\|x\|_1}{P} \operatorname{sign}(x)

    The sign of 0 is positive, so that one bit per entry is sufficient.

    Args:
        update: Client update :math:`x`, ``[P]``.

    Example:
        >>> signs(torch.tensor([1.0, -5.0, 0.0]))
        tensor([ 2., -2.,  2.])
    """
    return torch.where(update < 0, -1.0, 1.0).to(update) * update.abs().mean()
