"""Power-of-choice: an average over the clients with the largest losses of a random draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_fl.aggregators.fedavg import FedAvg
from lightning_fl.contracts.client_part import ClientPart, MeanLosses
from lightning_fl.contracts.update import ClientUpdate


class PowerOfChoice(FedAvg):
    r"""Average over clients that are drawn by their losses (Cho et al., 2022).

    The rule is the mean of the updates. Clients evaluate the received model on all their training
    samples, and the rule notes these losses for :class:`~lightning_fl.samplers.HighLossSampler`.
    A client with a dropped update keeps its old loss. Losses are saved in the checkpoint.

    Args:
        weighting: ``uniform``, since the sampler draws candidates by their numbers of samples, or
            ``samples``.

    Raises:
        FederationError: At the start of a fit, if the module returns no losses of samples.

    Example:
        >>> from lightning_fl.contracts.context import Federation
        >>> from lightning_fl.types import Cohort
        >>> rule = PowerOfChoice()
        >>> rule.setup(Federation(num_clients=3, sampling=Cohort(size=1, clients=3)))
        >>> rule.start(torch.zeros(1))
        >>> rule.update(ClientUpdate(torch.tensor([1]), torch.ones(1, 1), torch.tensor([8]),
        ...     extras={"loss_before": torch.tensor([0.5])}))
        >>> rule.compute(), rule.losses
        (tensor([1.]), tensor([   inf, 0.5000,    inf], dtype=torch.float64))
    """

    grown: ClassVar[tuple[str, ...]] = ("losses",)
    #: Loss of each client when its update last returned, ``[N]``; infinite before, and empty before
    #: the first round.
    losses: Tensor
    needs = ("losses",)

    def __init__(self, weighting: Literal["samples", "uniform"] = "uniform") -> None:
        super().__init__(weighting)
        self.register_buffer("losses", torch.zeros(0, dtype=torch.float64))

    def client_parts(self) -> Sequence[ClientPart]:
        """Let clients evaluate the received model."""
        return [MeanLosses(after=False)]

    def allocate(self, server: Tensor) -> None:
        """Declare the losses of the round; see :meth:`FedAvg.allocate`."""
        super().allocate(server)
        self.add_lists("ids", "found")
        if not len(self.losses):
            self.losses = self.losses.new_full((self.known_federation.num_clients,), torch.inf)

    def known_losses(self) -> Tensor:
        """Return the losses of clients, ``[N]``; empty before the first round."""
        return self.losses

    def update(self, clients: ClientUpdate) -> None:
        """Add updates, and note the losses."""
        self.require_extras(clients, loss_before=())
        super().update(clients)
        self.append(ids=clients.clients, found=clients.extras["loss_before"].double())

    def compute(self) -> Tensor:
        """Return the global model plus the mean update."""
        if returned := self.gather_by_client("ids", "found"):
            ids, found = returned
            self.losses = self.losses.scatter(0, ids, found)
        return super().compute()
