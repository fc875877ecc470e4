"""What a client's loss may have besides the data's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_fl.objectives.recorder import Recorder, Trace
from lightning_fl.types import FederationError


def check_strength(**values: float) -> None:
    """Refuse factors and bounds that are negative or not finite."""
    for name, value in values.items():
        if not 0 <= value < float("inf"):
            raise FederationError(f"{name} must be finite and at least 0, got {value}")


@dataclass(frozen=True)
class ModelView:
    """One of the two models that a term compares.

    Args:
        params: Parameters by name.
        outputs: What the network made of the batch; None for the fixed model.
        trace: What happened inside, where a term wants to know.
    """

    params: dict[str, Tensor]
    outputs: Tensor | None = None
    trace: Trace | None = None


class Term(nn.Module, ABC):
    """A further term of a client's loss, listed under ``model.init_args.terms``."""

    #: Whether it looks at the samples: then lanes are not filled up with samples of weight 0.
    uses_batch = True
    #: Whether it looks inside the networks: then :meth:`build` is called before the first step.
    wants_trace = False
    #: Whether its parameters belong to each client: trained with the model, kept from round to
    #: round, and neither sent nor averaged.
    stays_local = False
    #: Modules of the network whose outputs it looks at; None is every point-wise non-linearity.
    points: list[str] | None = None

    def build(self, recorder: Recorder, trace: Trace) -> None:
        """Make what depends on the shapes of activations.

        Args:
            recorder: Knows the network's points.
            trace: Of an example.
        """

    @abstractmethod
    def forward(self, client_model: ModelView, global_model: ModelView, batch: Any) -> Tensor:
        """Return the term of a batch, a scalar.

        Args:
            client_model: The client's model in training.
            global_model: The server's model that the client started from; constant.
            batch: The batch, ``(x, y)``.
        """
