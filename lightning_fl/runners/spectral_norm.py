"""Singular vectors of layers with spectral normalization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_fl.hooks import attributes_set

#: Steps of the power method after each round.
STEPS = 30


def spectral_norms(module: nn.Module) -> Iterator[tuple[list[Tensor], Callable[[], object]]]:
    """Yield the singular vectors of each normalized weight, and a function that improves them.

    Args:
        module: Any module, with either of torch's two forms of spectral normalization.
    """
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                vectors = [getattr(part, f"{hook.name}_{vector}") for vector in "uv"]
                yield vectors, partial(hook.compute_weight, part, do_power_iteration=True)
        if isinstance(part, ParametrizationList) and part.original.ndim > 1:
            for form in part:
                if isinstance(form, _SpectralNorm):
                    yield list(form.buffers()), partial(_train, form, part.original)


def _train(form: nn.Module, weight: Tensor) -> None:
    """Normalize a weight as in training, which improves the singular vectors."""
    with attributes_set(form, {"training": True}):
        form(weight)


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
    for _, improve in spectral_norms(module):
        for _ in range(STEPS):
            improve()
