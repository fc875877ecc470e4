"""Proximal term of FedProx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from lightning_fl.functional.proximal import proximal_penalty
from lightning_fl.objectives.terms import ModelView, Term
from lightning_fl.options import check_number


class Proximal(Term):
    r"""Penalize the distance to the global model, :math:`\frac{\mu}{2} \lVert w - w^t \rVert^2`.

    FedProx (Li et al., 2020, eq. 2). The gradient :math:`\mu (w - w^t)` is part of the loss, so it
    is added before momentum and weight decay. ``mu=0`` is FedAvg.

    Args:
        mu: Strength :math:`\mu`, at least 0. A policy may set it for each round and client, under
            the name ``mu``.

    Raises:
        FederationError: If ``mu`` is negative or not finite.

    Example:
        >>> import torch
        >>> own = ModelView({"w": torch.tensor([1.0, 2.0])})
        >>> Proximal(mu=0.1)(own, global_model=ModelView({"w": torch.zeros(2)}), batch=None)
        tensor(0.2500)
    """

    uses_batch = False
    hyperparameters: ClassVar[Mapping[str, Mapping[str, Any]]] = {"mu": {"min": 0}}

    def __init__(self, mu: float) -> None:
        super().__init__()
        self.mu = check_number("mu", mu, min=0)

    def forward(self, client_model: ModelView, global_model: ModelView, batch: Any) -> Tensor:
        """Return the penalty of the current parameters. The batch is not used."""
        return proximal_penalty(client_model.params.values(), global_model.params.values(), self.mu)
