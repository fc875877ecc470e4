"""Losses that keep a model near the predictions of another one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def not_true_divergence(logits: Tensor, teacher: Tensor, y: Tensor, tau: float) -> Tensor:
    r"""Return the divergence of the predictions for the classes other than the true one.

    FedNTD (Lee et al., 2022, eq. 4 and 5): :math:`\tau^2 \mathrm{KL}(\tilde q^t \| \tilde q)`,
    where :math:`\tilde q` is the softmax of :math:`z_c / \tau` over all classes :math:`c \neq y`.

    Args:
        logits: Logits :math:`z` of the model, ``[batch, classes]``.
        teacher: Logits of the other model, which is constant, ``[batch, classes]``.
        y: True classes, ``[batch]``.
        tau: Temperature :math:`\tau`, above 0.

    Returns:
        Divergences, ``[batch]``.

    Example:
        >>> z, teacher = torch.tensor([[9.0, 0.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]])
        >>> not_true_divergence(z, teacher, torch.tensor([0]), 1.0)
        tensor([0.4621])
    """
    columns = torch.arange(logits.shape[1] - 1, device=logits.device)
    others = columns + (columns >= y[:, None])
    own, fixed = (F.log_softmax(each.gather(1, others) / tau, dim=1) for each in (logits, teacher))
    return tau**2 * (fixed.exp() * (fixed - own)).sum(1)
