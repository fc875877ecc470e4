"""Similarity of client updates."""

from __future__ import annotations

from torch import Tensor


def cosine_similarity(rows: Tensor) -> Tensor:
    r"""Return the pairwise cosine similarity of rows (Sattler et al., 2021); 0 for a row of zeros.

    .. math:: a_{ij} = \frac{\langle g_i, g_j \rangle}{\lVert g_i \rVert \, \lVert g_j \rVert}

    Args:
        rows: Client updates, ``[k, P]``.

    Returns:
        Cosines, ``[k, k]``, from -1 to 1.

    Example:
        >>> import torch
        >>> cosine_similarity(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]]))
        tensor([[ 1.,  0., -1.],
                [ 0.,  1.,  0.],
                [-1.,  0.,  1.]])
    """
    unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)
    cosines: Tensor = unit @ unit.mT
    return cosines.clamp(-1, 1)
