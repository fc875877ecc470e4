"""Contrastive loss between the representations of models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def model_contrastive_loss(
    z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float
) -> Tensor:
    r"""Return the model-contrastive loss of each sample (Li et al., 2021, eq. 3).

    .. math:: \ell = -\log \frac{e^{\cos(z, z_{glob}) / \tau}}
        {e^{\cos(z, z_{glob}) / \tau} + e^{\cos(z, z_{prev}) / \tau}}
        = \log \bigl(1 + e^{(\cos(z, z_{prev}) - \cos(z, z_{glob})) / \tau}\bigr)

    If both partners are equal, it is :math:`\log 2` with gradient 0.

    Args:
        z: Representations of the client model, ``[batch, features]``.
        z_global: Representations of the global model, of the same shape.
        z_previous: Representations of the client's previous model, of the same shape.
        temperature: Temperature :math:`\tau`, above 0.

    Returns:
        Losses, ``[batch]``.

    Example:
        >>> z, opposite = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]])
        >>> model_contrastive_loss(z, z, z, 0.5), model_contrastive_loss(z, z, opposite, 0.5)
        (tensor([0.6931]), tensor([0.0181]))
    """
    # The difference of the cosines; equal partners give exactly 0, and so does its gradient.
    wide = torch.promote_types(z.dtype, torch.float32)  # in float16, eps of normalize is 0
    unit, new, old = (F.normalize(each.to(wide), dim=1) for each in (z, z_global, z_previous))
    difference = (unit * (old - new)).sum(1)
    # Unlike softplus, logaddexp does not switch to a linear approximation.
    return torch.logaddexp(torch.zeros_like(difference), difference / temperature)
