"""FedLC: logits calibrated by the class counts of a client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from lightning_fl.functional.calibration import calibrated_logits
from lightning_fl.objectives.calibrated import CalibratedLoss
from lightning_fl.options import check_number


class FedLC(CalibratedLoss):
    r"""Train with logits that leave a margin to the rare classes of a client.

    FedLC (Zhang et al., 2022), with :math:`n_c` training samples of class :math:`c` on the client:

    .. math:: -\log \frac{e^{z'_y}}{\sum_c e^{z'_c}}, \qquad z'_c = z_c - \tau n_c^{-1/4}

    This loss replaces the cross-entropy in training. Classes that the client does not have leave
    the softmax. The paper prints a denominator without the true class, which is unbounded below;
    here it has all classes, as in the programs of others. Equal numbers of all classes are FedAvg.

    Args:
        tau: Strength :math:`\tau`, at least 0. A policy may set it for each round and client.

    Raises:
        FederationError: If ``tau`` is negative; at the start of a fit, if the labels of the data
            are not classes.

    Example:
        >>> from torch import nn
        >>> from lightning_fl import ClientModule
        >>> module = ClientModule(nn.Linear(4, 3), terms=[FedLC(tau=0.5)])
    """

    hyperparameters: ClassVar[Mapping[str, Mapping[str, Any]]] = {"tau": {"min": 0}}

    def __init__(self, tau: float = 1.0) -> None:
        super().__init__()
        self.tau = check_number("tau", tau, min=0)

    def changed(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return the calibrated logits."""
        return calibrated_logits(logits, counts, self.tau)
