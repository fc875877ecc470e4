"""What a server and a client on another machine exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.files import write_atomically

#: Whole numbers of a task.
NUMBERS = ("round", "client", "num_clients", "seed", "num_steps", "last")


@dataclass(frozen=True)
class Task:
    """Hold what the server sends to a client in a round.

    Args:
        round: Index of the round.
        client: Id of the client.
        num_clients: Number of clients in the federation.
        seed: Seed of the run.
        num_steps: Number of local steps.
        last: Round of the client's last update that the server has used; -1 if there is none.
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
    last: int
    model: Mapping[str, Tensor]
    values: Mapping[str, float] = field(default_factory=dict)
    broadcast: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Kept:
    """Hold the state that a client keeps after its last two rounds.

    The server may not have used the last update, because it arrived too late or the server was
    killed. The client then continues from the state before, as if that round had not been.

    Args:
        states: State after a round, by round.

    Example:
        >>> import torch
        >>> kept = Kept().after(0, {"c": torch.zeros(1)}).after(4, {"c": torch.ones(1)})
        >>> kept.at(4)["c"], kept.at(0)["c"], kept.at(-1)
        (tensor([1.]), tensor([0.]), {})
    """

    states: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)

    def at(self, round: int) -> Mapping[str, Tensor]:
        """Return the state after a round; empty before the first, or if it is lost.

        Args:
            round: Index of the round; -1 is before the first.
        """
        if round >= 0 and round not in self.states:
            rank_zero_warn(
                f"this client has lost its state of round {round + 1}, and continues without:"
                " control variates, optimizer state and local parameters start anew"
            )
        return self.states.get(round, {})

    def after(self, round: int, state: Mapping[str, Tensor]) -> Kept:
        """Return the last two states, with that of a new round.

        Args:
            round: Index of the round.
            state: The state after it.
        """
        earlier = [each for each in sorted(self.states) if each < round][-1:]
        return Kept({**{each: self.states[each] for each in earlier}, round: state})

    @classmethod
    def read(cls, file: Path) -> Kept:
        """Return what :meth:`write` has written; nothing if the file does not exist."""
        return cls(torch.load(file, weights_only=True) if file.exists() else {})

    def write(self, file: Path) -> None:
        """Write the states into a file."""
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, partial(torch.save, dict(self.states)))


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
