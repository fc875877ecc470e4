"""Buffered asynchronous aggregation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fl.aggregators.asynchronous import AsynchronousAggregator
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.functional.summation import VectorSum, add_rows, sum_value
from lightning_fl.options import check_number


class FedBuff(AsynchronousAggregator):
    r"""Add the mean of the next :math:`K` updates, weighted by staleness (Nguyen et al., 2022).

    Algorithm 1. Clients train all the time, each from the global model at its start. The server
    collects the updates :math:`\Delta_k = y_k - x^{t - \tau_k}` of the next :math:`K` clients that
    finish, and then makes a step:

    .. math:: x^{t+1} = x^t + \frac{\eta_g}{K} \sum_{k} s(\tau_k) \Delta_k

    With ``momentum`` :math:`\beta`, the server moves by :math:`\eta_g v` with
    :math:`v \leftarrow \beta v + \frac1K \sum_k s(\tau_k) \Delta_k`.

    The weights lie outside the mean: stale updates make the step shorter. :math:`K` is the
    ``clients_per_round`` of the loop, of which clients with a dropped update are not counted. All
    clients have equal weight, whatever their numbers of samples. Floating-point buffers move by
    :math:`\frac1K \sum_k s(\tau_k) (y_k - x^t)`, which keeps variances positive.

    Requires an :class:`~lightning_fl.samplers.AsynchronousSampler`. If all clients of a round start
    together, the rule is ``FedAvg(weighting="uniform")``, bit for bit. A learning rate that changes
    over rounds is that of the round in which the update arrives, and so are integer buffers.

    Args:
        lr: Learning rate :math:`\eta_g` of the server.
        momentum: Momentum :math:`\beta` of the server.
        options: The arguments of :class:`AsynchronousAggregator`, such as ``staleness``.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if the sampler is
            another one.

    Example:
        >>> import torch
        >>> rule = FedBuff(lr=0.5)
        >>> rule.start(torch.zeros(2))
        >>> rule.update(ClientUpdate(clients=torch.tensor([0, 1]),
        ...     delta=torch.tensor([[0.0, 1.0], [4.0, 5.0]]), num_samples=torch.tensor([3, 1])))
        >>> rule.compute()
        tensor([1.0000, 1.5000])
    """

    total: VectorSum
    count: Tensor
    velocity: Tensor

    def __init__(self, lr: float = 1.0, momentum: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.lr = check_number("lr", lr, above=0)
        self.momentum = check_number("momentum", momentum, min=0, below=1)
        self.needs_trained_mask = bool(momentum)

    def allocate(self, server: Tensor) -> None:
        """Declare the velocity, too; see :meth:`AsynchronousAggregator.allocate`."""
        super().allocate(server)
        if self.momentum:
            zeros = torch.zeros_like(server[: self.num_parameters], dtype=torch.float64)
            self.register_buffer("velocity", zeros)

    def update(self, clients: ClientUpdate) -> None:
        """Add weighted updates to the sum."""
        rows, n = clients.delta, self.num_parameters
        if n is not None and n < rows.shape[1]:
            rows = torch.cat([rows[:, :n], self.moves(clients)[:, n:]], 1)
        weights = self.weights(clients.clients)
        add_rows(self.total, rows, weights)
        self.count += len(weights)

    def compute(self) -> Tensor:
        """Return the next version of the global model, unchanged if no client returned."""
        if not self.count:
            return self.server
        move = sum_value(self.total) / self.count
        if self.momentum:
            mean = move[: self.num_parameters]
            velocity = self.momentum * self.velocity + mean
            if self.trained is not None:  # what was trained in earlier rounds does not go on
                velocity = velocity.where(self.trained, mean)
            self.velocity = velocity
            move[: self.num_parameters] = velocity
        move[: self.num_parameters] *= self.lr
        return (self.server + move).to(self.server.dtype)
