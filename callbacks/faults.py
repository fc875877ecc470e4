"""Clients that fail or are slow, and how long rounds would take."""

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
from lightning_fl.federation.checkpoint_checks import COUNT, check
from lightning_fl.files import read_text, short_repr, write_atomically
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.types import FederationError, RoundPlan

#: What may happen to a client in a round; the server has no use for the first four.
FAULTS = ("dropout", "crash", "nan", "late", "blowup")
#: Under which cause the table of rounds counts a client that does not answer, or not in time.
CAUSE_OF = {"dropout": "dropped_out", "crash": "crashed", "late": "late"}
#: What an update becomes that is too large to be true.
EXPLODED = 1e30


class OnUpdates(Callback, ABC):
    """A callback that sees updates on their way to the server; the loop calls it."""

    _loop: FederatedLoop

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a run without a loop."""
        loop = loop_of(trainer)
        if stage == "fit" and loop is None:
            raise FederationError(
                f"{type(self).__name__} changes what clients send, and there is no federation: add"
                " a FederatedLoop to the callbacks"
            )
        if loop is not None:
            self._loop = loop

    @abstractmethod
    def on_client_updates(
        self, plan: RoundPlan, clients: Tensor, delta: Tensor, dropped: dict[int, str]
    ) -> Tensor:
        """Return the updates that the server receives, and mark the clients that it loses.

        Args:
            plan: The plan of the round.
            clients: Ids of the clients, ``[k]``.
            delta: Updates of these clients, ``[k, P]``. They may be written to.
            dropped: Causes by client. A client that is added does not count in this round, and its
                cause (``dropped_out``, ``crashed``, ``late``, or another name) becomes a column of
                the table of rounds. An update that is not finite is dropped as ``non_finite``
                anyway.
        """


class ClientFaults(OnUpdates):
    r"""Let clients fail, at random or by a trace, and say how long rounds would take.

    A client of a round has at most one fault:

    - ``dropout``: it never answers;
    - ``crash``: it fails during training;
    - ``late``: it answers after the ``deadline``;
    - ``nan``: it sends NaN;
    - ``blowup``: it sends finite numbers as large as :math:`10^{30}`, for robust rules to stand.

    The loop drops all but the last and counts them in the table of rounds, in the columns
    ``dropped_out``, ``crashed``, ``late`` and ``non_finite``; or it ends the run
    (``on_client_error: raise``).

    Faults are a function of (run seed, round, client). What happened is written to ``faults.csv``
    beside the table of rounds, which is a trace to be replayed.

    The virtual clock gives client :math:`i` a round of
    :math:`f_i (n_i s + \frac{\text{bytes}}{b})` seconds, with :math:`n_i` local steps, bytes down
    and up, and a factor :math:`f_i = e^{\sigma z_i}`, :math:`z_i \sim N(0, 1)`, that it has for
    good; a straggler takes ``straggler_factor`` times as long. The server waits for the last who
    answers, or until the deadline. Column ``virtual_time`` of the table of rounds is the sum so
    far.

    Args:
        dropout: Probability that a sampled client drops out of the round.
        crash: Probability that it crashes during training.
        nan: Probability that it sends NaN.
        blowup: Probability that it sends numbers that are far too large.
        straggler: Probability that a client is slow in a round, whatever else happens.
        straggler_factor: How many times slower a straggler is.
        trace: A CSV file with the columns ``round`` (from 1), ``client`` and ``fault``: what is in
            it happens, and nothing at random.
        step_seconds: :math:`s`, seconds of a local step.
        bandwidth: :math:`b`, bytes a second.
        speed_sigma: :math:`\sigma`.
        deadline: Seconds of a round after which nobody is waited for; None waits for all.
        name: Of the file of what happened; None writes none.

    Raises:
        FederationError: If an option is out of range, or a line of the trace cannot be read.

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
            if not 0 <= value <= 1:
                raise FederationError(f"{option} must be a probability from 0 to 1, got {value}")
        if (total := sum(self.rates.values())) > 1 + 1e-9:
            raise FederationError(
                f"dropout, crash, nan and blowup add up to {total:g}: a client has one fault a"
                " round at most, lower them to 1 together"
            )
        for option, value, least in (
            ("straggler_factor", straggler_factor, 1.0),
            ("step_seconds", step_seconds, 0.0),
            ("speed_sigma", speed_sigma, 0.0),
        ):
            if not least <= value < math.inf:
                raise FederationError(f"{option} must be at least {least:g}, got {value}")
        for option, limit in (("bandwidth", bandwidth), ("deadline", deadline)):
            if limit is not None and not limit > 0:
                raise FederationError(f"{option} must be positive, got {limit}")
        self.straggler, self.straggler_factor = straggler, straggler_factor
        self.step_seconds, self.bandwidth = step_seconds, bandwidth
        self.speed_sigma, self.deadline, self.name = speed_sigma, deadline, name
        self.trace = None if trace is None else read_trace(trace)
        #: What happened: round (from 1), client, fault.
        self.happened: list[tuple[int, int, str]] = []
        #: Seconds of all rounds so far.
        self.virtual_time = 0.0

    def fault_of(self, seed: int, round: int, client: int) -> str | None:
        """Return what happens to a client, but for being late.

        Args:
            seed: The run's.
            round: Counted from 0.
            client: Its number.
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
        """Return how long a client takes for a round.

        Args:
            seed: The run's.
            round: Counted from 0.
            client: Its number.
            steps: Local steps.
        """
        own = generator(seed, RandomStream.SPEEDS, 0, client)
        factor = math.exp(self.speed_sigma * float(torch.randn((), generator=own)))
        now = generator(seed, RandomStream.SPEEDS, round + 1, client)
        if float(torch.rand((), generator=now)) < self.straggler:
            factor *= self.straggler_factor
        up, down = self._loop.bytes_of_a_client()
        return factor * (steps * self.step_seconds + (up + down) / self.bandwidth)

    def on_client_updates(
        self, plan: RoundPlan, clients: Tensor, delta: Tensor, dropped: dict[int, str]
    ) -> Tensor:
        """Let clients fail; see :class:`ClientFaults`."""
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
        """Note what happened, and how long the round took."""
        plan = self._loop.plan_of_the_round
        if plan is None:  # the round was cut short
            return
        times, waits = [0.0], False
        for client in plan.cohort.tolist():
            fault = self._what(plan, client)
            if fault is not None:
                self.happened.append((plan.round + 1, client, fault))
            # Of who has dropped out or crashed the server hears nothing until its deadline.
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
        """Return what happened, and the time."""
        return {"happened": list(self.happened), "virtual_time": self.virtual_time}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what happened, and the time."""
        check(
            state_dict,
            {"happened": [[COUNT, COUNT, str], ...], "virtual_time": float},
            "ClientFaults",
        )
        for each in state_dict["happened"]:
            if [*map(type, each)] != [int, int, str] or each[2] not in FAULTS:
                raise FederationError(
                    f"the checkpoint's ClientFaults say that {short_repr(each)} happened: it must"
                    f" be a round, a client and one of {', '.join(FAULTS)}"
                )
        self.happened = [(r, c, f) for r, c, f in state_dict["happened"]]
        self.virtual_time = state_dict["virtual_time"]


def read_trace(path: str | Path) -> dict[tuple[int, int], str]:
    """Read what happens to clients.

    Args:
        path: A CSV file with the columns ``round``, ``client``, ``fault``.

    Returns:
        Faults, by round (from 1) and client.

    Raises:
        FederationError: If there is no such file, or a line cannot be read; which, and why.
    """
    try:
        text = read_text(path).removeprefix("\ufeff")  # which Excel writes
        lines = csv.reader(io.StringIO(text, newline=""), strict=True)
        return _read_lines(lines, path)
    except (OSError, UnicodeError, csv.Error) as error:
        raise FederationError(f"the trace {path} cannot be read: {error}") from error


def _read_lines(lines: Iterator[list[str]], path: str | Path) -> dict[tuple[int, int], str]:
    if [name.strip() for name in next(lines, [])] != ["round", "client", "fault"]:
        raise FederationError(f"the trace {path} must begin with the line 'round,client,fault'")
    found: dict[tuple[int, int], str] = {}
    for number, line in enumerate(lines, 2):
        if not line:
            continue
        whole = [part.strip() for part in line[:2]]
        fault = next((f for f in FAULTS if len(line) == 3 and f == line[2].strip()), None)
        is_whole = all(p.isascii() and p.isdecimal() and len(p) < 16 for p in whole)
        if fault is None or not is_whole:
            raise FederationError(
                f"line {number} of the trace {path} is {short_repr(','.join(line))}: it must be a"
                f" round from 1 up, a client from 0 up and one of {', '.join(FAULTS)}"
            )
        key = int(whole[0]), int(whole[1])
        if key[0] < 1 or key in found:
            raise FederationError(
                f"line {number} of the trace {path} says round {key[0]}, client {key[1]}:"
                + (" twice" if key in found else " rounds are counted from 1")
            )
        found[key] = fault
    return found
