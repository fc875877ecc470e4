"""Averages of client updates."""

from __future__ import annotations

from torch import Tensor


def weighted_mean(rows: Tensor, weights: Tensor) -> Tensor:
    r"""Average rows, :math:`\sum_k w_k x_k / \sum_k w_k` (McMahan et al., 2017, Algorithm 1).

    The weights are normalized over the rows that are given, not over all clients: the average of
    equal rows is that row, however few take part.

    Args:
        rows: ``[k, P]``.
        weights: ``[k]``, non-negative, for example numbers of samples.

    Returns:
        ``[P]``, in the dtype of ``rows``.

    Example:
        >>> import torch
        >>> weighted_mean(torch.tensor([[0.0, 1.0], [4.0, 5.0]]), torch.tensor([3, 1]))
        tensor([1., 2.])
    """
    weights = weights.to(rows.dtype)
    return weights @ rows / weights.sum()
