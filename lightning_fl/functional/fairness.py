"""Weights of clients for fair and worst-case objectives."""

from __future__ import annotations

import torch
from torch import Tensor


def fair_weights(
    losses: Tensor, q: float, scale: Tensor | float = 1.0, largest: float = 500.0
) -> tuple[Tensor, Tensor]:
    r"""Return :math:`F_k^q` and :math:`q F_k^{q - 1}`, divided by :math:`s^q`.

    q-FedAvg (Li et al., 2020, Algorithm 2). The powers are computed as exponentials of logarithms.

    Args:
        losses: Losses :math:`F_k`, ``[k]``. Values below 1e-10 count as 1e-10.
        q: Exponent :math:`q`, at least 0.
        scale: Common scale :math:`s` of the losses.
        largest: Maximum logarithm of a weight. Larger weights are reduced to it.

    Returns:
        Weights and slopes, ``[k]`` in float64. For :math:`q = 0` they are exactly 1 and 0.

    Example:
        >>> weights, slopes = fair_weights(torch.tensor([1.0, 2.0]), q=2.0)
        >>> weights, slopes
        (tensor([1., 4.], dtype=torch.float64), tensor([2., 4.], dtype=torch.float64))
    """
    losses = losses.double().clamp(min=1e-10)
    weights = (q * (losses / scale).log()).clamp(max=largest).exp()
    return weights, q * weights / losses


def project_to_simplex(values: Tensor, total: float = 1.0) -> Tensor:
    r"""Return the closest point of the simplex, :math:`\{x \ge 0, \sum_i x_i = s\}`.

    The projection is :math:`\max(v_i - \theta, 0)`. The threshold :math:`\theta` follows from the
    sorted values (Duchi et al., 2008, Figure 1). A point of the simplex is returned unchanged if
    the sum of its entries is exact.

    Args:
        values: The point :math:`v`, ``[n]``.
        total: Sum :math:`s` of the entries of the result, at least 0.

    Returns:
        The projection, ``[n]`` in float64.

    Example:
        >>> project_to_simplex(torch.tensor([0.5, 0.9, -1.0]))
        tensor([0.3000, 0.7000, 0.0000], dtype=torch.float64)
    """
    values = values.double()
    if not total > 0:
        return torch.zeros_like(values)
    # Thresholds depend on differences only; a common shift avoids cancellation.
    high = values.max()
    ordered = (values - high).sort(descending=True).values
    count = torch.arange(1, len(values) + 1, dtype=torch.float64, device=values.device)
    thresholds = (ordered.cumsum(0) - total) / count
    last = (ordered > thresholds).sum() - 1
    return (values - high - thresholds[last]).clamp(min=0)


def ascend_mixture(weights: Tensor, losses: Tensor, known: Tensor, gamma: float) -> Tensor:
    r"""Return the mixture of clients after a step of projected gradient ascent.

    AFL (Mohri et al., 2019), for the clients :math:`U` with a known loss:
    :math:`\lambda_U \leftarrow \Pi(\lambda_U + \gamma \frac{N - 1}{|U| - 1} F_U)`, where
    :math:`\Pi` projects onto the non-negative vectors with the former sum of :math:`\lambda_U`.
    Other clients keep their weights.

    Args:
        weights: Weights, ``[N]``; the mixture :math:`\lambda` is these divided by their sum.
        losses: Losses :math:`F_k`, ``[N]``.
        known: Mask of :math:`U`, ``[N]``. A single client keeps its weight.
        gamma: Step size :math:`\gamma`. With 0, the weights do not change.

    Returns:
        New weights with the same sum, ``[N]`` in float64.

    Example:
        >>> weights, known = torch.ones(4), torch.tensor([True, True, False, True])
        >>> ascend_mixture(weights, torch.tensor([1.0, 2.0, 9.0, 3.0]), known, gamma=0.1)
        tensor([0.4000, 1.0000, 1.0000, 1.6000], dtype=torch.float64)
    """
    weights, count = weights.double(), int(known.sum())
    if not gamma or count < 2:
        return weights
    step = gamma * (len(weights) - 1) / (count - 1) * weights.sum()
    moved = weights.clone()
    total = float(weights[known].sum())
    moved[known] = project_to_simplex(weights[known] + step * losses[known].double(), total)
    return moved


def draw_from_mixture(
    mixture: Tensor, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    r"""Draw clients to train by their probabilities, and clients to evaluate uniformly.

    DRFA (Deng et al., 2020, Algorithm 1).

    Args:
        mixture: Probabilities :math:`\lambda`, ``[N]``.
        count: Number of draws with replacement, and of clients to evaluate, at most :math:`N`.
        generator: Random generator of the round.

    Returns:
        Number of draws of each client, ``[N]``, and the mask of the clients to evaluate, ``[N]``.

    Example:
        >>> draws, evaluated = draw_from_mixture(
        ...     torch.tensor([0.5, 0.0, 0.5]), 2, torch.Generator().manual_seed(0))
        >>> draws, evaluated
        (tensor([0, 0, 2]), tensor([False,  True,  True]))
    """
    total = mixture.double().cumsum(0)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64) * total[-1]
    drawn = torch.searchsorted(total, uniform, right=True).clamp(max=len(mixture) - 1)
    evaluated = torch.zeros(len(mixture), dtype=torch.bool)
    evaluated[torch.randperm(len(mixture), generator=generator)[:count]] = True
    return torch.bincount(drawn, minlength=len(mixture)), evaluated
