"""Durations of client work on the virtual clock, from a model or from a trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_fl.errors import FederationError
from lightning_fl.files import is_index, read_cells, short_repr
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.options import check_number


@dataclass
class SimulatedDurations:
    r"""Model of the duration of a client's work in a round.

    Client :math:`i` takes :math:`f_i (n_i s + \frac{\text{bytes}}{b})` seconds, where
    :math:`n_i` is the number of local steps, bytes are those that it receives and sends, and
    :math:`f_i = e^{\sigma z_i}`, :math:`z_i \sim N(0, 1)`, is a factor that is fixed for the
    client. Stragglers take ``straggler_factor`` times as long.

    Args:
        straggler: Probability that a client is slow in a round.
        straggler_factor: Factor by which a straggler is slower.
        step_seconds: Duration :math:`s` of a local step in seconds.
        bandwidth: Bandwidth :math:`b` of a client in bytes per second.
        speed_sigma: Standard deviation :math:`\sigma` of the logarithm of the speed factor, at most
            50.

    Raises:
        FederationError: If an option is out of range.

    Example:
        >>> durations = SimulatedDurations(step_seconds=0.5, bandwidth=100.0)
        >>> durations.seconds_of(seed=0, round=0, client=3, steps=4, num_bytes=50)
        2.5
    """

    straggler: float = 0.0
    straggler_factor: float = 10.0
    step_seconds: float = 0.01
    bandwidth: float = 1e6
    speed_sigma: float = 0.0

    def __post_init__(self) -> None:
        self.straggler = check_number("straggler", self.straggler, min=0, max=1)
        self.straggler_factor = check_number("straggler_factor", self.straggler_factor, min=1)
        self.step_seconds = check_number("step_seconds", self.step_seconds, min=0)
        self.bandwidth = check_number("bandwidth", self.bandwidth, above=0, max=math.inf)
        self.speed_sigma = check_number("speed_sigma", self.speed_sigma, min=0, max=50)

    def seconds_of(self, seed: int, round: int, client: int, steps: int, num_bytes: int) -> float:
        """Return the duration of a client's work in seconds.

        Args:
            seed: Seed of the run.
            round: Index of the round in which the client starts, from 0.
            client: Id of the client.
            steps: Number of local steps.
            num_bytes: Number of bytes that the client receives and sends.
        """
        client_rng = generator(seed, RandomStream.SPEEDS, 0, client)
        factor = math.exp(self.speed_sigma * float(torch.randn((), generator=client_rng)))
        round_rng = generator(seed, RandomStream.SPEEDS, round + 1, client)
        if float(torch.rand((), generator=round_rng)) < self.straggler:
            factor *= self.straggler_factor
        return factor * (steps * self.step_seconds + num_bytes / self.bandwidth)


class HasDurations:
    """Base class of callbacks that simulate the durations of clients."""

    durations: SimulatedDurations


def read_durations(path: str | Path) -> Mapping[int, Sequence[float]]:
    """Read a trace of the durations of clients.

    Args:
        path: Path of a CSV file with the columns ``client`` and ``seconds``; further columns are
            ignored. The lines of a client are its durations, in their order in the file.

    Returns:
        Durations by client id, in seconds.

    Raises:
        FederationError: If the file cannot be read, or a line is invalid.
    """
    names, lines = read_cells(path)
    if not {"client", "seconds"} <= set(names) or len(set(names)) < len(names):
        raise FederationError(
            f"the first line of the trace {path} must name the columns client and seconds, each"
            f" column once, got {short_repr(','.join(names))}"
        )
    durations: dict[int, list[float]] = {}
    for number, line in lines:
        cells = dict(zip(names, line, strict=False))
        client, seconds = cells.get("client", ""), _positive(cells.get("seconds", ""))
        if seconds is None or not is_index(client) or len(line) != len(names):
            raise FederationError(
                f"line {number} of the trace {path} must contain a client (from 0) and a finite"
                f" number of seconds above 0, in {len(names)} cells, got"
                f" {short_repr(','.join(line))}"
            )
        durations.setdefault(int(client), []).append(seconds)
    if not durations:
        raise FederationError(f"the trace {path} has no durations: add a line for each client")
    return durations


def _positive(cell: str) -> float | None:
    """Return a finite number above 0; None for other texts."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None
