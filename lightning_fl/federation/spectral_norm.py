"""Singular vectors of layers with spectral normalization."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import is_parametrized
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
        parametrizations: Any = part.parametrizations if is_parametrized(part) else {}
        for name, forms in parametrizations.items():
            for form in forms:
                # The weight of a vector is normalized without singular vectors.
                if isinstance(form, _SpectralNorm) and (vectors := list(form.buffers())):
                    yield vectors, partial(_normalize, part, name, form)


def _normalize(part: nn.Module, name: str, form: nn.Module) -> None:
    """Normalize a weight as in training, which improves the singular vectors."""
    with attributes_set(form, {"training": True}):
        getattr(part, name)


def _are_unit(vectors: Iterable[Tensor]) -> bool:
    """Return whether all vectors have length 1, except for rounding."""
    return all(abs(float(v.norm()) - 1) <= 100 * torch.finfo(v.dtype).eps for v in vectors)


@torch.no_grad()
def refine_singular_vectors(module: nn.Module, of_one_client: bool = False) -> bool:
    r"""Fit the singular vectors of spectral normalization to the weights.

    A layer with spectral normalization divides its weight :math:`W` by :math:`u^\top W v` (Miyato
    et al., 2018). Each training step improves the buffers :math:`u` and :math:`v` by a step of the
    power method, which evaluation does not. The mean of unit vectors is shorter than 1, so that an
    aggregated model would divide by too small a number.

    Args:
        module: The module with the aggregated weights.
        of_one_client: Whether weights and vectors come from a single client. Vectors of length 1
            then stay as they are, as in training without a federation.

    Returns:
        Whether vectors changed.

    Example:
        >>> layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)).eval()
        >>> vectors = layer.parametrizations.weight[0]
        >>> _ = vectors._u.mul_(0.5)
        >>> refine_singular_vectors(layer)
        True
        >>> round(float(torch.linalg.matrix_norm(layer.weight.detach(), 2)), 2)
        1.0
    """
    changed = False
    for vectors, improve in spectral_norms(module):
        if of_one_client and _are_unit(vectors):
            continue
        changed = True
        for _ in range(STEPS):
            improve()
    return changed
