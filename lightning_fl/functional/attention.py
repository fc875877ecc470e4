"""Weights with which the models of similar clients are mixed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

#: Number of columns that are processed at once in float64, to limit memory.
PIECE = 2**14


def squared_distances(rows: Tensor) -> Tensor:
    """Return the squared distances between rows, ``[n, n]`` in float64.

    Args:
        rows: Models, ``[n, P]``.

    Example:
        >>> squared_distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]])).tolist()
        [[0.0, 25.0], [25.0, 0.0]]
    """
    products = _products(rows, is_centered=True)
    square = products.diag()
    return (square[:, None] + square - 2 * products).clamp(min=0).fill_diagonal_(0)


def attention(
    rows: Tensor, strength: float, sigma: float, similarity: Literal["distance", "cosine"]
) -> Tensor:
    r"""Return the weights of the other models in the model of each client (Huang et al., 2021).

    With :math:`n` models, for :math:`j \neq k`,

    .. math:: a_{kj} = \frac{\rho}{n - 1} e^{-\lVert w_k - w_j \rVert^2 / \sigma}
        \quad\text{or}\quad a_{kj} = \rho \frac{e^{\sigma \cos(w_k, w_j)}}
        {\sum_{i \neq k} e^{\sigma \cos(w_k, w_i)}}

    Args:
        rows: Models :math:`w`, ``[n, P]``.
        strength: Largest sum :math:`\rho` of the weights of a client, in [0, 1].
        sigma: Scale :math:`\sigma` of the similarity.
        similarity: ``distance`` is the first form, and ``cosine`` the second.

    Returns:
        Weights, ``[n, n]`` in float64, with 0 on the diagonal.

    Example:
        >>> models = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 99.0]])
        >>> attention(models, 0.5, 1.0, "distance")[0].tolist()
        [0.0, 0.25, 0.0]
    """
    if similarity == "distance":
        weights = torch.exp(-squared_distances(rows) / sigma) / max(len(rows) - 1, 1)
        return strength * weights.fill_diagonal_(0)
    products = _products(rows, is_centered=False)
    norms = products.diag().sqrt()
    cosines = products / (norms[:, None] * norms).clamp(min=torch.finfo(products.dtype).tiny)
    # Without another model, the softmax of no number is NaN.
    return strength * (sigma * cosines).fill_diagonal_(-torch.inf).softmax(1).nan_to_num(0)


def mixed_model(rows: Tensor, at: int, weights: Tensor) -> Tensor:
    r"""Return a model moved towards the others, :math:`w_k + \sum_j a_j (w_j - w_k)`.

    Args:
        rows: Models :math:`w`, ``[n, P]``.
        at: Position :math:`k` of the model.
        weights: Weights :math:`a`, ``[n]`` in float64.

    Example:
        >>> models = torch.tensor([[0.0], [4.0]])
        >>> mixed_model(models, 0, torch.tensor([0.0, 0.25], dtype=torch.float64))
        tensor([1.])
    """
    pieces = [own[at] + weights @ (own - own[at]) for own in _pieces(rows)]
    return torch.cat(pieces).to(rows.dtype)


def _products(rows: Tensor, is_centered: bool) -> Tensor:
    """Return the inner products of rows, or of their differences from the mean row."""
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for piece in _pieces(rows):
        part = piece - piece.mean(0) if is_centered else piece
        products += part @ part.mT
    return products


def _pieces(rows: Tensor) -> Iterator[Tensor]:
    """Yield the columns of rows in float64, a piece at a time."""
    return (piece.double() for piece in rows.split(PIECE, 1))
