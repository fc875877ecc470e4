"""Correlation of the features of a batch."""

from __future__ import annotations

import torch
from torch import Tensor


def correlation_penalty(features: Tensor, eps: float = 1e-8) -> Tensor:
    r"""Return the mean square of the scaled correlations between features.

    FedDecorr (Shi et al., 2023), as in the authors' program (bytedance/FedDecorr):

    .. math:: \frac{1}{B \, d (d - 1)} \sum_{i \neq j} \bigl(u_i^\top u_j\bigr)^2, \qquad
        u_i = \frac{f_i - \bar f_i}{\sqrt{\operatorname{var}(f_i) + \epsilon}},

    where :math:`f_i` are the values of feature :math:`i` in the batch of size :math:`B`. The paper
    prints :math:`\lVert K \rVert_F^2 / d^2` with the correlations :math:`K`, which is about
    :math:`B` times smaller.

    Args:
        features: Features, ``[batch, d]``.
        eps: Constant :math:`\epsilon` that bounds features without variance.

    Returns:
        The penalty, a scalar; 0 for one sample or one feature.

    Example:
        >>> correlation_penalty(torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 10.0]]))
        tensor(1.3333)
    """
    size, d = features.shape
    if size == 1 or d == 1:
        return 0 * features.sum()
    wide = torch.promote_types(features.dtype, torch.float32)  # in float16, eps is 0
    centered = (features - features.mean(0)).to(wide)
    u = centered / (centered.square().sum(0) / (size - 1) + eps).sqrt()
    squares = (u.T @ u).square()
    return (squares.sum() - squares.diagonal().sum()) / (size * d * (d - 1))
