"""Hyperparameters fixed in advance."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fl.policies.base import HyperparameterPolicy
from lightning_fl.types import FederationError


class Schedule(HyperparameterPolicy):
    r"""The same for all clients: :math:`\eta_t = \eta_0 \cdot \text{decay}^t`, and work likewise.

    Args:
        lr: Learning rate :math:`\eta_0` of the first round; None keeps the module's own.
        num_steps: Local steps (batches) a client makes each round.
        local_epochs: The same as passes over the client's own data. Without either, 1.
        decay: Factor of the learning rate from one round to the next.
        steps_decay: Factor of ``num_steps`` from one round to the next; it is rounded, and at
            least 1.

    Raises:
        FederationError: If a value is out of range, or both kinds of work are given.

    Example:
        >>> Schedule(lr=0.1, num_steps=5, decay=0.5).sample(2, torch.tensor([3, 8]))
        {'lr': tensor([0.0250, 0.0250], dtype=torch.float64), 'num_steps': tensor([5, 5])}
    """

    def __init__(
        self,
        lr: float | None = None,
        num_steps: int | None = None,
        local_epochs: float | None = None,
        decay: float = 1.0,
        steps_decay: float = 1.0,
    ) -> None:
        super().__init__()
        if num_steps is not None and local_epochs is not None:
            raise FederationError(
                f"num_steps={num_steps} and local_epochs={local_epochs} both say how much work a"
                " client does: give one of them"
            )
        if num_steps is not None and (num_steps < 1 or int(num_steps) != num_steps):
            raise FederationError(f"num_steps must be a whole number from 1 up, got {num_steps}")
        if steps_decay != 1 and num_steps is None:
            raise FederationError(f"steps_decay={steps_decay} is that of num_steps: give num_steps")
        positive = {"lr": lr, "local_epochs": local_epochs}
        for name, value in (positive | {"decay": decay, "steps_decay": steps_decay}).items():
            if value is not None and not 0 < value < float("inf"):
                raise FederationError(f"{name} must be positive and finite, got {value}")
        self.lr, self.num_steps = lr, num_steps
        self.decay, self.steps_decay = decay, steps_decay
        self.local_epochs = 1.0 if num_steps is None and local_epochs is None else local_epochs

    def sample(self, round: int, clients: Tensor) -> dict[str, Tensor]:
        """Return the round's values, one for each of the clients."""
        factor, steps_factor = self.decay**round, self.steps_decay**round
        values: dict[str, float] = {}
        if self.lr is not None:
            values["lr"] = self.lr * factor
        elif self.decay != 1:
            values["lr_factor"] = factor
        if self.local_epochs is not None:
            values["local_epochs"] = self.local_epochs
        rows = {
            name: torch.full((len(clients),), value, dtype=torch.float64)
            for name, value in values.items()
        }
        if self.num_steps is not None:
            steps = max(1, int(self.num_steps * steps_factor + 0.5))
            rows["num_steps"] = torch.full((len(clients),), steps)
        return rows
