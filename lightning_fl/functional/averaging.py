"""Weighted averages of client updates."""

from __future__ import annotations

from torch import Tensor


def weighted_mean(rows: Tensor, weights: Tensor) -> Tensor:
    r"""Return the weighted mean of rows, for rules that hold all updates.

    :class:`~lightning_fl.aggregators.FedAvg` sums in any order instead; see
    :mod:`~lightning_fl.functional.summation`.

    .. math:: \sum_k w_k x_k / \sum_k w_k

    The weights are normalized over the given rows, not over all clients: the mean of equal rows is
    that row, independent of the number of rows.

    Args:
        rows: Client updates, ``[k, P]``.
        weights: Non-negative weights, ``[k]``, for example numbers of samples.

    Returns:
        The mean, ``[P]``, in the dtype of ``rows``.

    Example:
        >>> import torch
        >>> weighted_mean(torch.tensor([[0.0, 1.0], [4.0, 5.0]]), torch.tensor([3, 1]))
        tensor([1., 2.])
    """
    weights = weights.to(rows.dtype)
    return weights @ rows / weights.sum()
