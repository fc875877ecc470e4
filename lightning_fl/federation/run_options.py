"""Options of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_fl.aggregators import Aggregator
from lightning_fl.policies import HyperparameterPolicy
from lightning_fl.runners import BufferPolicy
from lightning_fl.samplers import ClientSampler
from lightning_fl.transforms import UpdateTransform
from lightning_fl.types import FederationError


@dataclass(frozen=True)
class RunOptions:
    """Options of a run. :class:`~lightning_fl.callbacks.FederatedLoop` describes each of them.

    Raises:
        FederationError: If an option has the wrong type or is out of range.
    """

    aggregator: Aggregator
    policy: HyperparameterPolicy
    sampler: ClientSampler
    clients_per_round: int | None
    client_fraction: float | None
    min_clients: int
    on_client_error: str
    optimizer_state: str
    buffers: BufferPolicy | None
    monitor: str
    update_transforms: Sequence[UpdateTransform]
    client_state_memory_gb: float

    def __post_init__(self) -> None:
        for name, rule, kind in (
            ("aggregator", self.aggregator, Aggregator),
            ("policy", self.policy, HyperparameterPolicy),
            ("sampler", self.sampler, ClientSampler),
        ):
            if not isinstance(rule, kind):
                hint = f": write {rule.__name__}()" if isinstance(rule, type) else ""
                raise FederationError(f"{name} must be a {kind.__name__}, got {rule!r}{hint}")
        self._check_cohort(self.clients_per_round, self.client_fraction)
        if not isinstance(self.min_clients, int | np.integer) or self.min_clients < 1:
            raise FederationError(
                f"min_clients must be a positive integer, got {self.min_clients!r}"
            )
        for name, value, allowed in (
            ("on_client_error", self.on_client_error, ("skip", "raise")),
            ("optimizer_state", self.optimizer_state, ("reset", "keep")),
            ("buffers", self.buffers, ("average", "server", "local", None)),
        ):
            if value not in allowed:
                raise FederationError(f"{name} must be one of {allowed}, got {value!r}")
        for transform in self.update_transforms:
            if not isinstance(transform, UpdateTransform):
                raise FederationError(
                    f"update_transforms must contain UpdateTransforms, got {transform!r}"
                )
        if not self.client_state_memory_gb >= 0:
            raise FederationError(
                f"client_state_memory_gb must be at least 0, got {self.client_state_memory_gb!r}"
            )

    @staticmethod
    def _check_cohort(count: int | None, fraction: float | None) -> None:
        if count is not None and fraction is not None:
            raise FederationError(
                f"clients_per_round={count!r} and client_fraction={fraction!r} are mutually"
                " exclusive: set only one of them"
            )
        is_count = isinstance(count, int | np.integer) and not isinstance(count, bool)
        if count is not None and not (is_count and count >= 1):
            raise FederationError(
                f"clients_per_round must be a positive integer, got {count!r}: to sample a fraction"
                " of the clients, set client_fraction"
            )
        is_fraction = isinstance(fraction, float | int | np.floating) and 0 < fraction <= 1
        if fraction is not None and (isinstance(fraction, bool) or not is_fraction):
            raise FederationError(
                f"client_fraction must be in (0, 1], got {fraction!r}: to sample a number of"
                " clients, set clients_per_round"
            )

    @property
    def buffer_policy(self) -> BufferPolicy:
        """How the buffers of the clients are combined."""
        return self.buffers or "average"

    def cohort_size(self, num_clients: int) -> int:
        """Return the number of clients sampled per round.

        Args:
            num_clients: Number of clients.

        Raises:
            FederationError: If there are fewer clients than ``clients_per_round``.
        """
        if self.clients_per_round is None:
            return max(1, round((self.client_fraction or 1.0) * num_clients))
        if self.clients_per_round > num_clients:
            raise FederationError(
                f"clients_per_round must be at most the number of clients, {num_clients},"
                f" got {self.clients_per_round}"
            )
        return int(self.clients_per_round)
