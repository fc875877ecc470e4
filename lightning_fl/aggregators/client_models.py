"""Base class of rules that keep a model of each client."""

from __future__ import annotations

from abc import ABC

import torch
from torch import Tensor

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.contracts.update import ClientUpdate


class ClientModels(Aggregator, ABC):
    """Base class of rules that keep a model of each client, from which it starts its next round.

    All clients begin with the initial model. Subclasses define ``compute``, which gets the
    updates of the round from ``self.gather_by_client("ids", "deltas")``, writes to ``models``, and
    sets ``begun`` to True.
    """

    #: The model of each client, ``[clients, P]``.
    models: Tensor
    #: Whether a round has been computed.
    begun: Tensor

    def allocate(self, server: Tensor) -> None:
        """Initialize all client models with the global model."""
        self.add_lists("ids", "deltas")
        self.register_buffer("models", server.repeat(self.known_federation.num_clients, 1))
        self.register_buffer("begun", torch.tensor(False))

    def start(self, server: Tensor, trained: Tensor | None = None) -> None:
        """Begin a round. The first round starts from the global model."""
        super().start(server, trained)
        if not self.begun:
            self.models[:] = server

    def models_for(self, clients: Tensor) -> Tensor:
        """Return the model of each client, ``[k, P]``."""
        return self.models[clients.to(self.models.device)]

    def update(self, clients: ClientUpdate) -> None:
        """Store updates until the end of the round."""
        self.append(ids=clients.clients, deltas=clients.delta)
