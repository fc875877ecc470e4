"""FedDecorr: decorrelate the features of the last layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from lightning_fl.functional.decorrelation import correlation_penalty
from lightning_fl.objectives.recorder import LAST_INPUT
from lightning_fl.objectives.terms import ModelView, Term
from lightning_fl.options import check_number


class FedDecorr(Term):
    r"""Penalize correlations between features, which collapse where clients have few classes.

    FedDecorr (Shi et al., 2023), in the form of the authors' program; see
    :func:`~lightning_fl.functional.decorrelation.correlation_penalty`. The paper prints a penalty
    that is about as many times smaller as a batch has samples. The features are the input of the
    last layer. A batch with one sample adds 0. ``beta=0`` is FedAvg.

    Args:
        beta: Strength :math:`\beta`, at least 0. A policy may set it for each round and client.

    Raises:
        FederationError: If ``beta`` is negative; at the start of a fit, if the network cannot be
            traced, or does not end with a linear layer.

    Example:
        >>> from torch import nn
        >>> from lightning_fl import ClientModule
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> module = ClientModule(net, terms=[FedDecorr(beta=0.1)])
    """

    wants_trace = True
    wants_global_trace = False
    points = LAST_INPUT
    hyperparameters: ClassVar[Mapping[str, Mapping[str, Any]]] = {"beta": {"min": 0}}

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.beta = check_number("beta", beta, min=0)

    def forward(self, client_model: ModelView, global_model: ModelView, batch: Any) -> Tensor:
        """Return the penalty of the features of a batch."""
        return self.beta * correlation_penalty(client_model.trace.activations[-2].flatten(1))
