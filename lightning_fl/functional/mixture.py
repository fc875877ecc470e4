"""Mixtures of distributions (Marfoq et al., 2021, FedEM)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_responsibilities(losses: Tensor, log_weights: Tensor) -> Tensor:
    r"""Return the logarithms of the responsibilities of components for samples, the E step.

    .. math:: q_i(m) = \frac{\pi_m e^{-\ell(\theta_m; x_i, y_i)}}
        {\sum_{m'} \pi_{m'} e^{-\ell(\theta_{m'}; x_i, y_i)}}

    (Marfoq et al., 2021, algorithm 1; ``MixtureClient`` of omarfoq/FedEM). Only logarithms are
    added, so that neither large losses nor small weights under- or overflow. A weight of 0 gives a
    responsibility of 0, whatever the losses are.

    Args:
        losses: Negative log-likelihoods, ``[n, M]``.
        log_weights: Logarithms of the mixture's weights, ``[M]``; -inf for a weight of 0. At least
            one weight is positive.

    Returns:
        ``[n, M]``, rows whose exponentials sum to 1.

    Example:
        >>> log_responsibilities(torch.tensor([[0.0, 1000.0]]), torch.tensor([0.5, 0.5]).log())
        tensor([[    0., -1000.]])
    """
    return (log_weights - losses).log_softmax(1)


def responsibilities(losses: Tensor, log_weights: Tensor) -> Tensor:
    r"""Return the responsibilities of components for samples; see :func:`log_responsibilities`.

    Args:
        losses: Negative log-likelihoods, ``[n, M]``.
        log_weights: Logarithms of the mixture's weights, ``[M]``; -inf for a weight of 0.

    Returns:
        ``[n, M]``, rows summing to 1.

    Example:
        >>> responsibilities(torch.tensor([[1000.0, 1000.0]]), torch.tensor([0.25, 0.75]).log())
        tensor([[0.2500, 0.7500]])
    """
    return log_responsibilities(losses, log_weights).exp()


def floored_log_weights(log_weights: Tensor, floor: float) -> Tensor:
    r"""Raise the small weights of a mixture to a floor, and divide all by their sum.

    .. math:: \pi_m \leftarrow
        \frac{\max(\pi_m, \varepsilon)}{\sum_{m'} \max(\pi_{m'}, \varepsilon)}

    Not in the paper, where a weight that has become 0 stays 0.

    Args:
        log_weights: :math:`\log \pi`, ``[M]``.
        floor: :math:`\varepsilon`, at least 0. With 0 the weights stay what they are.

    Returns:
        Logarithms of the raised weights, ``[M]``.

    Example:
        >>> floored_log_weights(torch.tensor([0.0, 1.0]).log(), 0.25).exp()
        tensor([0.2000, 0.8000])
    """
    if floor == 0:
        return log_weights
    return log_weights.clamp(min=math.log(floor)).log_softmax(0)


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
