"""Robust centers of client updates: pure functions of rows, ``[k, P]``."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fl.options import check_integer


def coordinate_median(updates: Tensor) -> Tensor:
    r"""Return the coordinate-wise median, ``[P]`` (Yin et al., 2018).

    For an even number of updates it is the mean of the two middle values.

    Args:
        updates: Client updates, ``[k, P]``.

    Example:
        >>> coordinate_median(torch.tensor([[0.0, 1.0], [2.0, 9.0], [4.0, -9.0], [100.0, 3.0]]))
        tensor([3., 2.])
    """
    ordered, k = updates.sort(0).values, len(updates)
    return (ordered[(k - 1) // 2] + ordered[k // 2]) / 2


def trimmed_mean(updates: Tensor, trim: int) -> Tensor:
    r"""Return the coordinate-wise trimmed mean (Yin et al., 2018).

    Args:
        updates: Client updates, ``[k, P]``.
        trim: Number of values to remove at either end, less than half of ``k``.

    Returns:
        The trimmed mean, ``[P]``.

    Raises:
        FederationError: If ``trim`` is out of range.

    Example:
        >>> trimmed_mean(torch.tensor([[0.0], [2.0], [4.0], [100.0]]), trim=1)
        tensor([3.])
    """
    check_integer("trim", trim, min=0, max=(len(updates) - 1) // 2)
    return updates.sort(0).values[trim : len(updates) - trim].mean(0)


def krum_scores(updates: Tensor, attackers: int) -> Tensor:
    r"""Return the Krum score of each update (Blanchard et al., 2017).

    .. math:: s(i) = \sum_{j \in N_i} \|\Delta_i - \Delta_j\|^2

    where :math:`N_i` are the :math:`k - f - 2` nearest other updates.

    Args:
        updates: Client updates, ``[k, P]``.
        attackers: Number of attackers :math:`f`, at most :math:`k - 3`.

    Returns:
        Scores, ``[k]``. Smaller is better.

    Raises:
        FederationError: If ``attackers`` is out of range.

    Example:
        >>> krum_scores(torch.tensor([[0.0], [1.0], [3.0], [90.0]]), attackers=1)
        tensor([1.0000e+00, 1.0000e+00, 4.0000e+00, 7.5690e+03])
    """
    k = len(updates)
    check_integer("attackers", attackers, min=0, max=k - 3, hint="Krum requires attackers + 3 rows")
    # Without matrix products, which lose small distances between long vectors to rounding.
    squares = torch.cdist(updates, updates, compute_mode="donot_use_mm_for_euclid_dist").square()
    squares.fill_diagonal_(torch.inf)
    return squares.sort(1).values[:, : k - attackers - 2].sum(1)


def geometric_median(
    updates: Tensor, weights: Tensor, smoothing: float = 1e-6, iterations: int = 1000
) -> Tensor:
    r"""Return the geometric median of updates (Pillutla et al., 2022).

    .. math:: \arg\min_v \sum_k p_k \|v - \Delta_k\|

    The Weiszfeld algorithm iterates :math:`v \leftarrow \sum_k \beta_k \Delta_k / \sum_k \beta_k`
    with :math:`\beta_k = p_k / \max(\nu, \|v - \Delta_k\|)`. It starts from the coordinate-wise
    median, and stops when the gradient :math:`\sum_k \beta_k (v - \Delta_k)` is at most
    ``smoothing``. The length of a step says little: steps are short near any update. The paper uses
    an absolute :math:`\nu`, which depends on the scale of the updates. Here :math:`\nu` is relative
    to a median distance. Attackers could control a mean distance.

    Args:
        updates: Client updates, ``[k, P]``.
        weights: Weights :math:`p`, ``[k]``.
        smoothing: :math:`\nu` as a fraction of the median distance between updates and the initial
            point, and the maximum norm of the gradient.
        iterations: Maximum number of iterations.

    Returns:
        The geometric median, ``[P]``.

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
        if (center - before).norm() * beta.sum() <= smoothing:
            break
    return center
