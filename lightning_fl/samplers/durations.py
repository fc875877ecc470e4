"""Durations of client work on the virtual clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.options import check_number


@dataclass
class SimulatedDurations:
    r"""Model of the duration of a client's work in a round.

    Client :math:`i` takes :math:`f_i (n_i s + \frac{\text{bytes}}{b})` seconds, where
    :math:`n_i` is the number of local steps, bytes are those that it receives and sends, and
    :math:`f_i = e^{\sigma z_i}`, :math:`z_i \sim N(0, 1)`, is a factor that is fixed for the
    client. Stragglers take ``straggler_factor`` times as long. For durations of your own, override
    :meth:`seconds_of`, and set ``durations`` of :class:`~lightning_fl.callbacks.ClientFaults`.

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
