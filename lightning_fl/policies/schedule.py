"""Fixed hyperparameter schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.phases import Phase
from lightning_fl.errors import FederationError
from lightning_fl.options import check_exclusive, check_integer, check_number
from lightning_fl.policies.base import POSITIVE, HyperparameterPolicy, check_declared


class Schedule(HyperparameterPolicy):
    r"""Use the same hyperparameters for all clients, with exponential decay over rounds.

    The learning rate is :math:`\eta_t = \eta_0 \cdot \text{decay}^t`, and the number of local
    steps decays in the same way.

    Args:
        lr: Learning rate :math:`\eta_0` of the first round. None uses that of the module.
        num_steps: Number of local steps (batches) per client and round.
        local_epochs: Number of epochs over the client's data, instead of ``num_steps``. The default
            is 1 epoch.
        decay: Factor of the learning rate per round.
        steps_decay: Factor of ``num_steps`` per round. The result is rounded, and is at least 1.
        values: Numbers that the module declares, by name, such as ``mu`` of a ``Proximal`` term.
            They replace those of the module.
        phases: Phases of the local training of each client, in order, which train some of the
            parameters (:class:`~lightning_fl.runners.Phase`). By default, all are trained together.

    Raises:
        FederationError: If a value is out of range, both ``num_steps`` and ``local_epochs`` are
            given, or ``values`` has a name of another argument. At the start of a fit, if the
            module does not declare a name of ``values``.

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
        values: Mapping[str, float] | None = None,
        phases: Sequence[Phase] = (),
    ) -> None:
        super().__init__(phases=phases)
        check_exclusive(num_steps=num_steps, local_epochs=local_epochs)
        self.num_steps = check_integer("num_steps", num_steps, min=1, optional=True)
        self.lr = check_number("lr", lr, above=0, optional=True)
        self.decay = check_number("decay", decay, above=0)
        self.steps_decay = check_number("steps_decay", steps_decay, above=0)
        if steps_decay != 1 and num_steps is None:
            raise FederationError(f"steps_decay={steps_decay} requires num_steps: set num_steps")
        epochs = 1.0 if num_steps is None and local_epochs is None else local_epochs
        self.local_epochs = check_number("local_epochs", epochs, above=0, optional=True)
        self.values = None if values is None else dict(values)
        for name, value in (self.values or {}).items():
            check_number(f"{name} in values", value)
            if name in POSITIVE:
                raise FederationError(f"values must not contain {name}: set the argument {name}")

    def setup(self, federation: Federation) -> None:
        """Raise an error if the module does not declare the numbers to set."""
        super().setup(federation)
        values = {name: [value] for name, value in (self.values or {}).items()}
        check_declared(f"{type(self).__name__}(values=...)", values, federation, required=True)

    def sample(self, round: int, clients: Tensor) -> dict[str, Tensor]:
        """Return the values of the round, one per client."""
        factor = self.decay**round
        values: dict[str, float] = {}
        if self.lr is not None:
            values["lr"] = self.lr * factor
        elif self.decay != 1:
            values["lr_factor"] = factor
        if self.local_epochs is not None:
            values["local_epochs"] = self.local_epochs
        values |= self.values or {}
        rows = {
            name: torch.full((len(clients),), value, dtype=torch.float64)
            for name, value in values.items()
        }
        if self.num_steps is not None:
            steps = max(1, int(self.num_steps * self.steps_decay**round + 0.5))
            rows["num_steps"] = torch.full((len(clients),), steps)
        return rows
