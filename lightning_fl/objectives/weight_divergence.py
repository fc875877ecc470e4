"""Weights that stay near the server's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_fl.functional.proximal import proximal_penalty
from lightning_fl.objectives.terms import Side, Term
from lightning_fl.types import FederationError


class WeightDivergence(Term):
    r"""Penalise the distance to the server's model, :math:`c \lVert w^t - w \rVert_2^2`.

    The baseline WD of Mostafa (2019), section 4, who prints :math:`c = 1`. It is
    :class:`Proximal` with :math:`\mu = 2 c`.

    Args:
        coefficient: Factor :math:`c`, from 0 up.

    Raises:
        FederationError: If it is negative or not finite.

    Example:
        >>> import torch
        >>> own = Side({"w": torch.tensor([1.0, 2.0])})
        >>> WeightDivergence()(own, fixed=Side({"w": torch.zeros(2)}), batch=None)
        tensor(5.)
    """

    uses_batch = False

    def __init__(self, coefficient: float = 1.0) -> None:
        super().__init__()
        if not 0 <= coefficient < float("inf"):
            raise FederationError(f"coefficient must be finite and at least 0, got {coefficient}")
        self.coefficient = coefficient

    def forward(self, own: Side, fixed: Side, batch: Any) -> Tensor:
        """Return the penalty of the current parameters; the batch does not matter."""
        return proximal_penalty(own.params.values(), fixed.params.values(), 2 * self.coefficient)
