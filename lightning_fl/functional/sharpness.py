"""Sharpness-aware minimization."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def ascent(
    params: Mapping[str, Tensor], gradient: Mapping[str, Tensor], rho: float, offset: float | None
) -> dict[str, Tensor]:
    r"""Return the move to a nearby point of larger loss, :math:`\rho g / \lVert g \rVert`.

    SAM (Foret et al., 2021, eq. 2). With an offset :math:`a` it is ASAM (Kwon et al., 2021, eq. 4),
    :math:`\rho T^2 g / \lVert T g \rVert`, where :math:`T = |w| + a` for tensors of two or more
    dimensions, and 1 for others. A gradient of 0 moves nothing.

    Args:
        params: Parameters :math:`w` by name.
        gradient: Gradient :math:`g` by name.
        rho: Distance :math:`\rho`.
        offset: Offset :math:`a`; None is SAM.

    Returns:
        The move by name.

    Example:
        >>> ascent({"w": torch.ones(2)}, {"w": torch.tensor([3.0, 4.0])}, 0.5, None)
        {'w': tensor([0.3000, 0.4000])}
    """
    scale = {
        name: torch.ones_like(p) if offset is None or p.ndim < 2 else p.abs() + offset
        for name, p in params.items()
    }
    # In float16, squares of small numbers are 0, and of large ones infinite.
    wide = {n: g.to(torch.promote_types(g.dtype, torch.float32)) for n, g in gradient.items()}
    norm = sum((scale[name] * g).square().sum() for name, g in wide.items()) ** 0.5
    factor = rho / torch.where(norm > 0, norm, 1)
    return {name: factor * scale[name] ** 2 * g for name, g in gradient.items()}
