"""Base class of additional loss terms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_fl.objectives.recorder import Recorder, Trace


@dataclass(frozen=True)
class ModelView:
    """View of the client model or the global model for a term.

    Args:
        params: Parameters by name.
        outputs: Network outputs for the batch. None for the global model.
        trace: Recorded activations, if a term requires them.
    """

    params: dict[str, Tensor]
    outputs: Tensor | None = None
    trace: Trace | None = None


class Term(nn.Module, ABC):
    """Base class of additional loss terms, set in ``model.init_args.terms``.

    A term compares the local model with the global model of the round. To use the model of the same
    client at the end of its last round (as MOON does), subclass ``ClientModule`` instead: list the
    parameters of this model in ``federated_local_parameters``, and write them in ``on_client_end``.
    The tutorial "Your rule" has an example.
    """

    #: True if the term uses the samples. Vectorized clients are then not padded with samples of
    #: weight 0.
    uses_batch = True
    #: True if the term uses recorded activations. :meth:`build` is then called before the first
    #: step.
    wants_trace = False
    #: True if the parameters of the term are local to each client: trained with the model, kept
    #: across rounds, and neither sent nor averaged.
    stays_local = False
    #: Names of the modules with outputs to record. None records every point-wise non-linearity.
    points: list[str] | None = None

    def build(self, recorder: Recorder, trace: Trace) -> None:
        """Build modules that depend on the shapes of activations.

        Args:
            recorder: Recorder of the network.
            trace: Trace of an example batch.
        """

    @abstractmethod
    def forward(self, client_model: ModelView, global_model: ModelView, batch: Any) -> Tensor:
        """Return the value of the term for a batch, a scalar.

        Args:
            client_model: Client model in training.
            global_model: Initial model of the client in this round; constant.
            batch: Batch ``(x, y)``.
        """
