"""Entropy of predictions."""

from __future__ import annotations

from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    r"""Return the entropy of softmax distributions in nats, :math:`H = -\sum_c p_c \log p_c`.

    Args:
        logits: Logits, ``[..., classes]``.

    Returns:
        Entropies, ``[...]``, from 0 to ``log(classes)``.

    Example:
        >>> import torch
        >>> entropy(torch.zeros(1, 4)).exp()
        tensor([4.])
    """
    log_p = logits.log_softmax(-1)
    # A class with logit -inf contributes 0, the limit of p log p.
    return -(log_p.exp() * log_p.nan_to_num(neginf=0)).sum(-1)


def entropy_hinge(logits: Tensor, min_entropy: float, of_mean: bool = False) -> Tensor:
    r"""Penalize entropies below a bound, :math:`\max(0, H_{min} - H)` (Mostafa, 2019, eq. 8).

    Args:
        logits: Logits, ``[batch, classes]``.
        min_entropy: Bound :math:`H_{min}` in nats.
        of_mean: Compare the bound with the mean entropy of the batch instead of the entropy of each
            sample.

    Returns:
        The mean penalty over the batch, a scalar.

    Example:
        >>> import torch
        >>> entropy_hinge(torch.tensor([[100.0, 0.0], [0.0, 0.0]]), min_entropy=0.5)
        tensor(0.2500)
    """
    entropies = entropy(logits)
    return (min_entropy - (entropies.mean() if of_mean else entropies)).clamp(min=0).mean()
