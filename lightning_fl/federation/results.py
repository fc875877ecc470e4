"""Results of the clients of a round, of one process or of all processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Results:
    """Results of the clients of a process in a round.

    Args:
        counters: Maximum of the integer buffers, ``[C]``.
        schedule: State of the schedulers after the client with the most local steps.
        dropped: Causes of dropped updates by client id.
        reported: Loss of the model at the start of the round, in the first local step of each
            client that trained, by client id.
        rates: Mean learning rate over the local steps, by client id.
        num_samples: Total number of training samples of the clients with a used update.
        most_steps: Maximum number of local steps of a client.
        optimizer_steps: Optimizer steps of that client; fewer if it has skipped steps.
        cause: Sentences on an update with non-finite values.
    """

    counters: Tensor
    schedule: Any
    dropped: dict[int, str] = field(default_factory=dict)
    reported: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    num_samples: int = 0
    most_steps: int = 0
    optimizer_steps: int = 0
    cause: str = ""

    @property
    def losses(self) -> dict[int, float]:
        """Reported losses of the clients with a used update."""
        return {c: loss for c, loss in self.reported.items() if c not in self.dropped}

    @classmethod
    def merged(cls, every: Sequence[Results], device: torch.device) -> Results:
        """Return the results of all processes together.

        Args:
            every: Results of each process.
            device: Device of the counters.
        """
        longest = max(every, key=lambda each: each.most_steps)
        return cls(
            torch.stack([each.counters for each in every]).amax(0).to(device),
            longest.schedule,
            # Sorted, because groups of clients finish in the order of their work.
            dict(sorted(item for each in every for item in each.dropped.items())),
            {client: loss for each in every for client, loss in each.reported.items()},
            {client: rate for each in every for client, rate in each.rates.items()},
            sum(each.num_samples for each in every),
            longest.most_steps,
            longest.optimizer_steps,
            next((each.cause for each in every if each.cause), ""),
        )


def weights_and_losses(
    clients: Tensor, reported: Mapping[int, float], num_samples: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weights of clients by their samples, and their losses, ``[k]`` each.

    Args:
        clients: The clients of the round, ``[k]``.
        reported: Losses of the clients with a used update. Others have weight 0 and loss NaN.
        num_samples: Number of training samples per client, ``[num_clients]``.

    Example:
        >>> weights_and_losses(torch.tensor([0, 2]), {2: 0.5}, torch.tensor([10, 20, 30]))
        (tensor([0., 1.], dtype=torch.float64), tensor([   nan, 0.5000], dtype=torch.float64))
    """
    used = torch.tensor([client in reported for client in clients.tolist()])
    weights = num_samples[clients].double() * used
    losses = [reported.get(client, math.nan) for client in clients.tolist()]
    return weights / weights.sum().clamp(min=1), torch.tensor(losses, dtype=torch.float64)


def is_finite(delta: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
    """Return a mask of the clients with finite values only, ``[k]``.

    Args:
        delta: Updates, ``[k, P]``.
        extras: Tensors sent with the updates or kept by the clients, ``[k, ...]`` by name.

    Example:
        >>> is_finite(torch.zeros(2, 3), {"loss": torch.tensor([1.0, torch.inf])})
        tensor([ True, False])
    """
    finite = torch.ones(len(delta), dtype=torch.bool)
    every = (delta, *extras.values())
    values = [value for value in every if value.numel() and value.is_floating_point()]
    # Non-finite if any entry is; isfinite() on all entries would take six times as long.
    extremes = [torch.stack(value.aminmax()).isfinite().all() for value in values]
    flags = [flag.to(delta.device, non_blocking=True) for flag in extremes]
    if not flags or torch.stack(flags).all():  # the only wait for the device
        return finite
    for value in values:
        finite &= value.reshape(len(value), -1).isfinite().all(1).cpu()
    return finite
