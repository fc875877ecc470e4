"""Averages of normalized updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from lightning_fl.aggregators.fedopt import FedOpt
from lightning_fl.aggregators.local_training import check_sgd
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.errors import FederationError
from lightning_fl.functional.drift import effective_steps
from lightning_fl.functional.summation import VectorSum, add_rows, sum_value
from lightning_fl.objectives import ClientModule, Proximal, Term
from lightning_fl.objectives.terms import settable


class FedNova(FedOpt):
    r"""Average updates per local step, so that clients with more steps do not count more.

    FedNova (Wang et al., 2020, eq. 9). With :math:`\Delta_k = w_k - w^t`, the weights
    :math:`p_k` of :class:`FedAvg` and :math:`\lVert a_k \rVert_1` of
    :func:`~lightning_fl.functional.drift.effective_steps`,

    .. math:: w^{t+1} = w^t + \tau_{\text{eff}} \sum_{k \in S_t} p_k
        \frac{\Delta_k}{\lVert a_k \rVert_1}, \qquad
        \tau_{\text{eff}} = \sum_{k \in S_t} p_k \lVert a_k \rVert_1.

    With a proximal term :math:`\tau_{\text{eff}}` is :math:`\sum_k p_k \tau_k`, as in the authors'
    program (JYWa/FedNova). Without it, and where all clients make equally many steps, it is
    :class:`FedAvg`.
    Floating buffers are averaged without normalization. Weight decay is not part of
    :math:`a`, as in the authors' program.

    Local training is SGD, with or without momentum, or without momentum and with a
    :class:`~lightning_fl.objectives.Proximal` term, whose strength is taken from the module and
    must not be set by the policy.

    Args:
        optimizer: Steps from the present model to the average above, as in :class:`FedOpt`; None is
            SGD with learning rate 1. SGD with momentum is the paper's server momentum.
        weighting: ``samples`` weights a client by its number of training samples. ``uniform``
            gives all clients equal weight.
        scheduler: See :class:`FedOpt`.

    Raises:
        FederationError: If the weighting is unknown or the optimizer refuses its options; at the
            start of a fit, if local training is another one.

    Example:
        >>> import torch
        >>> rule = FedNova()
        >>> rule.start(torch.zeros(1))
        >>> rule.update(ClientUpdate(torch.tensor([0, 1]), torch.tensor([[1.0], [9.0]]),
        ...     torch.tensor([5, 5]), num_steps=torch.tensor([1, 3])))
        >>> rule.compute()  # (1 + 3) / 2 * (1 / 1 + 9 / 3) / 2
        tensor([4.])
    """

    steps: VectorSum
    buffers_total: VectorSum

    def __init__(
        self,
        optimizer: OptimizerCallable | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, weighting, scheduler)
        self._momentum = self._mu = 0.0
        #: Names of the strengths of proximal terms in a plan.
        self._strengths: set[str] = set()

    def setup(self, federation: Federation) -> None:
        """Look at the clients' solver; refuse one that cannot be normalized."""
        super().setup(federation)
        self._mu = 0.0
        if federation.module is not None:
            terms = [m for m in federation.module.modules() if isinstance(m, Proximal)]
            self._mu = sum(term.mu for term in terms)
        if isinstance(federation.module, ClientModule):
            of_module = list(federation.module.terms)
            numbers = settable(cast("list[Term]", of_module)).items()
            self._strengths = {n for n, (i, _) in numbers if isinstance(of_module[i], Proximal)}
        self._look_at_momentum(federation)

    def _look_at_momentum(self, federation: Federation) -> None:
        """Note the momentum of clients; refuse a solver that cannot be normalized."""
        name = type(self).__name__
        self._momentum = check_sgd(name, federation)
        if self._mu and self._momentum:
            raise FederationError(
                f"{name} knows SGD with momentum and SGD with a proximal term, and clients train"
                " with both: leave one of them out"
            )

    def broadcast(self, plan: RoundPlan) -> Mapping[str, Tensor]:
        """Refuse a proximal term whose strength the policy sets; take the momentum of the round."""
        if self.federation is not None:  # a scheduler may have changed the optimizer
            self._look_at_momentum(self.federation)
        if drawn := sorted(self._strengths & plan.hyperparameters.keys()):
            raise FederationError(
                f"{type(self).__name__} takes the strength of proximal terms from the module, and"
                f" the policy sets {drawn[0]}: leave it out of the policy"
            )
        return super().broadcast(plan)

    def allocate(self, server: Tensor) -> None:
        """Declare the sums of buffers and of steps, too; see :meth:`FedOpt.allocate`."""
        super().allocate(server)
        n = len(server[: self.num_parameters])
        self.add_sum("total", n)
        self.add_sum("buffers_total", len(server) - n)
        self.add_sum("steps", 1)

    def update(self, clients: ClientUpdate) -> None:
        """Add normalized updates to the weighted sum."""
        steps = self._steps(clients).to(self.weight)
        tau = clients.num_steps.to(self.weight) if self._mu else steps  # type: ignore[union-attr]
        weights = self._weights(clients)
        n = self.total.length
        add_rows(self.total, clients.delta[:, :n], weights / steps)
        add_rows(self.buffers_total, clients.delta[:, n:], weights)
        add_rows(self.steps, (weights * tau)[:, None])
        self.weight += weights.sum()

    def _steps(self, clients: ClientUpdate) -> Tensor:
        """Return the effective steps of clients, ``[k]``."""
        if clients.num_steps is None or (self._mu and clients.lr is None):
            raise FederationError(
                f"{type(self).__name__} divides by the clients' local steps, which are not known:"
                " give the update num_steps and lr, or use a FederatedLoop"
            )
        pull = clients.lr * self._mu if self._mu and clients.lr is not None else None
        return effective_steps(clients.num_steps, self._momentum, pull)

    def _mean(self) -> Tensor:
        """Return the normalized average in float64, zeros when nobody returned."""
        weight = self.weight.clamp(min=1)
        mean = sum_value(self.total) / weight * (sum_value(self.steps) / weight)
        return torch.cat([mean, sum_value(self.buffers_total) / weight])
