"""Averages that give clients with a larger loss more weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.contracts.client_part import ClientPart, MeanLosses
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.errors import FederationError
from lightning_fl.functional.fairness import fair_weights
from lightning_fl.functional.summation import VectorSum, add_rows, sum_value
from lightning_fl.options import check_number

#: Largest logarithm of a weight; squared norms of updates must not overflow with it.
LARGEST = 500.0


class QFedAvg(Aggregator):
    r"""Give clients with a larger loss more weight, for more uniform accuracies (Li et al., 2020).

    q-FedAvg, Algorithm 2, minimizes :math:`\sum_k \frac{1}{q + 1} F_k^{q + 1}`. Let :math:`F_k` be
    the loss of the received model :math:`x` on all training samples of client :math:`k`, before it
    trains, :math:`y_k` its local model and :math:`L_k = 1 / \eta_k` with its learning rate
    :math:`\eta_k`. Then

    .. math:: x \leftarrow x - \frac{\sum_{k \in S} F_k^q \Delta w_k}{\sum_{k \in S} h_k}, \qquad
        \Delta w_k = L_k (x - y_k), \qquad
        h_k = q F_k^{q - 1} \lVert \Delta w_k \rVert^2 + L_k F_k^q.

    :math:`q = 0` is :class:`FedAvg` with uniform weights if all clients have the same learning
    rate. Numbers of samples have no effect: the paper samples clients in proportion to them
    (:class:`~lightning_fl.samplers.WeightedSampler`). The rule has no state but a scale of the
    losses, which cancels in the quotient. Floating-point buffers are averaged uniformly, and norms
    are those of the parameters.

    Local training is plain SGD: with momentum, weight decay, gradient clipping or a learning rate
    that changes within the round, :math:`\Delta w_k` is not a sum of gradients. The module needs a
    method ``federated_losses(batch)``; terms are not part of :math:`F_k`. Losses below 1e-10 count
    as 1e-10 (the authors' program, litian96/fair_flearn, adds 1e-10 to all losses). Attacks and
    update transforms change :math:`x - y_k`.

    Args:
        q: Exponent :math:`q`, at least 0. The paper uses 0.001 to 15, depending on the data.

    Raises:
        FederationError: If ``q`` is out of range; at the start of a fit, if local training is not
            plain SGD or the module returns no losses; after a round, if a loss is negative, or if
            :math:`F_k^q` exceeds the range of float64.

    Example:
        >>> rule = QFedAvg(q=1.0)
        >>> rule.start(torch.zeros(1))
        >>> rule.update(ClientUpdate(torch.arange(2), torch.tensor([[1.0], [-1.0]]),
        ...     torch.tensor([5, 5]), lr=torch.tensor([1.0, 1.0]),
        ...     extras={"loss_before": torch.tensor([3.0, 1.0])}))
        >>> rule.compute()  # (3 - 1) / (1 + 3 + 1 + 1)
        tensor([0.3333])
    """

    needs = ("losses", "plain_sgd", "no_decay")
    total: VectorSum
    curvature: VectorSum
    moments: VectorSum
    largest: Tensor
    scale: Tensor

    def __init__(self, q: float = 1.0) -> None:
        super().__init__()
        self.q = check_number("q", q, min=0)
        #: Learning rate to which those of the clients are a ratio; it cancels in the quotient.
        self._lr = 1.0

    def client_parts(self) -> Sequence[ClientPart]:
        """Let clients evaluate the received model."""
        return [MeanLosses(after=False)]

    def broadcast(self, plan: RoundPlan) -> Mapping[str, Tensor]:
        """Take the learning rate of the round; send nothing."""
        self._lr = _common_lr(plan, self.federation)
        return {}

    def allocate(self, server: Tensor) -> None:
        """Declare the sums of a round, and the scale of the losses."""
        self.add_sum("total", len(server))
        #: Sum of :math:`h_k`.
        self.add_sum("curvature", 1)
        #: Number of clients, sum of their losses, and of squared losses.
        self.add_sum("moments", 3)
        lowest = torch.full((1,), -math.inf, dtype=torch.float64, device=server.device)
        self.add_state("largest", lowest, dist_reduce_fx="max")
        #: Largest loss of the last round. It divides losses, so that their powers do not overflow.
        self.register_buffer("scale", torch.ones_like(server[:1]).double())

    def update(self, clients: ClientUpdate) -> None:
        """Add weighted updates to their sum."""
        if "loss_before" not in clients.extras or clients.lr is None:
            raise FederationError(
                f"{type(self).__name__} requires the learning rates and initial losses of clients:"
                " use it in a FederatedLoop, or set lr and loss_before in extras of the update"
            )
        self.require_extras(clients, loss_before=())
        losses = clients.extras["loss_before"].to(self.scale)
        if (least := float(losses.min())) < 0:
            raise FederationError(
                f"{type(self).__name__} requires losses of at least 0, and a client has the loss"
                f" {least:g}: use a loss that is not negative"
            )
        ratio = self._lr / clients.lr.to(self.scale)
        if not ratio.isfinite().all():
            raise FederationError(
                f"{type(self).__name__} divides by learning rates, which must be positive, got"
                f" {clients.lr.tolist()} for clients {clients.clients.tolist()}"
            )
        # Everything is multiplied by the common learning rate.
        weights, slopes = fair_weights(losses, self.q, self.scale, LARGEST)
        rows = clients.delta.to(torch.float64, copy=True)
        delta = rows[:, : self.num_parameters]
        squares = delta.square().sum(1) * ratio.square() / self._lr
        delta *= (weights * ratio)[:, None]
        add_rows(self.total, rows)
        add_rows(self.curvature, (slopes * squares + ratio * weights)[:, None])
        add_rows(self.moments, torch.stack([torch.ones_like(losses), losses, losses**2], 1))
        self.largest = torch.maximum(self.largest, losses.max())

    def compute(self) -> Tensor:
        """Return the next model, unchanged if no client returned."""
        count, total, squares = sum_value(self.moments).tolist()
        if not count:
            return self.server
        largest, curvature = float(self.largest), sum_value(self.curvature)
        self._check(largest, curvature)
        mean = total / count
        variance = max(squares / count - mean**2, 0.0)
        self.round_metrics = {"loss_mean": mean, "loss_variance": variance, "loss_max": largest}
        self.scale = self.scale.new_full((1,), max(largest, 1e-10))
        move = sum_value(self.total)
        move[: self.num_parameters] /= curvature
        if self.num_parameters is not None:
            move[self.num_parameters :] /= count
        return (self.server + move).to(self.server.dtype)

    def _check(self, largest: float, curvature: Tensor) -> None:
        """Refuse losses of which the weights are not in the range of float64."""
        exponent = self.q * math.log(max(largest, 1e-10) / float(self.scale))
        if exponent > LARGEST or not curvature > 0 or not curvature.isfinite():
            raise FederationError(
                f"{type(self).__name__}(q={self.q}) exceeds the range of float64 with losses up to"
                f" {largest:g}: decrease q"
            )


def _common_lr(plan: RoundPlan, federation: Federation | None) -> float:
    """Return the largest learning rate of a round, 1 if it is unknown."""
    if federation is None or federation.trainer is None:
        return 1.0 if plan.lr is None else float(plan.lr.max()) or 1.0
    group = federation.trainer.optimizers[0].param_groups[0]
    now, base = float(group["lr"]), float(group.get("initial_lr", group["lr"]))
    lr = base if plan.lr is None else float(plan.lr.max())
    if (factor := plan.hyperparameters.get("lr_factor")) is not None:
        lr *= float(factor.max())
    return (lr if now == base or not base else now * (lr / base)) or 1.0
