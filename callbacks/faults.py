"""Simulation of client failures, stragglers and round durations."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_fl.callbacks.federated_loop import FederatedLoop, loop_of
from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.errors import FederationError
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.options import check_number
from lightning_fl.samplers.durations import SimulatedDurations

#: Cause under which the table of rounds counts a client whose update does not arrive in time.
CAUSE_OF = {"dropout": "dropped_out", "crash": "crashed", "late": "late"}
#: Magnitude of the entries of an update with the fault ``blowup``.
EXPLODED = 1e30


class OnUpdates(Callback, ABC):
    """Base class of callbacks that modify or drop client updates before aggregation."""

    _loop: FederatedLoop

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the Trainer has a :class:`FederatedLoop`."""
        if stage == "fit":
            self._loop = loop_of(trainer, type(self).__name__)

    @abstractmethod
    def on_client_updates(
        self, plan: RoundPlan, clients: Tensor, delta: Tensor, dropped: dict[int, str]
    ) -> Tensor:
        """Return the updates that the server receives, and mark dropped clients.

        Args:
            plan: Plan of the round.
            clients: Ids of the clients, ``[k]``.
            delta: Updates of these clients, ``[k, P]``. May be modified in place.
            dropped: Cause of the drop by client id. To drop the update of a client, add an entry.
                Each cause (``dropped_out``, ``crashed``, ``late``, or another name) becomes a
                column of the table of rounds. Non-finite updates are always dropped as
                ``non_finite``.

        Returns:
            The updates, ``[k, P]``.
        """


class ClientFaults(OnUpdates):
    r"""Simulate client faults at random, and the duration of rounds.

    A client has at most one fault per round:

    - ``dropout``: the client sends no update;
    - ``crash``: the client fails during training;
    - ``late``: the update arrives after the ``deadline``;
    - ``nan``: the update is NaN;
    - ``blowup``: the entries that are sent are :math:`\pm 10^{30}`.

    The loop drops the updates of all faults but ``blowup`` and counts them in the columns
    ``dropped_out``, ``crashed``, ``late`` and ``non_finite`` of the table of rounds.

    Faults depend on (run seed, round, client) only, so they are the same with another aggregator.
    For faults of your own, override :meth:`fault_of`.

    On the virtual clock, a round takes client :math:`i`
    :math:`f_i (n_i s + \frac{\text{bytes}}{b})` seconds, where :math:`n_i` is the number of local
    steps, bytes are those sent and received, and :math:`f_i = e^{\sigma z_i}`,
    :math:`z_i \sim N(0, 1)`, is a factor that is fixed for the client. Stragglers take
    ``straggler_factor`` times as long. The server waits for the last update or until the deadline.
    The column ``virtual_time`` of the table of rounds contains the cumulative time.

    With an :class:`~lightning_fl.samplers.AsynchronousSampler` the durations determine which
    clients a round has, and a client's stragglers are drawn for the round in which it starts. A
    client that drops out or crashes frees its place when it would have finished. There is no
    deadline.

    Args:
        dropout: Probability that a sampled client drops out of the round.
        crash: Probability that a sampled client crashes during training.
        nan: Probability that the update of a sampled client is NaN.
        blowup: Probability that the update of a sampled client has very large entries.
        straggler: Probability that a client is slow in a round, independent of its faults.
        straggler_factor: Factor by which a straggler is slower.
        step_seconds: Duration :math:`s` of a local step in seconds of virtual time. A deadline is
            compared with it, not with the time that the step takes here.
        bandwidth: Bandwidth :math:`b` of a client in bytes per second.
        speed_sigma: Standard deviation :math:`\sigma` of the logarithm of the speed factor, at
            most 50.
        deadline: Maximum duration of a round in seconds; None waits for all clients.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if rounds are
            asynchronous and there is a deadline.

    Example:
        >>> faults = ClientFaults(dropout=0.2, straggler=0.1, deadline=60.0)
        >>> faults.rates["dropout"]
        0.2
    """

    def __init__(
        self,
        dropout: float = 0.0,
        crash: float = 0.0,
        nan: float = 0.0,
        blowup: float = 0.0,
        straggler: float = 0.0,
        straggler_factor: float = 10.0,
        step_seconds: float = 0.01,
        bandwidth: float = 1e6,
        speed_sigma: float = 0.0,
        deadline: float | None = None,
    ) -> None:
        self.rates = {"dropout": dropout, "crash": crash, "nan": nan, "blowup": blowup}
        for option, value in self.rates.items():
            check_number(option, value, min=0, max=1)
        total, hint = round(sum(self.rates.values()), 9), "a client has one fault per round"
        check_number("the sum of dropout, crash, nan and blowup", total, min=0, max=1, hint=hint)
        self.durations = SimulatedDurations(
            straggler, straggler_factor, step_seconds, bandwidth, speed_sigma
        )
        self.deadline = check_number("deadline", deadline, above=0, max=math.inf, optional=True)
        #: Virtual duration of all rounds so far, in seconds.
        self.virtual_time = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that asynchronous rounds have no deadline."""
        super().setup(trainer, pl_module, stage)
        has_deadline = stage == "fit" and self.deadline is not None
        if has_deadline and self._loop.options.sampler.is_asynchronous:
            raise FederationError(
                "deadline has no meaning in asynchronous rounds, in which the server waits for no"
                " client: remove it"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start at time 0, also if the callback was part of an earlier run."""
        if not self._loop.round:
            self.virtual_time = 0.0

    def fault_of(self, seed: int, round: int, client: int) -> str | None:
        """Return the fault of a client in a round, except ``late``; None without a fault.

        Args:
            seed: Seed of the run.
            round: Index of the round, from 0.
            client: Id of the client.
        """
        draw = float(torch.rand((), generator=generator(seed, RandomStream.FAULTS, round, client)))
        for fault, rate in self.rates.items():
            if draw < rate:
                return fault
            draw -= rate
        return None

    def seconds_of(self, seed: int, round: int, client: int, steps: int) -> float:
        """Return the duration of a round for a client, in seconds.

        Args:
            seed: Seed of the run.
            round: Index of the round, from 0.
            client: Id of the client.
            steps: Number of local steps.
        """
        unused = int(self._loop.aggregator.unused_entries(torch.tensor([client])))
        num_bytes = sum(self._loop.fit.traffic.of_a_client(unused))
        return self.durations.seconds_of(seed, round, client, steps, num_bytes)

    def on_client_updates(
        self, plan: RoundPlan, clients: Tensor, delta: Tensor, dropped: dict[int, str]
    ) -> Tensor:
        """Apply the faults of the round to the updates."""
        at = self._loop.sent_entries()
        for row, client in enumerate(clients.tolist()):
            fault = self._fault(plan, client)
            if fault == "blowup":
                sent = delta[row, at]
                delta[row, at] = EXPLODED * torch.ones_like(sent).copysign(sent)
            elif fault == "nan":
                delta[row] = torch.nan
            elif fault is not None:
                dropped[client] = CAUSE_OF[fault]
        return delta

    def _fault(self, plan: RoundPlan, client: int) -> str | None:
        """Return the fault of a client in a round, including ``late``; None without a fault."""
        fault = self.fault_of(plan.seed, plan.round, client)
        if fault in CAUSE_OF or self.deadline is None:
            return fault
        return "late" if self._seconds(plan, client) > self.deadline else fault

    def _seconds(self, plan: RoundPlan, client: int) -> float:
        steps = int(plan.num_steps[plan.clients == client])
        return self.seconds_of(plan.seed, plan.round, client, steps)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the virtual time after a synchronous round; else the sampler does."""
        plan, sampler = self._loop.plan_of_the_round, self._loop.options.sampler
        if plan is not None and sampler.is_asynchronous:
            self.virtual_time = sampler.metrics(plan.round)["virtual_time"]
        elif plan is not None:
            self.virtual_time += self._duration(plan)
            pl_module.log("virtual_time", self.virtual_time)

    def _duration(self, plan: RoundPlan) -> float:
        """Return the duration of a synchronous round."""
        dropped = self._loop.dropped_in_the_round
        lost = {client for client, cause in dropped.items() if cause in CAUSE_OF.values()}
        # The server cannot tell a lost client from a slow one, so it waits until the deadline.
        if self.deadline is not None and lost:
            return float(self.deadline)
        times = [self._seconds(plan, c) for c in plan.cohort.tolist() if c not in lost]
        return max(times, default=0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the virtual time so far."""
        return {"virtual_time": self.virtual_time}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the virtual time."""
        self.virtual_time = state_dict["virtual_time"]
