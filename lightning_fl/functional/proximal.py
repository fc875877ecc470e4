"""Penalty on the distance between client and global model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def proximal_penalty(params: Iterable[Tensor], anchor: Iterable[Tensor], mu: float) -> Tensor:
    r"""Return the penalty, :math:`\frac{\mu}{2} \lVert w - w^t \rVert^2` (Li et al., 2020, eq. 2).

    Args:
        params: Local parameters :math:`w`.
        anchor: Global parameters :math:`w^t`, in the same shapes and order.
        mu: Strength :math:`\mu`. 0 is FedAvg.

    Example:
        >>> proximal_penalty([torch.tensor([1.0, 2.0])], [torch.zeros(2)], mu=0.1)
        tensor(0.2500)
    """
    away = [w - w_t for w, w_t in zip(params, anchor, strict=True)]
    real = (torch.view_as_real(d) if d.is_complex() else d for d in away)
    return mu / 2 * torch.stack([d.square().sum() for d in real]).sum()
