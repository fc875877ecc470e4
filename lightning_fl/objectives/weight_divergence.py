"""Weight divergence penalty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from lightning_fl.functional.proximal import proximal_penalty
from lightning_fl.objectives.proximal import Proximal
from lightning_fl.objectives.terms import ModelView
from lightning_fl.options import check_number


class WeightDivergence(Proximal):
    r"""Penalize the distance to the global model, :math:`c \lVert w^t - w \rVert_2^2`.

    The baseline WD of Mostafa (2019), section 4, which uses :math:`c = 1`. It is equal to
    :class:`Proximal` with :math:`\mu = 2 c`.

    Args:
        coefficient: Factor :math:`c`, at least 0. A policy may set it for each round and client.

    Raises:
        FederationError: If ``coefficient`` is negative or not finite.

    Example:
        >>> import torch
        >>> from lightning_fl.objectives import ModelView
        >>> own = ModelView({"w": torch.tensor([1.0, 2.0])})
        >>> WeightDivergence()(own, global_model=ModelView({"w": torch.zeros(2)}), batch=None)
        tensor(5.)
    """

    hyperparameters: ClassVar[Mapping[str, Mapping[str, Any]]] = {"coefficient": {"min": 0}}

    def __init__(self, coefficient: float = 1.0) -> None:
        super().__init__(mu=2 * check_number("coefficient", coefficient, min=0))
        self.coefficient = coefficient

    def forward(self, client_model: ModelView, global_model: ModelView, batch: Any) -> Tensor:
        """Return the penalty of the current parameters. The batch is not used."""
        own, anchor = client_model.params.values(), global_model.params.values()
        return proximal_penalty(own, anchor, 2 * self.coefficient)
