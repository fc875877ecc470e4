"""FedAMP: similar clients exchange messages."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_fl.aggregators.client_models import ClientModels
from lightning_fl.functional.attention import attention, mixed_model, squared_distances
from lightning_fl.options import check_choice, check_number


class FedAMP(ClientModels):
    r"""Move the model of each client towards the models of similar clients (Huang et al., 2021).

    The server keeps the model :math:`w_k` of each client. A client starts from a mixture

    .. math:: u_k = w_k + \sum_{j \neq k} a_{kj} (w_j - w_k), \qquad
        a_{kj} = \frac{\rho}{N - 1} e^{-\lVert w_k - w_j \rVert^2 / \sigma},

    and returns :math:`w_k \approx \arg\min_w f_k(w) + \frac{\mu}{2} \lVert w - u_k \rVert^2`: add
    the term :class:`~lightning_fl.objectives.Proximal` with :math:`\mu`, which is
    :math:`\lambda / \alpha` in the paper. The paper's step :math:`\alpha` is
    :math:`\rho \sigma / (N - 1)`; thus :math:`\rho \leq 1` keeps the weight of the own model from
    being negative. HeurFedAMP (``similarity="cosine"``) has
    :math:`a_{kj} = \rho \operatorname{softmax}_{j \neq k}(\sigma \cos(w_k, w_j))`, so that the
    weight of the own model is :math:`1 - \rho`.

    All clients begin with the initial model. A client outside the round, or with a dropped update,
    keeps its model, and others mix with it. Weights are computed over parameters, and each client
    keeps its own buffers. The global model for validation is the mean of the models of clients.
    :class:`~lightning_fl.callbacks.PersonalizedEvaluation` evaluates :math:`u_k` in the column
    ``server``. One model per client is kept in memory and saved in the checkpoint.

    Args:
        sigma: Scale :math:`\sigma` of the similarity, above 0. A good value depends on the network:
            the table of rounds shows the root mean square ``model_distance`` between clients, and
            the mean ``own_weight``.
        strength: Largest share :math:`\rho` of the other models, in [0, 1]. 0 is local training
            that is anchored at the client's own last model.
        similarity: ``distance``, or ``cosine`` for HeurFedAMP.

    Raises:
        FederationError: If an option is out of range.

    Example:
        >>> from lightning_fl.contracts.context import Federation
        >>> from lightning_fl.types import ClientUpdate, Cohort
        >>> rule = FedAMP(strength=0.5)
        >>> rule.setup(Federation(num_clients=2, sampling=Cohort(size=2, clients=2)))
        >>> rule.start(torch.zeros(1))
        >>> rule.update(ClientUpdate(torch.arange(2), torch.tensor([[0.0], [1.0]]), torch.ones(2)))
        >>> rule.compute(), rule.models_for(torch.tensor([0]))  # 0.5 / e of the way to the other
        (tensor([0.5000]), tensor([[0.1839]]))
    """

    weights: Tensor

    def __init__(
        self,
        sigma: float = 1.0,
        strength: float = 0.5,
        similarity: Literal["distance", "cosine"] = "distance",
    ) -> None:
        super().__init__()
        self.sigma = check_number("sigma", sigma, above=0)
        self.strength = check_number("strength", strength, min=0, max=1)
        self.similarity = check_choice("similarity", similarity, "distance", "cosine")

    def allocate(self, server: Tensor) -> None:
        """Declare the weights of other models in the start of a client, ``[clients, clients]``."""
        super().allocate(server)
        count = len(self.models)
        self.register_buffer("weights", torch.zeros(count, count, dtype=torch.float64))

    def models_for(self, clients: Tensor) -> Tensor:
        """Return the mixture from which each client starts, ``[k, P]``, with its own buffers."""
        starts = super().models_for(clients)
        parameters = self.models[:, : self.num_parameters]
        # One client after another, so that the bits do not depend on the others of a group.
        for start, client in zip(starts, clients.tolist(), strict=True):
            start[: parameters.shape[1]] = mixed_model(parameters, client, self.weights[client])
        return starts

    def compute(self) -> Tensor:
        """Replace the models of the clients of the round, and return the mean of all models."""
        if not (returned := self.gather_by_client("ids", "deltas")):
            return self.server
        ids, deltas = returned
        self.models = self.models.index_copy(0, ids, self.models_for(ids) + deltas)
        self.begun = torch.ones_like(self.begun)
        parameters = self.models[:, : self.num_parameters]
        self.weights = attention(parameters, self.strength, self.sigma, self.similarity)
        count = len(parameters)
        square = squared_distances(parameters).sum() / max(count * (count - 1), 1)
        self.round_metrics = {
            "own_weight": 1 - float(self.weights.sum() / count),
            "model_distance": float(square.sqrt()),
        }
        away = (self.models.double() - self.server).mean(0)
        return (self.server + away).to(self.server.dtype)
