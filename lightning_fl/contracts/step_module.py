"""What a ``ClientModule`` and the runners tell each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor


class StepModule(LightningModule):
    """Base class of modules whose step knows weights of samples and records its loss.

    Modules of users need none of these members, which may change.
    """

    #: Weight of each sample in the mean, ``[batch]``, summing to 1. None means equal weights.
    #: ``VectorizedClients`` pads smaller batches with samples of weight 0.
    _sample_weight: Tensor | None = None
    #: Whether the training step uses the weights of samples.
    _knows_weights = False
    #: Prefixes of the parameters that it does not compare with the start of its client.
    _uncompared: tuple[str, ...] = ()
    #: Allowed ranges of ``federated_hyperparameters``, as arguments of ``check_number``, by name.
    _hyperparameter_limits: Mapping[str, Mapping[str, Any]] = {}

    def _record(self, loss: Tensor, count: int | Tensor) -> None:
        """Record the loss of a local step, for one client or for clients that train at once.

        Args:
            loss: Scalar, or ``[k]`` for vectorized clients.
            count: Number of samples, of the same shape.
        """

    def _discard_losses(self) -> None:
        """Discard the losses recorded in the local step of a round without clients."""

    def _uses_client(self, hook: str) -> bool:
        """Return whether a client hook uses the tensors of a client; otherwise one call is enough.

        Args:
            hook: ``on_client_start`` or ``on_client_end``.
        """
        return True

    def _adapt(self, batches: Iterable[Any]) -> None:
        """Set the local tensors of a client that has not trained yet, from all its samples."""
