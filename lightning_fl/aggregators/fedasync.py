"""Asynchronous mixing of one client at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_fl.aggregators.asynchronous import AsynchronousAggregator
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.errors import FederationError
from lightning_fl.functional.summation import VectorSum, add_rows, sum_value
from lightning_fl.options import check_number


class FedAsync(AsynchronousAggregator):
    r"""Mix each local model into the global model when it arrives (Xie et al., 2019).

    Algorithm 1. Clients train all the time, each from the global model at its start. Each client
    that finishes, with the local model :math:`y`, makes a new version of the global model:

    .. math:: x^{t+1} = (1 - \alpha_t) x^t + \alpha_t y, \qquad \alpha_t = \alpha \, s(\tau)

    A round has one client: ``clients_per_round`` must be 1. Floating-point buffers are mixed like
    parameters. Clients of the paper also minimize
    :math:`\frac{\rho}{2} \lVert w - x^{t - \tau} \rVert^2`, with :math:`\rho = 0.005` in FedLab:
    add the term :class:`~lightning_fl.objectives.Proximal` to the module, whose global model is the
    one from which the client started.

    Requires an :class:`~lightning_fl.samplers.AsynchronousSampler`. A learning rate that changes
    over rounds is that of the round in which the update arrives, and so are integer buffers.

    Args:
        alpha: Mixing weight :math:`\alpha`, in (0, 1].
        options: The arguments of :class:`AsynchronousAggregator`, such as ``staleness``.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if the sampler is
            another one, or a round has several clients.

    Example:
        >>> import torch
        >>> rule = FedAsync(alpha=0.25)
        >>> rule.start(torch.ones(1))
        >>> rule.update(ClientUpdate(torch.tensor([7]), torch.tensor([[4.0]]), torch.tensor([3])))
        >>> rule.compute()  # 0.75 * 1 + 0.25 * 5
        tensor([2.])
    """

    total: VectorSum
    count: Tensor

    def __init__(self, alpha: float = 0.6, **options: Any) -> None:
        super().__init__(**options)
        self.alpha = check_number("alpha", alpha, above=0, max=1)

    def setup(self, federation: Federation) -> None:
        """Refuse rounds of several clients."""
        super().setup(federation)
        if federation.trainer is not None and (size := federation.sampling.size) > 1:
            raise FederationError(
                f"FedAsync makes a new model for each client that arrives, and a round has {size}"
                " clients: set clients_per_round=1, or use FedBuff, which buffers updates"
            )

    def update(self, clients: ClientUpdate) -> None:
        """Add weighted differences between the local models and the global model."""
        weights = self.alpha * self.weights(clients.clients)
        add_rows(self.total, self.moves(clients), weights)
        self.count += len(weights)

    def compute(self) -> Tensor:
        """Return the next version of the global model, unchanged if no client returned.

        Outside of a fit, several clients are mixed by the mean of their moves.
        """
        move = sum_value(self.total) / self.count.clamp(min=1)
        return (self.server + move).to(self.server.dtype)
