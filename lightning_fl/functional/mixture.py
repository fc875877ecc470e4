"""Mixtures of distributions (Marfoq et al., 2021, FedEM)."""

from __future__ import annotations

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
