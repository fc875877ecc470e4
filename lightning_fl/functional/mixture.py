"""Mixtures of distributions (Marfoq et al., 2021, FedEM)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_responsibilities(losses: Tensor, log_weights: Tensor) -> Tensor:
    r"""Return the log-responsibilities of components for samples (E step).

    .. math:: q_i(m) = \frac{\pi_m e^{-\ell(\theta_m; x_i, y_i)}}
        {\sum_{m'} \pi_{m'} e^{-\ell(\theta_{m'}; x_i, y_i)}}

    (Marfoq et al., 2021, algorithm 1; ``MixtureClient`` of omarfoq/FedEM). The computation
    uses logarithms to avoid underflow and overflow. A weight of 0 gives a responsibility of 0 for
    any losses.

    Args:
        losses: Negative log-likelihoods, ``[n, M]``.
        log_weights: Logarithms of the mixture weights, ``[M]``; -inf for a weight of 0. At least
            one weight must be positive.

    Returns:
        Log-responsibilities, ``[n, M]``. The exponentials of each row sum to 1.

    Example:
        >>> log_responsibilities(torch.tensor([[0.0, 1000.0]]), torch.tensor([0.5, 0.5]).log())
        tensor([[    0., -1000.]])
    """
    return (log_weights - losses).log_softmax(1)


def floored_log_weights(log_weights: Tensor, floor: float) -> Tensor:
    r"""Raise small mixture weights to a floor, and normalize all weights.

    .. math:: \pi_m \leftarrow
        \frac{\max(\pi_m, \varepsilon)}{\sum_{m'} \max(\pi_{m'}, \varepsilon)}

    This is not in the paper, where a weight of 0 stays 0.

    Args:
        log_weights: Logarithms :math:`\log \pi` of the mixture weights, ``[M]``.
        floor: Floor :math:`\varepsilon`, at least 0. With 0 the weights are unchanged.

    Returns:
        Logarithms of the new weights, ``[M]``.

    Example:
        >>> floored_log_weights(torch.tensor([0.0, 1.0]).log(), 0.25).exp()
        tensor([0.2000, 0.8000])
    """
    if floor == 0:
        return log_weights
    return log_weights.clamp(min=math.log(floor)).log_softmax(0)


def mixture_log_probabilities(logits: Tensor, log_weights: Tensor) -> Tensor:
    r"""Return the mixture prediction, :math:`\log \sum_m \pi_m \operatorname{softmax}(h_m(x))`.

    Args:
        logits: Logits of the components, ``[M, n, classes]``.
        log_weights: Logarithms of the mixture weights, ``[M]``.

    Returns:
        Log-probabilities, ``[n, classes]``.

    Example:
        >>> logits = torch.tensor([[[0.0, 0.0]], [[0.0, 0.0]]])
        >>> mixture_log_probabilities(logits, torch.tensor([0.5, 0.5]).log()).exp()
        tensor([[0.5000, 0.5000]])
    """
    each = logits.log_softmax(-1) + log_weights[:, None, None]
    return torch.logsumexp(each, 0)
