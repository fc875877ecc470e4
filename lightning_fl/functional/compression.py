"""Updates in fewer bytes: pure functions of vectors, ``[P]``."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k(update: Tensor, count: int) -> Tensor:
    """Keep the numbers that are largest in magnitude, and make the others 0 (Stich et al., 2018).

    Args:
        update: ``[P]``.
        count: How many are kept; of equal ones the first.

    Example:
        >>> top_k(torch.tensor([1.0, -3.0, 2.0, -2.0]), 2)
        tensor([ 0., -3.,  2.,  0.])
    """
    index = update.abs().argsort(descending=True, stable=True)[:count]
    return torch.zeros_like(update).index_copy(0, index, update[index])


def quantized(update: Tensor, bits: int, uniform: Tensor) -> Tensor:
    r"""Round numbers at random to one of :math:`2^b - 1` values, unbiased (Alistarh et al., 2017).

    .. math:: Q(x) = s \Bigl\lfloor \frac{x}{s} + u \Bigr\rfloor, \qquad
        s = \frac{\max_i |x_i|}{2^{b - 1} - 1}, \qquad u \sim U[0, 1)

    Args:
        update: :math:`x`, ``[P]``.
        bits: :math:`b`, from 2 up.
        uniform: :math:`u`, ``[P]``.

    Example:
        >>> quantized(torch.tensor([-3.0, 0.6, 3.0]), 3, torch.tensor([0.5, 0.5, 0.5]))
        tensor([-3.,  1.,  3.])
    """
    most = 2 ** (bits - 1) - 1
    scale = update.abs().max() / most
    if not scale:
        return torch.zeros_like(update)
    found: Tensor = scale * (update / scale + uniform).floor().clamp(-most, most)
    return found


def signs(update: Tensor) -> Tensor:
    r"""Keep signs, times the mean magnitude (Karimireddy et al., 2019).

    .. math:: C(x) = \frac{\|x\|_1}{P} \operatorname{sign}(x)

    with the sign of 0 taken for positive: it has to be one of two.

    Args:
        update: :math:`x`, ``[P]``.

    Example:
        >>> signs(torch.tensor([1.0, -5.0, 0.0]))
        tensor([ 2., -2.,  2.])
    """
    return torch.where(update < 0, -1.0, 1.0).to(update) * update.abs().mean()
