"""Sums of low-rank products, beside decompositions of full matrices."""

from collections import Counter

import pytest
import torch

from lightning_fl.functional.low_rank import draw_ranks, factorize, product_svd

M, N = 7, 9


def factors(k, rank, seed=0, m=M, n=N):
    """Weighted factors of k clients, stacked, and the sum of their products."""
    draws = torch.Generator().manual_seed(seed)
    b = torch.randn(k, m, rank, generator=draws, dtype=torch.float64)
    a = torch.randn(k, rank, n, generator=draws, dtype=torch.float64)
    p = torch.rand(k, generator=draws, dtype=torch.float64)
    left = torch.cat([p[i] * b[i] for i in range(k)], 1)
    return left, torch.cat(list(a)), sum(p[i] * b[i] @ a[i] for i in range(k))


@pytest.mark.parametrize("k", [1, 2, 4, 9])  # also more than the sizes of the matrix
def test_the_decomposition_is_that_of_the_full_matrix(k):
    left, right, full = factors(k, 2)
    u, s, vh = product_svd(left, right)
    wanted = torch.linalg.svdvals(full)[: len(s)]
    torch.testing.assert_close(s, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(u * s @ vh, full, rtol=0, atol=1e-12)
    eye = torch.eye(len(s), dtype=torch.float64)
    torch.testing.assert_close(u.T @ u, eye, rtol=0, atol=1e-12)
    torch.testing.assert_close(vh @ vh.T, eye, rtol=0, atol=1e-12)
    assert (vh.gather(1, vh.abs().argmax(1, keepdim=True)) > 0).all()


@pytest.mark.parametrize("rank_of_product", [0, 1, 2])
@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_missing_rows_are_orthogonal_directions_of_the_basis(rank_of_product, scale):
    """Rows of zeros beside columns of zeros could never be trained."""
    left, right, full = factors(1, max(rank_of_product, 1))
    left, full = left * scale * (rank_of_product > 0), full * (rank_of_product > 0)
    basis = torch.randn(4, N, generator=torch.Generator().manual_seed(5)).double()
    b, a, lost = factorize(left, right, basis)
    torch.testing.assert_close(b @ a / scale, full, rtol=0, atol=1e-12)
    assert not b[:, rank_of_product:].any()
    torch.testing.assert_close(a @ a.T, torch.eye(4).double(), rtol=0, atol=1e-12)
    fill = a[rank_of_product:]
    within = torch.cat([basis, a[:rank_of_product]])
    projected = fill @ torch.linalg.pinv(within) @ within
    torch.testing.assert_close(projected, fill, rtol=0, atol=1e-12)
    assert lost == 0


@pytest.mark.parametrize("rank_of_product", [1, 2])
def test_missing_rows_do_not_depend_on_rounding(rank_of_product):
    """The basis of a later round is orthonormal, so that all its directions are alike."""
    left, right, _ = factors(1, rank_of_product)
    draws = torch.randn(N, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    basis = torch.linalg.qr(draws)[0].T
    _, a, _ = factorize(left, right, basis)
    _, other, _ = factorize(left * 3.0, right / 3.0, basis)
    torch.testing.assert_close(other, a, rtol=0, atol=1e-12)


def test_more_rows_than_columns():
    left, right, full = factors(3, 2, m=5, n=2)
    b, a, _ = factorize(left, right, torch.randn(4, 2).double())
    torch.testing.assert_close(b @ a, full, rtol=0, atol=1e-12)
    assert b.shape == (5, 4)


@pytest.mark.parametrize(
    ("shares", "clients", "counts"),
    [
        ({1: 0.1, 4: 0.9}, 10, {1: 1, 4: 9}),
        ({8: 1, 2: 1, 4: 1}, 7, {2: 3, 4: 2, 8: 2}),
        ({4: 3, 16: 1}, 3, {4: 2, 16: 1}),
        ({3: 0.2}, 5, {3: 5}),
    ],
)
def test_ranks_have_their_shares(shares, clients, counts):
    drawn = [draw_ranks(shares, clients, torch.Generator().manual_seed(s)) for s in range(20)]
    for ranks in drawn:
        assert Counter(ranks.tolist()) == counts
    if len(shares) > 1:
        assert len({tuple(ranks.tolist()) for ranks in drawn}) > 1
    assert torch.equal(drawn[3], draw_ranks(shares, clients, torch.Generator().manual_seed(3)))
