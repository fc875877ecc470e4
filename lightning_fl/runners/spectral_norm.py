"""Singular vectors of layers with spectral normalization."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

#: Steps of the power method after each round.
STEPS = 30


@torch.no_grad()
def refine_singular_vectors(module: nn.Module) -> None:
    r"""Fit the singular vectors of spectral normalization to the weights.

    A layer with spectral normalization divides its weight :math:`W` by :math:`u^\top W v` (Miyato
    et al., 2018). Each training step improves the buffers :math:`u` and :math:`v` by a step of the
    power method, which evaluation does not. The mean of unit vectors is shorter than 1, so that an
    aggregated model would divide by too small a number.

    Args:
        module: The module with the aggregated weights.

    Example:
        >>> layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)).eval()
        >>> vectors = layer.parametrizations.weight[0]
        >>> _ = vectors._u.mul_(0.5)
        >>> refine_singular_vectors(layer)
        >>> round(float(torch.linalg.matrix_norm(layer.weight.detach(), 2)), 2)
        1.0
    """
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):  # the older of torch's two forms
                for _ in range(STEPS):
                    hook.compute_weight(part, do_power_iteration=True)
        if isinstance(part, ParametrizationList) and part.original.ndim > 1:
            for form in part:
                if isinstance(form, _SpectralNorm):
                    form._power_method(form._reshape_weight_to_matrix(part.original), STEPS)
