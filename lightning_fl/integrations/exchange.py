"""What a server and a client on another machine exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Task:
    """Hold what the server sends to a client in a round.

    Args:
        round: Index of the round.
        client: Id of the client.
        num_clients: Number of clients in the federation.
        seed: Seed of the run.
        num_steps: Number of local steps.
        model: ``state_dict`` of the module from which the client starts.
        values: Hyperparameters of the client, by name. Without ``lr``, the client uses that of its
            own optimizer.
        broadcast: Tensors of ``Aggregator.broadcast``.
    """

    round: int
    client: int
    num_clients: int
    seed: int
    num_steps: int
    model: Mapping[str, Tensor]
    values: Mapping[str, float] = field(default_factory=dict)
    broadcast: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """Hold what a client sends back.

    Args:
        delta: Update of the client, ``[P]``; empty if the client has no usable update.
        counters: Integer buffers, ``[C]``.
        extras: Tensors of the rule's client parts.
        num_samples: Number of training samples.
        lr: Mean learning rate over the local steps.
        loss: Loss of the received model in the first local step.
        dropped: Why there is no usable update; None if there is one.
    """

    delta: Tensor
    counters: Tensor
    extras: Mapping[str, Tensor]
    num_samples: int
    lr: float
    loss: float
    dropped: str | None = None
