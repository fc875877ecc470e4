"""Clients of asynchronous rounds, in the order in which they finish on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_fl.contracts.context import Federation
from lightning_fl.errors import FederationError
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.options import check_integer
from lightning_fl.policies.base import local_steps
from lightning_fl.samplers.base import ClientSampler
from lightning_fl.samplers.clock import Flush, VirtualClock
from lightning_fl.samplers.durations import SimulatedDurations

#: Maps a client and the round in which it starts to seconds.
Seconds = Callable[[int, int], float]


@runtime_checkable
class HasDurations(Protocol):
    """Callback that simulates how long clients train, such as ``ClientFaults``."""

    durations: SimulatedDurations


class AsynchronousSampler(ClientSampler):
    """Let a constant number of clients train at any time, and aggregate those that finish next.

    On a virtual clock, ``concurrency`` clients train at any time. A client that finishes is
    replaced at once by a random client that neither trains nor waits for aggregation. The clients
    of a round are the next ``clients_per_round`` that finish: they fill the buffer of the server,
    which is then aggregated. A client starts from the global model at the time of its start, so its
    update may be stale. The aggregator must be an asynchronous one, such as
    :class:`~lightning_fl.aggregators.FedBuff` or :class:`~lightning_fl.aggregators.FedAsync`.
    A virtual clock defines the order of events (``lightning_fl.samplers.clock``).

    Durations are those of a :class:`~lightning_fl.callbacks.ClientFaults` callback of the Trainer.
    If all clients train or wait, a place stays empty until the next aggregation;
    ``concurrency + clients_per_round - 1`` clients keep all places taken.

    The clients depend on the seed of the run, the durations, ``concurrency`` and
    ``clients_per_round`` only. With equal durations and ``concurrency`` equal to
    ``clients_per_round``, they are those of :class:`UniformSampler`.

    The table of rounds has the columns ``virtual_time``, the time of the aggregation in seconds,
    and ``staleness_mean`` and ``staleness_max``, the staleness of the updates of the round, in
    rounds.

    The duration of a client's work must be known when it starts. The policy must therefore choose
    the same number of local steps for a client in every round and with any other clients.

    Args:
        concurrency: Number of clients in training at any time.

    Raises:
        FederationError: If an option is out of range. At the start of a fit, if there are fewer
            clients than ``concurrency``, the aggregator ignores staleness, or there are no
            durations. In a round, if the number of local steps of a client changes.

    Example:
        >>> AsynchronousSampler(concurrency=20).is_asynchronous
        True
    """

    is_asynchronous = True

    def __init__(self, concurrency: int) -> None:
        self.concurrency = check_integer("concurrency", concurrency, min=1)
        #: The clock of the fit; None before a fit begins.
        self._clock: VirtualClock | None = None
        self._federation: Federation | None = None
        self._steps = torch.empty(0)

    # --- checks -----------------------------------------------------------------------------------

    def setup(self, federation: Federation) -> None:
        """Check the number of clients, the aggregator and the source of durations."""
        self._clock = None
        n, rule = federation.num_clients, federation.aggregator
        check_integer("concurrency", self.concurrency, min=1, max=n, hint=f"there are {n} clients")
        if rule is not None and not rule.is_asynchronous:
            raise FederationError(
                f"{type(rule).__name__} ignores the staleness of updates, and AsynchronousSampler"
                " samples clients that start from earlier models: use the aggregator FedBuff or"
                " FedAsync, or another sampler"
            )
        if federation.data is not None and federation.data.stream_steps > 1:
            raise FederationError(
                "AsynchronousSampler needs clients whose samples do not change in the run, and the"
                " data module has stream_steps: remove stream_steps, or use another sampler"
            )
        if self._simulated(federation) is None:
            raise FederationError(
                "AsynchronousSampler needs the durations of clients: add the callback"
                " ClientFaults(step_seconds=..., speed_sigma=...) to the Trainer"
            )

    def _simulated(self, federation: Federation) -> SimulatedDurations | None:
        """Return the durations of a callback of the Trainer; None if there is none."""
        callbacks = [] if federation.trainer is None else federation.trainer.callbacks
        return next((c.durations for c in callbacks if isinstance(c, HasDurations)), None)

    # --- the clock --------------------------------------------------------------------------------

    def begin(self, federation: Federation) -> None:
        """Set the clock to 0. Durations are those of the local steps in the first round."""
        self._federation, n = federation, federation.num_clients
        self._steps = _steps_of(federation, 0, torch.arange(n))
        seed = federation.seed

        def order(version: int) -> Sequence[int]:
            random = generator(seed, RandomStream.COHORT, version)
            ids: list[int] = torch.randperm(n, generator=random).tolist()
            return ids

        self._clock = VirtualClock(
            n, self.concurrency, federation.sampling.size, order, self._seconds(federation)
        )

    def _seconds(self, federation: Federation) -> Seconds:
        """Return the function of durations."""
        simulated, seed = self._simulated(federation), federation.seed
        assert simulated is not None  # checked in setup
        assert federation.traffic is not None
        num_bytes, steps = sum(federation.traffic), self._steps.tolist()
        return lambda client, round: simulated.seconds_of(
            seed, round, client, steps[client], num_bytes
        )

    def flush(self, round: int) -> Flush:
        """Return the aggregation that ends a round: its time, its clients, and their versions.

        Args:
            round: Index of the round, from 0.
        """
        assert self._clock is not None, "the clock runs in a fit only"
        return self._clock.flush(round)

    def sample(
        self, round: int, count: int, num_samples: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the clients that finish next, in the order of their arrival.

        Before a fit begins, where durations are unknown, these are the first clients that start.
        """
        if self._clock is None:
            return torch.randperm(len(num_samples), generator=generator)[:count]
        clients = torch.tensor(self.flush(round).clients)
        assert self._federation is not None
        if (wrong := _steps_of(self._federation, round, clients) != self._steps[clients]).any():
            raise FederationError(
                "AsynchronousSampler needs the duration of a client's work when it starts, and"
                f" {type(self._federation.policy).__name__} changes the number of local steps"
                f" (client {int(clients[wrong][0])}, round {round + 1}): use a policy with a fixed"
                " amount of work, such as Schedule(num_steps=...) or Schedule(local_epochs=...)"
            )
        return clients

    def metrics(self, round: int) -> dict[str, float]:
        """Return the virtual time of the aggregation, and the staleness of the updates."""
        flush = self.flush(round)
        staleness = [round - version for version in flush.started]
        return {
            "virtual_time": flush.time,
            "staleness_mean": fmean(staleness),
            "staleness_max": max(staleness),
        }


def _steps_of(federation: Federation, round: int, clients: Tensor) -> Tensor:
    """Return the number of local steps of clients in a round, ``[k]``."""
    values: dict[str, Tensor] = federation.policy.drawn(round, clients)
    if "participates" in values:
        raise FederationError(
            f"{type(federation.policy).__name__} excludes clients from rounds, and in asynchronous"
            " rounds all clients that finish take part: use another policy"
        )
    return local_steps(values, federation.data.batches_per_epoch[clients])
