"""Discrete Gaussian on a grid, and REINFORCE weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def normalized_axis(values: Sequence[float]) -> Tensor:
    r"""Shift and scale values to :math:`[-\frac12, \frac12]`, with their mid-range at 0.

    Args:
        values: Grid values of one axis.

    Example:
        >>> normalized_axis([1, 2, 5])
        tensor([-0.5000, -0.2500,  0.5000], dtype=torch.float64)
    """
    axis = torch.tensor(list(values), dtype=torch.float64)
    low, high = axis.min(), axis.max()
    return (axis - (low + high) / 2) / (high - low if high > low else 1)


def log_probabilities(grid: Tensor, mean: Tensor, precision: Tensor) -> Tensor:
    r"""Return log-probabilities, :math:`P(h) = \frac1Z e^{-\frac12 (h - \mu)^T A (h - \mu)}`.

    Discrete Gaussian of Mostafa (2019), section 3.3. :math:`Z` is the sum over the grid.

    Args:
        grid: Points :math:`h`, ``[n, D]``.
        mean: Mean :math:`\mu`, ``[D]``.
        precision: Precision matrix :math:`A`, ``[D, D]``, positive definite.

    Returns:
        Log-probabilities, ``[n]``.

    Example:
        >>> grid = torch.tensor([[-0.5], [0.5]])
        >>> log_probabilities(grid, torch.zeros(1), torch.eye(1)).exp()
        tensor([0.5000, 0.5000])
    """
    away = grid - mean
    return (-0.5 * torch.einsum("nd,de,ne->n", away, precision, away)).log_softmax(0)


def score(grid: Tensor, index: int, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return gradients of :math:`\log P(h)` by the mean and the root of :math:`A = B B^T`.

    With :math:`d = h - \mu` and expectations over the grid,

    .. math:: \nabla_\mu = A\, (d - \mathbb{E}[d]), \qquad
        \nabla_B = (\mathbb{E}[d d^T] - d d^T)\, B.

    Args:
        grid: Points, ``[n, D]``.
        index: Index of :math:`h` in the grid.
        mean: Mean :math:`\mu`, ``[D]``.
        root: Root :math:`B` of the precision, ``[D, D]``.

    Returns:
        :math:`\nabla_\mu`, ``[D]``, and :math:`\nabla_B`, ``[D, D]``.

    Example:
        >>> grid = torch.tensor([[-0.5], [0.5]])
        >>> score(grid, 1, torch.zeros(1), torch.eye(1))[0]  # A (h - E[h])
        tensor([0.5000])
    """
    precision = root @ root.mT
    p, away = log_probabilities(grid, mean, precision).exp(), grid - mean
    by_mean = precision @ (away[index] - p @ away)
    by_root = (away.mT @ (p[:, None] * away) - away[index].outer(away[index])) @ root
    return by_mean, by_root


def relative_reduction(before: float, after: float, bound: float = math.inf) -> float:
    r"""Return the relative reduction of a loss, the reward of Mostafa (2019, section 3.2).

    .. math:: r_t = \frac{L_t - L_{t+1}}{\lvert L_t \rvert}

    The paper divides by :math:`L_t`, which is equal for positive losses. For a negative loss, for
    example a negative log-density, this would reward a rising loss. With the absolute value the
    reward of a falling loss is positive for either sign. If :math:`L_t` is 0 the reward is
    ``bound`` for a falling loss and ``-bound`` for a rising loss.

    Args:
        before: Loss :math:`L_t` before the round.
        after: Loss :math:`L_{t+1}` after the round.
        bound: Bound of the reward, which is clamped to ``[-bound, bound]``.

    Returns:
        The reward, never NaN. It is ``-bound`` if the loss becomes non-finite, 1 if it becomes
        finite again, and 0 if it stays non-finite.

    Example:
        >>> relative_reduction(4.0, 3.0), relative_reduction(-4.0, -5.0)
        (0.25, 0.25)
    """
    if not math.isfinite(before):
        return 1.0 if math.isfinite(after) else 0.0
    if not math.isfinite(after):
        return -bound
    if before == after:
        return 0.0
    ratio = (before - after) / abs(before) if before else math.copysign(math.inf, before - after)
    return max(-bound, min(bound, ratio))


def causal_weights(rewards: Tensor) -> Tensor:
    r"""Return score weights of a window, :math:`r_\tau - \frac{1}{Z'+1} \sum_\sigma r_\sigma`.

    Mostafa (2019), eq. 7: the update of :math:`\psi` is :math:`\eta_H \sum_\tau
    (r_\tau - \hat r) \nabla \log P(h_\tau \mid \psi_\tau)` over the last :math:`Z' + 1` rounds.
    The sign in the paper is a minus, which would decrease the expected reward.

    Args:
        rewards: Rewards of the window, oldest first, ``[n]``.

    Returns:
        The weights, ``[n]``.

    Example:
        >>> causal_weights(torch.tensor([1.0, 2.0, 3.0]))
        tensor([-1.,  0.,  1.])
    """
    return rewards - rewards.mean()


def centered_weights(rewards: Tensor) -> Tensor:
    r"""Return score weights with a baseline centered on a round (Mostafa, 2019, eq. 6).

    .. math:: \bar r_t = \gamma_Z \sum_{\tau \neq t} (Z + 1 - |\tau - t|) r_\tau

    The constant :math:`\gamma_Z` normalizes the weights of the mean to a sum of 1. Only the round
    in the middle of the window has a nonzero weight, :math:`r_t - \bar r_t`, which is available
    :math:`Z` rounds later.

    Args:
        rewards: Rewards of the window, ``[2 Z + 1]``.

    Returns:
        The weights, ``[2 Z + 1]``.

    Example:
        >>> centered_weights(torch.tensor([1.0, 5.0, 2.0]))
        tensor([0.0000, 3.5000, 0.0000])
    """
    z = len(rewards) // 2
    near = z + 1.0 - (torch.arange(len(rewards)) - z).abs().to(rewards)
    near[z] = 0
    weights = torch.zeros_like(rewards)
    weights[z] = rewards[z] - (near @ rewards) / near.sum()
    return weights
