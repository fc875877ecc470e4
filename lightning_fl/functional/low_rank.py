r"""Sums of low-rank products :math:`B_k A_k`, and their factors of a given rank.

Nothing here forms a matrix of the size of the products: :math:`\sum_k p_k B_k A_k` is the product
of the stacked factors :math:`[p_1 B_1, p_2 B_2, \dots]` and :math:`[A_1; A_2; \dots]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def product_svd(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return the singular value decomposition of a product from decompositions of its factors.

    With :math:`L = Q_1 R_1` and :math:`R^\top = Q_2 R_2` it is that of the small matrix
    :math:`R_1 R_2^\top`. The sign of each pair of vectors is such that the entry of the right
    vector with the largest magnitude is positive.

    Args:
        left: :math:`L`, ``[m, q]``.
        right: :math:`R`, ``[q, n]``.

    Returns:
        ``u``, ``[m, t]``, the singular values ``s``, ``[t]``, in descending order, and ``vh``,
        ``[t, n]``, with ``t = min(m, n, q)``, so that ``u * s @ vh`` is ``left @ right``.

    Example:
        >>> u, s, vh = product_svd(torch.tensor([[3.0], [4.0]]), torch.tensor([[0.0, -2.0]]))
        >>> s, vh.abs()
        (tensor([10.]), tensor([[0., 1.]]))
    """
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.T)
    u, s, vh = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    return _oriented(q_left @ u, s, vh @ q_right.T)


def _oriented(u: Tensor, s: Tensor, vh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the sign of each pair of singular vectors; see :func:`product_svd`."""
    largest = vh.gather(1, vh.abs().argmax(1, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0).to(vh)
    return u * sign.T, s, vh * sign


def factorize(left: Tensor, right: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return the best factors of rank :math:`r` of a product, as LoRA adapters.

    With :math:`L R = U S V^\top`, these are :math:`B = U_r S_r` and :math:`A = V_r^\top`. The first
    :math:`q` columns of :math:`B` and rows of :math:`A` are the best factors of rank :math:`q`, for
    all :math:`q \le r`. Where the product has a rank below :math:`r`, columns of :math:`B` are 0,
    and rows of :math:`A` are orthonormal directions of the part of ``basis`` that is orthogonal to
    the other rows, in which the first rows of ``basis`` count most: a row of zeros would stay zero
    in training, as each factor's gradient is a multiple of the other factor.

    Args:
        left: :math:`L`, ``[m, q]``.
        right: :math:`R`, ``[q, n]``.
        basis: Rows that fill :math:`A`, ``[r, n]``.

    Returns:
        :math:`B`, ``[m, r]``, :math:`A`, ``[r, n]``, and the share of the squared Frobenius norm of
        the product that is beyond rank :math:`r`, a scalar.

    Example:
        >>> one = torch.ones(1, 3, dtype=torch.float64)
        >>> b, a, lost = factorize(one.T, one, torch.eye(2, 3, dtype=torch.float64))
        >>> torch.allclose(b @ a, one.T @ one), torch.allclose(a @ a.T, torch.eye(2).double())
        (True, True)
    """
    rank = len(basis)
    u, s, vh = product_svd(left, right)
    energy = s.square()
    lost = energy[rank:].sum() / energy.sum().clamp(min=torch.finfo(s.dtype).tiny)
    # Smaller singular values are rounding, by the error bound of the decompositions.
    scale = torch.linalg.matrix_norm(left) * torch.linalg.matrix_norm(right)
    noise = torch.finfo(s.dtype).eps * max(left.shape[0], right.shape[1]) * scale
    kept = (s[:rank] > noise).to(s)
    a = _padded(vh[:rank] * kept[:, None], rank)
    b = _padded((u[:, :rank] * s[:rank] * kept).T, rank)
    kept = _padded(kept, rank)
    # Computed also where no row is missing, since a branch would wait for the device. Projected
    # twice, as the first projection leaves a part of the size of its rounding.
    rest = basis - basis @ a.T @ a
    rest = rest - rest @ a.T @ a
    # Orthonormal rows, such as those of the last round, have equal singular values, and rounding
    # would choose among their directions. Different weights separate them.
    rest = rest * torch.arange(rank, 0, -1).to(rest)[:, None]
    fill = _padded(_oriented(*torch.linalg.svd(rest, full_matrices=False))[2], rank)
    index = ((1 - kept).cumsum(0) - 1).clamp(min=0).long()
    return b.T, a + (1 - kept)[:, None] * fill[index], lost


def _padded(rows: Tensor, count: int) -> Tensor:
    """Append zeros to a tensor up to a number of rows."""
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def product_norms(left: Tensor, right: Tensor) -> Tensor:
    r"""Return the Frobenius norm of each product, :math:`\lVert B_k A_k \rVert_F`, ``[k]``.

    Args:
        left: :math:`B_k`, ``[k, m, r]``.
        right: :math:`A_k`, ``[k, r, n]``.

    Example:
        >>> product_norms(torch.full((1, 2, 1), 2.0), torch.ones(1, 1, 2))
        tensor([4.])
    """
    grams = (left.mT @ left) * (right @ right.mT).mT
    return grams.sum((1, 2)).clamp(min=0).sqrt()


def draw_ranks(shares: Mapping[int, float], num_clients: int, generator: torch.Generator) -> Tensor:
    """Draw the rank of each client, ``[num_clients]``, so that ranks have given shares.

    The counts are the shares of ``num_clients``, rounded by largest remainders; which clients have
    a rank is random.

    Args:
        shares: Positive shares by rank; only their ratios matter.
        num_clients: Number of clients.
        generator: Source of random numbers.

    Example:
        >>> draw_ranks({2: 0.5, 8: 0.5}, 4, torch.Generator()).sort().values
        tensor([2, 2, 8, 8])
    """
    ranks: Sequence[int] = sorted(shares)
    exact = torch.tensor([shares[rank] for rank in ranks], dtype=torch.float64)
    exact = exact / exact.sum() * num_clients
    # Rounded, so that a share of 0.1 of 10 clients is one client.
    counts = (exact + 1e-9).floor()
    order = (exact - counts).argsort(descending=True, stable=True)
    counts[order[: num_clients - int(counts.sum())]] += 1
    drawn = torch.tensor(ranks).repeat_interleave(counts.long())
    return drawn[torch.randperm(num_clients, generator=generator)]
