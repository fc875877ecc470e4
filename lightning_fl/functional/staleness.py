"""Weights of stale client updates in asynchronous aggregation."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_fl.options import check_choice

#: Functions of staleness.
StalenessFunction = Literal["constant", "polynomial", "hinge"]


def staleness_weight(
    staleness: Tensor,
    function: StalenessFunction = "polynomial",
    exponent: float = 0.5,
    slope: float = 10.0,
    delay: float = 4.0,
) -> Tensor:
    r"""Return the weights :math:`s(\tau)` of updates by their staleness, in float64.

    The staleness :math:`\tau` is the number of versions of the global model between the one from
    which a client started and the one to which its update is applied. The functions are those of
    Xie et al. (2019, section 5.2); all are 1 for :math:`\tau = 0`:

    .. math:: s(\tau) = 1 \text{ (constant)}, \qquad
        s(\tau) = (1 + \tau)^{-a} \text{ (polynomial)}, \qquad
        s(\tau) = \begin{cases} 1 & \tau \le b \\ \frac{1}{A (\tau - b) + 1} & \tau > b
        \end{cases} \text{ (hinge)}

    Args:
        staleness: :math:`\tau`, at least 0, of any shape.
        function: ``constant``, ``polynomial`` or ``hinge``.
        exponent: :math:`a` of the polynomial.
        slope: :math:`A` of the hinge.
        delay: :math:`b` of the hinge.

    Raises:
        FederationError: If the function is unknown.

    Example:
        >>> staleness_weight(torch.tensor([0, 3, 8]))
        tensor([1.0000, 0.5000, 0.3333], dtype=torch.float64)
        >>> staleness_weight(torch.tensor([4, 5]), "hinge")
        tensor([1.0000, 0.0909], dtype=torch.float64)
    """
    check_choice("function", function, *get_args(StalenessFunction))
    tau = staleness.double()
    if function == "constant":
        return torch.ones_like(tau)
    if function == "polynomial":
        return (1 + tau) ** -exponent
    return 1 / (slope * (tau - delay).clamp(min=0) + 1)
