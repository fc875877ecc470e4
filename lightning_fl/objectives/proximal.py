"""FedProx: stay near the server."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_fl.functional.proximal import proximal_penalty
from lightning_fl.objectives.terms import Side, Term, check_strength


class Proximal(Term):
    r"""Penalise the distance to the server's model, :math:`\frac{\mu}{2} \lVert w - w^t \rVert^2`.

    FedProx (Li et al., 2020, eq. 2). The gradient :math:`\mu (w - w^t)` enters before momentum and
    weight decay, as part of the loss. ``mu=0`` is FedAvg.

    Args:
        mu: Strength, from 0 up.

    Raises:
        FederationError: If ``mu`` is negative or not finite.

    Example:
        >>> import torch
        >>> own = Side({"w": torch.tensor([1.0, 2.0])})
        >>> Proximal(mu=0.1)(own, fixed=Side({"w": torch.zeros(2)}), batch=None)
        tensor(0.2500)
    """

    uses_batch = False

    def __init__(self, mu: float) -> None:
        super().__init__()
        check_strength(mu=mu)
        self.mu = mu

    def forward(self, own: Side, fixed: Side, batch: Any) -> Tensor:
        """Return the penalty of the current parameters; the batch does not matter."""
        return proximal_penalty(own.params.values(), fixed.params.values(), self.mu)
