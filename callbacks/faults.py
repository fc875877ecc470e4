"""Simulation of client failures, stragglers and round durations."""

from __future__ import annotations

import csv
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_fl.callbacks.federated_loop import FederatedLoop, loop_of
from lightning_fl.federation.compare import COUNT, compare
from lightning_fl.files import read_text, short_repr, write_atomically
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.options import check_number
from lightning_fl.types import FederationError, RoundPlan

#: Faults of a client in a round. The server drops the update for all of them but ``blowup``.
FAULTS = ("dropout", "crash", "nan", "late", "blowup")
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
    r"""Simulate client faults, at random or from a trace, and the duration of rounds.

    A client has at most one fault per round:

    - ``dropout``: the client sends no update;
    - ``crash``: the client fails during training;
    - ``late``: the update arrives after the ``deadline``;
    - ``nan``: the update is NaN;
    - ``blowup``: the entries of the update are :math:`\pm 10^{30}`.

    The loop drops the updates of all faults but ``blowup`` and counts them in the columns
    ``dropped_out``, ``crashed``, ``late`` and ``non_finite`` of the table of rounds. With
    ``on_client_error: raise`` it ends the run instead.

    Faults depend on (run seed, round, client) only. They are written to ``faults.csv`` beside the
    table of rounds, in the format of ``trace``.

    On the virtual clock, a round takes client :math:`i`
    :math:`f_i (n_i s + \frac{\text{bytes}}{b})` seconds, where :math:`n_i` is the number of local
    steps, bytes are those sent and received, and :math:`f_i = e^{\sigma z_i}`,
    :math:`z_i \sim N(0, 1)`, is a factor that is fixed for the client. Stragglers take
    ``straggler_factor`` times as long. The server waits for the last update or until the deadline.
    The column ``virtual_time`` of the table of rounds contains the cumulative time.

    Args:
        dropout: Probability that a sampled client drops out of the round.
        crash: Probability that a sampled client crashes during training.
        nan: Probability that the update of a sampled client is NaN.
        blowup: Probability that the update of a sampled client has very large entries.
        straggler: Probability that a client is slow in a round, independent of its faults.
        straggler_factor: Factor by which a straggler is slower.
        trace: Path of a CSV file with the columns ``round`` (from 1), ``client`` and ``fault``. If
            given, these faults are replayed instead of random faults.
        step_seconds: Duration :math:`s` of a local step in seconds.
        bandwidth: Bandwidth :math:`b` of a client in bytes per second.
        speed_sigma: Standard deviation :math:`\sigma` of the logarithm of the speed factor.
        deadline: Maximum duration of a round in seconds; None waits for all clients.
        name: Name of the file of faults; None writes no file.

    Raises:
        FederationError: If an option is out of range, or the trace cannot be read.

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
        trace: str | Path | None = None,
        step_seconds: float = 0.01,
        bandwidth: float = 1e6,
        speed_sigma: float = 0.0,
        deadline: float | None = None,
        name: str | None = "faults.csv",
    ) -> None:
        self.rates = {"dropout": dropout, "crash": crash, "nan": nan, "blowup": blowup}
        for option, value in {**self.rates, "straggler": straggler}.items():
            check_number(option, value, min=0, max=1)
        if (total := sum(self.rates.values())) > 1 + 1e-9:
            raise FederationError(
                "the sum of dropout, crash, nan and blowup must be at most 1, because a client has"
                f" at most one fault per round, got {total:g}"
            )
        self.straggler, self.name = straggler, name
        self.straggler_factor = check_number("straggler_factor", straggler_factor, min=1)
        self.step_seconds = check_number("step_seconds", step_seconds, min=0)
        self.bandwidth = check_number("bandwidth", bandwidth, above=0, max=math.inf)
        self.speed_sigma = check_number("speed_sigma", speed_sigma, min=0)
        self.deadline = check_number("deadline", deadline, above=0, max=math.inf, optional=True)
        self.trace = None if trace is None else read_trace(trace)
        #: Faults so far: round (from 1), client, fault.
        self.happened: list[tuple[int, int, str]] = []
        #: Virtual duration of all rounds so far, in seconds.
        self.virtual_time = 0.0

    def fault_of(self, seed: int, round: int, client: int) -> str | None:
        """Return the fault of a client in a round, except ``late``; None without a fault.

        Args:
            seed: Seed of the run.
            round: Index of the round, from 0.
            client: Id of the client.
        """
        if self.trace is not None:
            return self.trace.get((round + 1, client))
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
        client_rng = generator(seed, RandomStream.SPEEDS, 0, client)
        factor = math.exp(self.speed_sigma * float(torch.randn((), generator=client_rng)))
        round_rng = generator(seed, RandomStream.SPEEDS, round + 1, client)
        if float(torch.rand((), generator=round_rng)) < self.straggler:
            factor *= self.straggler_factor
        up, down = self._loop.fit.traffic.of_a_client()
        return factor * (steps * self.step_seconds + (up + down) / self.bandwidth)

    def on_client_updates(
        self, plan: RoundPlan, clients: Tensor, delta: Tensor, dropped: dict[int, str]
    ) -> Tensor:
        """Apply the faults of the round to the updates."""
        for row, client in enumerate(clients.tolist()):
            fault = self._what(plan, client)
            if fault == "blowup":
                delta[row] = EXPLODED * torch.ones_like(delta[row]).copysign(delta[row])
            elif fault == "nan":
                delta[row] = torch.nan
            elif fault is not None:
                dropped[client] = CAUSE_OF[fault]
        return delta

    def _what(self, plan: RoundPlan, client: int) -> str | None:
        fault = self.fault_of(plan.seed, plan.round, client)
        return "late" if fault is None and self._is_late(plan, client) else fault

    def _is_late(self, plan: RoundPlan, client: int) -> bool:
        return self.deadline is not None and self._seconds(plan, client) > self.deadline

    def _seconds(self, plan: RoundPlan, client: int) -> float:
        steps = int(plan.num_steps[plan.clients == client])
        return self.seconds_of(plan.seed, plan.round, client, steps)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the faults and the duration of the round."""
        plan = self._loop.plan_of_the_round
        if plan is None:  # the round was interrupted
            return
        times, waits = [0.0], False
        for client in plan.cohort.tolist():
            fault = self._what(plan, client)
            if fault is not None:
                self.happened.append((plan.round + 1, client, fault))
            # The server cannot tell a lost client from a slow one, so it waits until the deadline.
            waits |= fault in ("dropout", "crash", "late")
            if fault not in ("dropout", "crash", "late"):
                times.append(self._seconds(plan, client))
        is_late = waits and self.deadline is not None
        self.virtual_time += float(self.deadline or 0.0) if is_late else max(times)
        pl_module.log("virtual_time", self.virtual_time)
        path = self._loop.table_path(trainer)
        if self.name and path is not None and trainer.is_global_zero:
            lines = ["round,client,fault", *(f"{r},{c},{f}" for r, c, f in self.happened)]
            write_atomically(path.with_name(self.name), "\n".join(lines) + "\n")

    def state_dict(self) -> dict[str, Any]:
        """Return the faults and the virtual time so far."""
        return {"happened": list(self.happened), "virtual_time": self.virtual_time}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the faults and the virtual time."""
        like = {"happened": [[COUNT, COUNT, str], ...], "virtual_time": float}
        compare(state_dict, like, "the checkpoint's ClientFaults")
        for entry in state_dict["happened"]:
            if [*map(type, entry)] != [int, int, str] or entry[2] not in FAULTS:
                raise FederationError(
                    "the checkpoint's ClientFaults must list rounds, clients and faults"
                    f" ({', '.join(FAULTS)}), got {short_repr(entry)}"
                )
        self.happened = [(r, c, f) for r, c, f in state_dict["happened"]]
        self.virtual_time = state_dict["virtual_time"]


def read_trace(path: str | Path) -> dict[tuple[int, int], str]:
    """Read a trace of client faults.

    Args:
        path: Path of a CSV file with the columns ``round``, ``client``, ``fault``.

    Returns:
        Faults by (round, client), with rounds from 1.

    Raises:
        FederationError: If the file does not exist or a line is invalid.
    """
    try:
        text = read_text(path).removeprefix("\ufeff")  # Excel writes a byte-order mark
        lines = csv.reader(io.StringIO(text, newline=""), strict=True)
        return _read_lines(lines, path)
    except (OSError, UnicodeError, csv.Error) as error:
        raise FederationError(f"the trace {path} cannot be read: {error}") from error


def _read_lines(lines: Iterator[list[str]], path: str | Path) -> dict[tuple[int, int], str]:
    if [name.strip() for name in next(lines, [])] != ["round", "client", "fault"]:
        raise FederationError(f"the first line of the trace {path} must be 'round,client,fault'")
    found: dict[tuple[int, int], str] = {}
    for number, line in enumerate(lines, 2):
        if not line:
            continue
        whole = [part.strip() for part in line[:2]]
        fault = next((f for f in FAULTS if len(line) == 3 and f == line[2].strip()), None)
        is_whole = all(p.isascii() and p.isdecimal() and len(p) < 16 for p in whole)
        if fault is None or not is_whole:
            raise FederationError(
                f"line {number} of the trace {path} must contain a round (from 1), a client (from"
                f" 0) and one of {', '.join(FAULTS)}, got {short_repr(','.join(line))}"
            )
        key = int(whole[0]), int(whole[1])
        if key[0] < 1 or key in found:
            raise FederationError(
                f"line {number} of the trace {path}, round {key[0]}, client {key[1]}:"
                + (" duplicate entry" if key in found else " rounds are counted from 1")
            )
        found[key] = fault
    return found
