"""Graphs and mixing matrices: by hand, their properties, and what is refused."""

import pytest
import torch

from lightning_fl.functional.mixing import adjacency, check_mixing, is_connected, metropolis
from lightning_fl.types import FederationError


def edges(graph, count, probability=0.5, seed=0):
    found = adjacency(graph, count, probability, torch.Generator().manual_seed(seed))
    return {(i, j) for i, j in found.nonzero().tolist() if i < j}, found


def test_graphs_by_hand():
    assert edges("ring", 5)[0] == {(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)}
    assert edges("ring", 2)[0] == {(0, 1)}
    assert edges("ring", 1)[0] == set()
    assert edges("grid", 6)[0] == {(0, 1), (2, 3), (4, 5), (0, 2), (1, 3), (2, 4), (3, 5)}
    assert edges("complete", 3)[0] == {(0, 1), (0, 2), (1, 2)}


@pytest.mark.parametrize("graph", ["ring", "grid", "erdos_renyi", "complete"])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 12])
def test_metropolis_weights_mix(graph, count):
    _, found = edges(graph, count)
    assert torch.equal(found, found.mT)
    assert not found.diagonal().any()
    assert is_connected(found)
    weights = metropolis(found)
    check_mixing(weights)
    torch.testing.assert_close(weights.sum(0), torch.ones(count, dtype=torch.float64))
    far = torch.linalg.matrix_power(weights, 2000)
    torch.testing.assert_close(far, torch.full_like(far, 1 / count), atol=1e-6, rtol=0)


def test_metropolis_weights_by_hand():
    star = torch.tensor([[0, 1, 1], [1, 0, 0], [1, 0, 0]], dtype=torch.bool)
    third = 1 / 3
    expected = torch.tensor([[third, third, third], [third, 2 / 3, 0], [third, 0, 2 / 3]])
    torch.testing.assert_close(metropolis(star), expected.double(), atol=1e-7, rtol=0)


def test_random_graphs_depend_on_the_seed_alone():
    assert torch.equal(edges("erdos_renyi", 9, seed=1)[1], edges("erdos_renyi", 9, seed=1)[1])
    assert not torch.equal(edges("erdos_renyi", 9, seed=1)[1], edges("erdos_renyi", 9, seed=2)[1])
    with pytest.raises(FederationError, match=r"probability=0\.001 was not connected"):
        edges("erdos_renyi", 9, 0.001)


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        ([[1.0, 0.0]], r"square and finite, got \[\[1.0, 0.0\]\]"),
        ([[0.9, 0.0], [0.0, 1.0]], "rows that sum to 1"),
        ([[1.5, -0.5], [-0.5, 1.5]], "must be at least 0"),
        ([[float("nan"), 1.0], [1.0, 0.0]], "finite"),
        ([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]], "symmetric"),
        ([[1.0, 0.0], [0.0, 1.0]], "must connect all clients"),
        ([[0.0, 1.0], [1.0, 0.0]], "oscillates between two groups"),
    ],
)
def test_matrices_that_do_not_mix_are_refused(matrix, words):
    with pytest.raises(FederationError, match=words):
        check_mixing(torch.tensor(matrix, dtype=torch.float64))
