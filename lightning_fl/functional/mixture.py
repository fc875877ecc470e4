"""Mixtures of distributions (Marfoq et al., 2021, FedEM)."""

from __future__ import annotations

import torch
from torch import Tensor


def responsibilities(losses: Tensor, log_weights: Tensor) -> Tensor:
    r"""Return which component each sample is of, the E step.

    .. math:: q_i(m) = \frac{\pi_m e^{-\ell(\theta_m; x_i, y_i)}}
        {\sum_{m'} \pi_{m'} e^{-\ell(\theta_{m'}; x_i, y_i)}}

    Worked out with logarithms, so that large losses leave no zeros to divide by.

    Args:
        losses: Negative log-likelihoods, ``[n, M]``.
        log_weights: Logarithms of the mixture's weights, ``[M]``; -inf for a weight of 0.

    Returns:
        ``[n, M]``, rows summing to 1.

    Example:
        >>> responsibilities(torch.tensor([[1000.0, 1000.0]]), torch.tensor([0.25, 0.75]).log())
        tensor([[0.2500, 0.7500]])
    """
    return (log_weights - losses).softmax(1)


def mixture_log_probabilities(logits: Tensor, log_weights: Tensor) -> Tensor:
    r"""Return the mixture's prediction, :math:`\log \sum_m \pi_m \operatorname{softmax}(h_m(x))`.

    Args:
        logits: Of the components, ``[M, n, classes]``.
        log_weights: ``[M]``.

    Returns:
        ``[n, classes]``.

    Example:
        >>> logits = torch.tensor([[[0.0, 0.0]], [[0.0, 0.0]]])
        >>> mixture_log_probabilities(logits, torch.tensor([0.5, 0.5]).log()).exp()
        tensor([[0.5000, 0.5000]])
    """
    each = logits.log_softmax(-1) + log_weights[:, None, None]
    return torch.logsumexp(each, 0)
