"""Options of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_fl.aggregators import Aggregator, FedAvg
from lightning_fl.contracts.phases import Phase
from lightning_fl.options import (
    check_choice,
    check_exclusive,
    check_integer,
    check_number,
    check_that,
)
from lightning_fl.policies import HyperparameterPolicy, Schedule
from lightning_fl.runners import BufferPolicy
from lightning_fl.samplers import ClientSampler, UniformSampler
from lightning_fl.transforms import UpdateTransform

#: Options that are rules, and their base classes.
#:
#: :meta hide-value:
RULES = {"aggregator": Aggregator, "policy": HyperparameterPolicy, "sampler": ClientSampler}


@dataclass(frozen=True)
class RunOptions:
    """Options of a run. :class:`~lightning_fl.callbacks.FederatedLoop` describes each of them.

    Raises:
        FederationError: If an option has the wrong type or is out of range.
    """

    aggregator: Aggregator = field(default_factory=FedAvg)
    policy: HyperparameterPolicy = field(default_factory=Schedule)
    sampler: ClientSampler = field(default_factory=UniformSampler)
    clients_per_round: int | None = None
    client_fraction: float | None = None
    min_clients: int = 1
    optimizer_state: str = "reset"
    buffers: BufferPolicy | None = None
    update_transforms: Sequence[UpdateTransform] = ()
    local_parameters: Sequence[str] = ()

    def __post_init__(self) -> None:
        count, fraction = self.clients_per_round, self.client_fraction
        check_exclusive(clients_per_round=count, client_fraction=fraction)
        check_integer("clients_per_round", count, min=1, optional=True)
        check_number("client_fraction", fraction, above=0, max=1, optional=True)
        check_integer("min_clients", self.min_clients, min=1)
        check_choice("optimizer_state", self.optimizer_state, "reset", "keep", "local")
        check_choice("buffers", self.buffer_policy, "average", "server", "local")
        given = [(name, vars(self)[name], kind) for name, kind in RULES.items()]
        given += [("each of update_transforms", t, UpdateTransform) for t in self.update_transforms]
        for name, value, kind in given:
            check_that(name, value, isinstance(value, kind), f"an instance of {kind.__name__}")
        names = self.local_parameters
        check_that("local_parameters", names, not isinstance(names, str), "a list of patterns")

    @property
    def plain(self) -> dict[str, Any]:
        """Options that are neither rules nor update transforms, by name."""
        values = vars(self) | {"buffers": self.buffer_policy}
        return {n: v for n, v in values.items() if n not in (*RULES, "update_transforms")}

    @property
    def phases(self) -> Sequence[Phase]:
        """Phases of local training."""
        return self.policy.phases

    @property
    def buffer_policy(self) -> BufferPolicy:
        """How the buffers of the clients are combined."""
        return "average" if self.buffers is None else self.buffers

    def cohort_size(self, num_clients: int) -> int:
        """Return the number of clients sampled per round.

        Args:
            num_clients: Number of clients.

        Raises:
            FederationError: If there are fewer clients than ``clients_per_round``.
        """
        if self.clients_per_round is None:
            return max(1, round((self.client_fraction or 1.0) * num_clients))
        hint, count = f"there are {num_clients} clients", self.clients_per_round
        return check_integer("clients_per_round", count, min=1, max=num_clients, hint=hint)
