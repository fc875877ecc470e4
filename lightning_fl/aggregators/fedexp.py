"""FedExP: a server step that grows where clients disagree."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from lightning_fl.aggregators.fedavg import FedAvg
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.functional.extrapolation import extrapolation
from lightning_fl.functional.summation import VectorSum, add_rows, sum_value
from lightning_fl.options import check_number


class FedExP(FedAvg):
    r"""Extrapolate the mean update by a step that the updates determine.

    FedExP (Jhunjhunwala et al., 2023, eq. 4), with :math:`M` clients in a round:

    .. math:: w^{t+1} = w^t + \eta_g \bar \Delta, \qquad
        \eta_g = \max \left\{ 1, \frac{\frac{1}{M} \sum_k \lVert \Delta_k \rVert^2}
        {2 (\lVert \bar \Delta \rVert^2 + \epsilon)} \right\}

    Norms are over parameters. Buffers are averaged with step 1, because an extrapolated variance
    could be negative. The step has no upper bound: updates that cancel each other give
    a large one. The table of rounds shows it as ``server_step``. Equal
    updates, one client and a large :math:`\epsilon` give :class:`FedAvg`.

    The authors evaluate the mean of the last two models; here, the model itself is evaluated.

    Args:
        eps: Constant :math:`\epsilon`, at least 0. The authors use 0.001 for CIFAR-10, and 0.1 for
            EMNIST; their program multiplies it by :math:`M`.
        weighting: ``uniform`` as in the paper, or ``samples`` as in the authors' program: both
            means are then weighted by the numbers of samples.

    Raises:
        FederationError: If an option is out of range.

    Example:
        >>> import torch
        >>> rule = FedExP(eps=0.0)
        >>> rule.start(torch.zeros(4))
        >>> rule.update(ClientUpdate(torch.arange(4), torch.eye(4), torch.ones(4)))
        >>> rule.compute(), rule.metrics()  # orthogonal updates: the step is M / 2
        (tensor([0.5000, 0.5000, 0.5000, 0.5000]), {'server_step': 2.0})
    """

    squares: VectorSum

    def __init__(
        self, eps: float = 1e-3, weighting: Literal["samples", "uniform"] = "uniform"
    ) -> None:
        super().__init__(weighting)
        self.eps = check_number("eps", eps, min=0)

    def allocate(self, server: Tensor) -> None:
        """Declare the sum of squared norms; see :meth:`FedAvg.allocate`."""
        super().allocate(server)
        self.add_sum("squares", 1)

    def update(self, clients: ClientUpdate) -> None:
        """Add updates and their squared norms."""
        super().update(clients)
        squares = clients.delta[:, : self.num_parameters].double().square().sum(1, keepdim=True)
        add_rows(self.squares, squares, self._weights(clients))

    def compute(self) -> Tensor:
        """Return the global model plus the extrapolated mean update."""
        mean, n = self._mean(), self.num_parameters
        mean_square = sum_value(self.squares)[0] / self._normalizer()[0]
        step = extrapolation(mean_square, mean[:n].square().sum(), self.eps)
        self.round_metrics["server_step"] = float(step)
        mean[:n] *= step
        return (self.server + mean).to(self.server.dtype)
