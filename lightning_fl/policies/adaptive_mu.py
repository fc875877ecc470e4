"""Strength of the proximal term, adapted to the loss (Li et al., 2020, FedProx)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.feedback import Feedback
from lightning_fl.errors import FederationError
from lightning_fl.options import check_choice, check_integer, check_number
from lightning_fl.policies.base import (
    HyperparameterPolicy,
    PolicyWrapper,
    Signal,
    check_declared,
    shared_monitor,
    validated,
)
from lightning_fl.policies.schedule import Schedule


class AdaptiveMu(PolicyWrapper):
    r"""Increase :math:`\mu` when the loss increases, and decrease it when the loss decreases.

    The heuristic of Li et al. (2020, FedProx), section 5.3.2 and appendix C.3.3: :math:`\mu`
    increases by 0.1 when the loss of the global model has increased, and decreases by 0.1 after the
    loss has decreased in five rounds in a row. After a decrease of :math:`\mu` the count of rounds
    starts again, as after a round without a decrease of the loss. :math:`\mu` is at least 0. A loss
    that is not finite counts as an increase. All clients of a round use the same :math:`\mu`. It is
    the strength of a :class:`~lightning_fl.objectives.Proximal` term of the module, or of any
    number that the module declares.

    Args:
        mu: Initial value. The paper starts at 0 for heterogeneous clients, and at 1 for clients
            with equal distributions.
        step: Size of an increase or decrease.
        patience: Number of successive decreases of the loss that decrease :math:`\mu`.
        name: Name of the number in the module. If several terms have a ``mu``, it is
            ``Proximal.mu``.
        policy: All other hyperparameters. None means :class:`Schedule`.
        loss: Source of the loss. ``validation`` uses the server's validation samples. ``clients``
            uses the mean loss of the round's initial model that clients report on their first
            batch, weighted by their numbers of samples. It is the paper's training loss if all
            clients are sampled; otherwise it also varies with the cohort.
        monitor: Name of the logged metric that is the validation loss.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if the module does not
            declare the number; after a round without validation.

    Example:
        >>> policy = AdaptiveMu(mu=0.2, policy=Schedule(lr=0.1, num_steps=5))
        >>> sorted(policy.sample(0, torch.tensor([3, 8])))
        ['lr', 'mu', 'num_steps']
        >>> for loss in (2.0, 1.9, 2.1):
        ...     policy.learn(loss)
        >>> float(policy.mu)
        0.3
    """

    mu: Tensor
    last_loss: Tensor
    decreases: Tensor

    def __init__(
        self,
        mu: float = 0.0,
        step: float = 0.1,
        patience: int = 5,
        name: str = "mu",
        policy: HyperparameterPolicy | None = None,
        loss: Literal["validation", "clients"] = "validation",
        monitor: str = "val_loss",
    ) -> None:
        super().__init__(monitor)
        start = torch.tensor(check_number("mu", mu, min=0), dtype=torch.float64)
        self.step = check_number("step", step, above=0)
        self.patience = check_integer("patience", patience, min=1)
        self.name, self.policy = name, Schedule() if policy is None else policy
        self.loss = check_choice("loss", loss, "validation", "clients")
        own: Signal = "val_loss" if loss == "validation" else "client_losses"
        self.learns_from = self.policy.learns_from | {own}
        self.phases = self.policy.phases
        self.monitor = shared_monitor([self, self.policy] if own == "val_loss" else [self.policy])
        self.register_buffer("mu", start)
        #: Last finite loss; infinity if there was none.
        self.register_buffer("last_loss", torch.tensor(math.inf, dtype=torch.float64))
        #: Number of successive decreases of the loss.
        self.register_buffer("decreases", torch.tensor(0))

    def setup(self, federation: Federation) -> None:
        """Raise an error if the module does not declare the number."""
        super().setup(federation)
        values = {self.name: [float(self.mu)]}
        check_declared(type(self).__name__, values, federation, required=True)

    def sample(self, round: int, clients: Tensor) -> dict[str, Tensor]:
        """Return the hyperparameters of the other policy, and the current value."""
        values = self.policy.sample(round, clients)
        if self.name in values:
            raise FederationError(
                f"both {type(self).__name__} and {type(self.policy).__name__} set {self.name}:"
                " leave it out of the latter"
            )
        return {**values, self.name: self.mu.clone()}

    def update(self, feedback: Feedback) -> None:
        """Adapt the value to the loss after the round; update the other policy."""
        super().update(feedback)
        if self.loss == "clients":
            assert feedback.losses is not None
            assert feedback.weights is not None
            known = feedback.weights > 0
            if known.any():
                weights = feedback.weights[known].cpu()
                self.learn(float(feedback.losses[known].cpu() @ (weights / weights.sum())))
            return
        before, after = validated(self, feedback)
        if math.isfinite(before) and not self.last_loss.isfinite():
            self.last_loss.fill_(before)  # of the initial model
        self.learn(after)

    def learn(self, loss: float) -> None:
        """Adapt the value to the next loss.

        Args:
            loss: Loss of the global model.
        """
        mu, last, decreases = float(self.mu), float(self.last_loss), int(self.decreases)
        has_increased = not math.isfinite(loss) or loss > last
        decreases = decreases + 1 if math.isfinite(last) and loss < last else 0
        if has_increased:
            mu += self.step
        elif decreases == self.patience:
            mu, decreases = max(mu - self.step, 0.0), 0
        self.mu.fill_(round(mu, 12))  # 0.3 - 3 * 0.1 is 0
        self.decreases.fill_(decreases)
        if math.isfinite(loss):
            self.last_loss.fill_(loss)
