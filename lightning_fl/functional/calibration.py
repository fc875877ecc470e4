"""Logits that are changed by the class counts of a client."""

from __future__ import annotations

import torch
from torch import Tensor


def calibrated_logits(logits: Tensor, counts: Tensor, tau: float) -> Tensor:
    r"""Return logits with a margin for rare classes, :math:`z_c - \tau n_c^{-1/4}`.

    FedLC (Zhang et al., 2022). A class without samples leaves the softmax: its logit is the
    smallest number of the dtype, and has no gradient.

    Args:
        logits: Logits :math:`z`, ``[..., classes]``.
        counts: Number of samples of each class :math:`n`, ``[classes]``.
        tau: Strength :math:`\tau`, at least 0.

    Example:
        >>> calibrated_logits(torch.zeros(3), torch.tensor([16.0, 1.0, 0.0]), 1.0).softmax(0)
        tensor([0.6225, 0.3775, 0.0000])
    """
    counts = counts.to(logits)
    present = counts > 0
    margin = tau * counts.where(present, 1) ** -0.25
    return torch.where(present, logits - margin, torch.finfo(logits.dtype).min)


def balanced_logits(logits: Tensor, counts: Tensor, gamma: float | Tensor) -> Tensor:
    r"""Return logits with the prior of a client's classes, :math:`z_c + \log n_c^\gamma`.

    Balanced softmax (Ren et al., 2020; with :math:`\gamma = 1` of Fed-RoD). A class without samples
    leaves the softmax: its logit is the smallest number of the dtype, and has no gradient. With
    :math:`\gamma = 0` all logits are unchanged, since :math:`0^0 = 1`.

    Args:
        logits: Logits :math:`z`, ``[..., classes]``.
        counts: Number of samples of each class :math:`n`, ``[classes]``.
        gamma: Exponent :math:`\gamma`, at least 0.

    Example:
        >>> balanced_logits(torch.zeros(3), torch.tensor([3.0, 1.0, 0.0]), 1.0).softmax(0)
        tensor([0.7500, 0.2500, 0.0000])
    """
    counts = counts.to(logits)
    shifted = logits + gamma * counts.where(counts > 0, 1).log()
    present = (counts > 0) | (gamma == 0)
    return torch.where(present, shifted, torch.finfo(logits.dtype).min)


def restricted_logits(logits: Tensor, counts: Tensor, alpha: float) -> Tensor:
    r"""Return logits that are scaled by :math:`\alpha` for classes without samples.

    FedRS (Li and Zhan, 2021, eq. 6).

    Args:
        logits: Logits, ``[..., classes]``.
        counts: Number of samples of each class, ``[classes]``.
        alpha: Scale :math:`\alpha` in [0, 1].

    Example:
        >>> restricted_logits(torch.tensor([2.0, 2.0]), torch.tensor([5, 0]), 0.5)
        tensor([2., 1.])
    """
    return logits * torch.where(counts > 0, 1.0, alpha).to(logits)
