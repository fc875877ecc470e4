"""Size of the server's step."""

from __future__ import annotations

from torch import Tensor


def extrapolation(mean_square: Tensor, square_of_mean: Tensor, eps: float) -> Tensor:
    r"""Return the step of FedExP (Jhunjhunwala et al., 2023, eq. 4).

    .. math:: \eta_g = \max \left\{ 1, \frac{\frac{1}{M} \sum_k \lVert \Delta_k \rVert^2}
        {2 (\lVert \bar \Delta \rVert^2 + \epsilon)} \right\}

    Args:
        mean_square: Mean of the squared norms of the updates :math:`\Delta_k`.
        square_of_mean: Squared norm of the mean update :math:`\bar \Delta`.
        eps: Constant :math:`\epsilon`.

    Example:
        >>> import torch
        >>> extrapolation(torch.tensor(8.0), torch.tensor(1.0), 0.0)
        tensor(4.)
    """
    return (mean_square / (2 * (square_of_mean + eps)).clamp(min=1e-37)).clamp(min=1)
