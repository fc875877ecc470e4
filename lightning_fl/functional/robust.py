"""Centers of updates of which some may be anything: pure functions of rows, ``[k, P]``."""

from __future__ import annotations

import torch
from torch import Tensor


def coordinate_median(updates: Tensor) -> Tensor:
    r"""Return the median of each coordinate, ``[P]`` (Yin et al., 2018).

    Of an even number it is the mean of the two in the middle.

    Args:
        updates: ``[k, P]``.

    Example:
        >>> coordinate_median(torch.tensor([[0.0, 1.0], [2.0, 9.0], [4.0, -9.0], [100.0, 3.0]]))
        tensor([3., 2.])
    """
    ordered, k = updates.sort(0).values, len(updates)
    return (ordered[(k - 1) // 2] + ordered[k // 2]) / 2


def trimmed_mean(updates: Tensor, trim: int) -> Tensor:
    r"""Return the mean of each coordinate without its extremes (Yin et al., 2018).

    Args:
        updates: ``[k, P]``.
        trim: How many are left out at either end, less than half of ``k``.

    Returns:
        ``[P]``.

    Example:
        >>> trimmed_mean(torch.tensor([[0.0], [2.0], [4.0], [100.0]]), trim=1)
        tensor([3.])
    """
    return updates.sort(0).values[trim : len(updates) - trim].mean(0)


def krum_scores(updates: Tensor, attackers: int) -> Tensor:
    r"""Say how far each update is from those around it (Blanchard et al., 2017).

    .. math:: s(i) = \sum_{j \in N_i} \|\Delta_i - \Delta_j\|^2

    over the :math:`k - f - 2` updates that are nearest to :math:`i`, itself left out.

    Args:
        updates: ``[k, P]``.
        attackers: :math:`f`, at most :math:`k - 3`.

    Returns:
        ``[k]``, the smaller the better.

    Example:
        >>> krum_scores(torch.tensor([[0.0], [1.0], [3.0], [90.0]]), attackers=1)
        tensor([1.0000e+00, 1.0000e+00, 4.0000e+00, 7.5690e+03])
    """
    k = len(updates)
    # Not by products of matrices: small distances between long vectors would be rounding.
    squares = torch.cdist(updates, updates, compute_mode="donot_use_mm_for_euclid_dist").square()
    squares.fill_diagonal_(torch.inf)
    return squares.sort(1).values[:, : k - attackers - 2].sum(1)


def geometric_median(
    updates: Tensor, weights: Tensor, smoothing: float = 1e-6, iterations: int = 1000
) -> Tensor:
    r"""Return the point with the smallest mean distance to updates (Pillutla et al., 2022).

    .. math:: \arg\min_v \sum_k p_k \|v - \Delta_k\|

    by Weiszfeld's steps :math:`v \leftarrow \sum_k \beta_k \Delta_k / \sum_k \beta_k` with
    :math:`\beta_k = p_k / \max(\nu, \|v - \Delta_k\|)`, from the coordinates' medians, until a
    step is shorter than :math:`\nu`. The original's absolute :math:`\nu` means as much as updates
    are large; that of their mean distance would be the attackers' to choose.

    Args:
        updates: ``[k, P]``.
        weights: :math:`p`, ``[k]``.
        smoothing: :math:`\nu`, as a part of the median of the updates' distances to that start.
        iterations: At most.

    Returns:
        ``[P]``.

    Example:
        >>> rows = torch.tensor([[0.0], [1.0], [100.0]], dtype=torch.float64)
        >>> geometric_median(rows, torch.ones(3)).round(decimals=3)
        tensor([1.], dtype=torch.float64)
    """
    p = weights.to(updates) / weights.sum()
    center = coordinate_median(updates)
    distances = (updates - center).norm(dim=1)
    if not (apart := distances[distances > 0]).numel():
        return center
    nu = smoothing * float(apart.median())
    for _ in range(iterations):
        beta = p / distances.clamp(min=nu)
        before, center = center, beta @ updates / beta.sum()
        distances = (updates - center).norm(dim=1)
        if (center - before).norm() <= nu:
            break
    return center


def clipped(updates: Tensor, max_norm: float) -> Tensor:
    r"""Shorten updates to a norm, :math:`\Delta_k \min(1, M / \|\Delta_k\|)` (Sun et al., 2019).

    Args:
        updates: ``[k, P]``.
        max_norm: :math:`M`.

    Example:
        >>> clipped(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), max_norm=1.0)
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    norms = updates.norm(dim=1, keepdim=True)
    factor: Tensor = (max_norm / norms.clamp(min=torch.finfo(updates.dtype).tiny)).clamp(max=1)
    return updates * factor
