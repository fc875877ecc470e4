"""A Gaussian on the points of a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def normalized_axis(values: Sequence[float]) -> Tensor:
    r"""Shift and scale values to :math:`[-\frac12, \frac12]`, their mid-range to 0.

    Example:
        >>> normalized_axis([1, 2, 5])
        tensor([-0.5000, -0.2500,  0.5000], dtype=torch.float64)
    """
    axis = torch.tensor(list(values), dtype=torch.float64)
    low, high = axis.min(), axis.max()
    return (axis - (low + high) / 2) / (high - low if high > low else 1)


def log_probabilities(grid: Tensor, mean: Tensor, precision: Tensor) -> Tensor:
    r"""Discrete Gaussian, :math:`P(h) = \frac1Z e^{-\frac12 (h - \mu)^T A (h - \mu)}`.

    Mostafa (2019), section 3.3: :math:`Z` is the sum over the grid.

    Args:
        grid: Points :math:`h`, ``[n, D]``.
        mean: :math:`\mu`, ``[D]``.
        precision: :math:`A`, ``[D, D]``, positive definite.

    Returns:
        Logarithms of probabilities, ``[n]``.

    Example:
        >>> grid = torch.tensor([[-0.5], [0.5]])
        >>> log_probabilities(grid, torch.zeros(1), torch.eye(1)).exp()
        tensor([0.5000, 0.5000])
    """
    away = grid - mean
    return (-0.5 * torch.einsum("nd,de,ne->n", away, precision, away)).log_softmax(0)


def score(grid: Tensor, index: int, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    r"""Gradients of :math:`\log P(h)` by the mean and by a root of :math:`A = B B^T`.

    With :math:`d = h - \mu` and expectations over the grid,

    .. math:: \nabla_\mu = A\, (d - \mathbb{E}[d]), \qquad
        \nabla_B = (\mathbb{E}[d d^T] - d d^T)\, B.

    Args:
        grid: Points, ``[n, D]``.
        index: Which of them is :math:`h`.
        mean: :math:`\mu`, ``[D]``.
        root: :math:`B`, ``[D, D]``.

    Returns:
        :math:`\nabla_\mu` and :math:`\nabla_B`, of the shapes of what they are gradients by.

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
    r"""Return how far a loss fell, relative to its size: the reward of Mostafa (2019, section 3.2).

    .. math:: r_t = \frac{L_t - L_{t+1}}{\lvert L_t \rvert}

    The paper divides by :math:`L_t`, which is the same for positive losses. For a negative loss
    (a log-likelihood of a density, for example) that would reward a rising loss; the absolute
    value makes a falling loss a positive reward whatever its sign. A loss that leaves 0 is the
    limit: ``bound`` if it fell, ``-bound`` if it rose.

    Args:
        before: :math:`L_t`, the loss before the round.
        after: :math:`L_{t+1}`, the loss after the round.
        bound: The reward is clamped to ``[-bound, bound]``.

    Returns:
        The reward, never NaN. A loss that becomes NaN or infinite gives ``-bound``, one that
        becomes finite again 1, and one that stays so 0.

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
    r"""Weights of the scores in a window, :math:`r_\tau - \frac{1}{Z'+1} \sum_\sigma r_\sigma`.

    Mostafa (2019), eq. 7: :math:`\psi` moves by :math:`\eta_H \sum_\tau (r_\tau - \hat r)
    \nabla \log P(h_\tau \mid \psi_\tau)` over the last :math:`Z' + 1` rounds. The paper prints
    minus; that would lower the expected reward, which it sets out to raise.

    Args:
        rewards: Of the window, oldest first, ``[n]``.

    Returns:
        ``[n]``.

    Example:
        >>> causal_weights(torch.tensor([1.0, 2.0, 3.0]))
        tensor([-1.,  0.,  1.])
    """
    return rewards - rewards.mean()


def centerd_weights(rewards: Tensor) -> Tensor:
    r"""Weights of the scores with a baseline that is centerd on a round (Mostafa, 2019, eq. 6).

    .. math:: \bar r_t = \gamma_Z \sum_{\tau \neq t} (Z + 1 - |\tau - t|) r_\tau

    :math:`\gamma_Z` makes the weights of the mean sum to 1. Only the round in the middle has a
    weight, :math:`r_t - \bar r_t`: it is known :math:`Z` rounds later.

    Args:
        rewards: Of the window, ``[2 Z + 1]``.

    Returns:
        ``[2 Z + 1]``.

    Example:
        >>> centerd_weights(torch.tensor([1.0, 5.0, 2.0]))
        tensor([0.0000, 3.5000, 0.0000])
    """
    z = len(rewards) // 2
    near = z + 1.0 - (torch.arange(len(rewards)) - z).abs().to(rewards)
    near[z] = 0
    weights = torch.zeros_like(rewards)
    weights[z] = rewards[z] - (near @ rewards) / near.sum()
    return weights
