"""FedCM: the server's momentum in the steps of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_fl.aggregators.fedavg import FedAvg
from lightning_fl.contracts.client_part import ClientContext, ClientPart
from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.functional.summation import VectorSum, add_rows, sum_value
from lightning_fl.options import check_number


class FedCM(FedAvg):
    r"""Mix the mean gradient of the last round into each local step (Xu et al., 2021).

    .. math:: v = \alpha g + (1 - \alpha) m, \quad y \leftarrow y - \eta v, \qquad
        m^{t+1} = -\operatorname*{mean}_{k \in S_t} \frac{y_k - w^t}{K_k \eta_k}, \quad
        w^{t+1} = w^t + \eta_g \operatorname*{mean}_{k \in S_t} (y_k - w^t)

    :math:`g` is the gradient of a local step, :math:`K_k` the number of local steps and
    :math:`\eta_k` the learning rate of a client. Clients keep no state, and receive :math:`m` with
    the model. In the first round :math:`m = 0`, so that a step is :math:`\alpha \eta g`. Weight
    decay of the optimizer is added to :math:`v`. Buffers are averaged with step 1. ``alpha=1`` is
    :class:`FedAvg`.

    A client with a learning rate of 0 does not move, and adds 0 to :math:`m`.

    Args:
        alpha: Weight :math:`\alpha` of the client's own gradient, above 0 and at most 1.
        lr: Server learning rate :math:`\eta_g`, above 0.
        weighting: ``uniform`` as in the paper, or ``samples``.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if clients do not
            train with plain SGD, which :math:`m` inverts.

    Example:
        >>> rule = FedCM()
        >>> rule.start(torch.zeros(2))
        >>> rule.update(ClientUpdate(torch.tensor([0]), torch.tensor([[1.0, -2.0]]),
        ...     torch.tensor([8]), num_steps=torch.tensor([5]), lr=torch.tensor([0.1])))
        >>> rule.compute(), rule.momentum.tolist()
        (tensor([ 1., -2.]), [-2.0, 4.0])
    """

    needs = ("plain_sgd",)
    momentum: Tensor
    gradient: VectorSum

    def __init__(
        self,
        alpha: float = 0.1,
        lr: float = 1.0,
        weighting: Literal["samples", "uniform"] = "uniform",
    ) -> None:
        super().__init__(weighting)
        self.alpha = check_number("alpha", alpha, above=0, max=1)
        self.lr = check_number("lr", lr, above=0)

    def client_parts(self) -> Sequence[ClientPart]:
        """Let clients mix their gradients."""
        return [_MixedGradients(self.alpha)]

    def allocate(self, server: Tensor) -> None:
        """Declare the sum of mean gradients, and the momentum."""
        super().allocate(server)
        parameters = server[: self.num_parameters]
        self.add_sum("gradient", len(parameters))
        self.register_buffer("momentum", torch.zeros_like(parameters).double())

    def broadcast(self, plan: RoundPlan) -> Mapping[str, Tensor]:
        """Send the momentum."""
        return {"momentum": self.momentum.to(self.server.dtype)}

    def update(self, clients: ClientUpdate) -> None:
        """Add the moves of clients, and their mean gradients."""
        super().update(clients)
        assert clients.num_steps is not None
        assert clients.lr is not None
        way = (clients.num_steps * clients.lr).double()
        weights = self._weights(clients)
        scale = torch.where(way > 0, -weights.to(way) / way.where(way > 0, 1), 0)
        add_rows(self.gradient, clients.delta[:, : len(self.momentum)], scale.to(weights))

    def compute(self) -> Tensor:
        """Return the next model, and replace the momentum; both stay if no client returned."""
        if not self.weight:
            return self.server
        self.momentum = sum_value(self.gradient) / self._normalizer()
        move = self._mean()
        move[: len(self.momentum)] *= self.lr
        return (self.server + move).to(self.server.dtype)

    def metrics(self) -> dict[str, float]:
        """Return the norm of the momentum."""
        return {"momentum_norm": float(self.momentum.norm())} if self.server.numel() else {}


class _MixedGradients(ClientPart):
    """Replace the gradients of clients by their mixture with the momentum of the server."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def start(
        self, client: ClientContext, memory: dict[str, Tensor], broadcast: Mapping[str, Tensor]
    ) -> None:
        r"""Add :math:`(1 - \alpha) (m - g)` to the gradients of all local steps."""
        momentum = client.federation.known_layout.split(broadcast["momentum"][None])
        client.add_to_gradients(
            lambda params, gradients: {
                name: (1 - self.alpha) * (momentum[name] - gradient)
                for name, gradient in gradients.items()
            }
        )

    def end(self, client: ClientContext, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """Send nothing in addition to the update."""
        return {}
