"""FedRS: restricted softmax for the classes that a client lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from lightning_fl.functional.calibration import restricted_logits
from lightning_fl.objectives.calibrated import CalibratedLoss
from lightning_fl.options import check_number


class FedRS(CalibratedLoss):
    r"""Scale the logits of the classes that a client lacks.

    FedRS (Li and Zhan, 2021): a client trains the cross-entropy of :math:`s_c z_c`, with
    :math:`s_c = 1` for its own classes and :math:`\alpha` otherwise, so that its updates move the
    weights of the classes that it lacks less. ``alpha=1`` and clients with all classes are FedAvg.

    The authors' program differs from the paper: it scales present classes by their share, too.

    Args:
        alpha: Scale :math:`\alpha` in [0, 1]. A policy may set it for each round and client.

    Raises:
        FederationError: If ``alpha`` is out of range; at the start of a fit, if the labels of the
            data are not classes.

    Example:
        >>> from torch import nn
        >>> from lightning_fl import ClientModule
        >>> module = ClientModule(nn.Linear(4, 3), terms=[FedRS(alpha=0.5)])
    """

    hyperparameters: ClassVar[Mapping[str, Mapping[str, Any]]] = {"alpha": {"min": 0, "max": 1}}

    def __init__(self, alpha: float = 0.5) -> None:
        super().__init__()
        self.alpha = check_number("alpha", alpha, min=0, max=1)

    def changed(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return the restricted logits."""
        return restricted_logits(logits, counts, self.alpha)
