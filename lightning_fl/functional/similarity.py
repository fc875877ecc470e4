"""Similarity of client updates."""

from __future__ import annotations

import torch.nn.functional as F
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
    unit = F.normalize(rows)
    return (unit @ unit.mT).clamp(-1, 1)
