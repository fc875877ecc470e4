"""Communication graphs and mixing matrices for decentralized averaging."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from lightning_fl.errors import FederationError
from lightning_fl.options import check_choice, check_that

Graph = Literal["ring", "grid", "erdos_renyi", "complete"]
#: Maximum number of draws to obtain a connected random graph.
TRIES = 1000


def adjacency(graph: Graph, count: int, probability: float, generator: torch.Generator) -> Tensor:
    """Return the adjacency matrix of a graph, without self-loops.

    Args:
        graph: Kind of graph. ``ring``; ``grid``, the most square grid without wrapping;
            ``complete``; or ``erdos_renyi``, with random edges, drawn again until it is connected.
        count: Number of clients.
        probability: Edge probability of ``erdos_renyi``.
        generator: Generator of the random edges.

    Returns:
        Symmetric boolean matrix, ``[count, count]``.

    Raises:
        FederationError: If the kind is unknown, or no drawn random graph is connected.

    Example:
        >>> adjacency("ring", 4, 0.5, torch.Generator()).sum(1).tolist()
        [2, 2, 2, 2]
    """
    check_choice("graph", graph, *get_args(Graph))
    at = torch.arange(count)
    if graph == "complete":
        return ~torch.eye(count, dtype=torch.bool)
    if graph == "ring":
        away = (at[:, None] - at).abs()
        return (away == 1) | ((away == count - 1) & (away > 0))
    if graph == "grid":
        columns = next(c for c in range(math.isqrt(count), 0, -1) if count % c == 0)
        row, column = at // columns, at % columns
        return (row[:, None] - row).abs() + (column[:, None] - column).abs() == 1
    for _ in range(TRIES):
        upper = (torch.rand(count, count, generator=generator) < probability).triu(1)
        if is_connected(edges := upper | upper.mT):
            return edges
    raise FederationError(
        f"a random graph of {count} clients with probability={probability} was not connected in"
        f" {TRIES} draws: use a larger probability"
    )


def is_connected(edges: Tensor) -> bool:
    """Return True if the graph is connected.

    Args:
        edges: Adjacency matrix, ``[n, n]``.
    """
    return int(connected_components(edges.numpy(), directed=False)[0]) == 1


def metropolis(edges: Tensor) -> Tensor:
    r"""Return Metropolis weights, symmetric and doubly stochastic, with self-loops.

    .. math:: W_{ij} = \frac{1}{1 + \max(d_i, d_j)} \text{ for an edge}, \qquad
        W_{ii} = 1 - \sum_{j \ne i} W_{ij}

    Args:
        edges: Adjacency matrix, ``[n, n]``.

    Returns:
        Mixing matrix, ``[n, n]``, in float64.

    Example:
        >>> metropolis(torch.tensor([[False, True], [True, False]])).tolist()
        [[0.5, 0.5], [0.5, 0.5]]
    """
    degree = edges.sum(1)
    weights = edges.double() / (1 + torch.maximum(degree[:, None], degree))
    return weights + torch.diag(1 - weights.sum(1))


def check_mixing(weights: Tensor) -> None:
    """Raise an error if a mixing matrix does not converge to the mean of the clients.

    Args:
        weights: Mixing matrix, ``[n, n]``.

    Raises:
        FederationError: If the matrix is not square, finite, non-negative and symmetric with row
            sums 1; if its graph is not connected; if mixing oscillates (a bipartite graph without
            self-loops).

    Example:
        >>> check_mixing(torch.full((3, 3), 1 / 3))
    """
    is_square = weights.ndim == 2 and len(weights) == weights.shape[1]
    is_right = is_square and bool(weights.isfinite().all())
    shown = None if is_right else weights.tolist()  # for the message; it may be large
    check_that("mixing_matrix", shown, is_right, "square and finite")
    rules = {
        "be at least 0": bool((weights >= 0).all()),
        "have rows that sum to 1": float((weights.sum(1) - 1).abs().max()) <= 1e-6,
        "be symmetric, which preserves the mean": float((weights - weights.mT).abs().max()) <= 1e-6,
        "connect all clients": is_connected(weights > 0),
        "have positive weights on the diagonal: it oscillates between two groups of clients": (
            len(weights) < 2 or float(torch.linalg.eigvalsh(weights.double())[0]) >= -1 + 1e-9
        ),
    }
    for rule, holds in rules.items():
        if not holds:
            raise FederationError(f"mixing_matrix must {rule}, got {weights.tolist()!s:.200}")
