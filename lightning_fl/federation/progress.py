"""Progress of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lightning_fl.federation.table import RoundTable


@dataclass
class Progress:
    """Progress of a run, except its models.

    Args:
        round: Number of finished rounds.
        table: The table of rounds.
        val_loss: Validation loss after the last round; None if unknown.
        metrics: Logged metrics after the last round. Lightning keeps them for rounds that log none.
        seed: Seed of the run.
        steps: Optimizer steps in the finished rounds, each round with those of the client with the
            most local steps.
    """

    round: int = 0
    table: RoundTable = field(default_factory=RoundTable)
    val_loss: float | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)
    seed: int = 0
    steps: int = 0
