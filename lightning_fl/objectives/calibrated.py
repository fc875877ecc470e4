"""Base class of losses that change logits by the class counts of a client."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_fl.errors import FederationError
from lightning_fl.objectives.terms import ModelView, Term, TermModule


class CalibratedLoss(Term):
    """Replace the cross-entropy of training by the one of changed logits.

    The value of the term is the difference of the two losses. Validation is unchanged.
    """

    uses_batch = False
    inputs = ("class_counts",)
    #: Number of training samples of each class on the client, ``[classes]``; set by the loop.
    class_counts: Tensor | None = None

    def prepare(self, module: TermModule) -> None:
        """Check that the classes of the samples are known."""
        check_classes(self, module)

    @abstractmethod
    def changed(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return the logits that are trained.

        Args:
            logits: Logits of the network, ``[batch, classes]``.
            counts: Number of training samples of each class on the client, ``[classes]``.
        """

    def forward(self, client_model: ModelView, global_model: ModelView, batch: Any) -> Tensor:
        """Return the cross-entropy of the changed logits minus the one of the network."""
        logits, module, counts = client_model.outputs, client_model.module, self.class_counts
        if counts is None:
            raise FederationError(
                f"{type(self).__name__} trains the clients of a federation: add a FederatedLoop to"
                " the Trainer"
            )
        # The last classes may be missing on all clients.
        counts = F.pad(counts, (0, logits.shape[-1] - counts.shape[-1]))
        before, after = (
            F.cross_entropy(each, batch[1], reduction="none")
            for each in (logits, self.changed(logits, counts))
        )
        return module.mean_of(after - before)


def check_classes(term: Term, module: TermModule) -> None:
    """Check that samples have classes.

    Args:
        term: The term that requires them.
        module: Module of the term.

    Raises:
        FederationError: If the data module does not know the number of samples of each class.
    """
    data: Any = module.trainer.datamodule  # type: ignore[attr-defined]  # a connector's
    is_elsewhere = hasattr(data, "example") and data.example() is None
    if getattr(data, "class_counts", None) is None and not is_elsewhere:
        raise FederationError(
            f"{type(term).__name__} requires the number of samples of each class, and the data"
            " module has no class_counts: use a FederatedDataModule whose labels are integers"
        )
