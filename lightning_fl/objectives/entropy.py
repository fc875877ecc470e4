"""Entropy regularization."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from lightning_fl.errors import FederationError
from lightning_fl.functional.entropy import entropy_hinge
from lightning_fl.objectives.terms import ModelView, Term
from lightning_fl.options import check_flag, check_number


class EntropyRegularizer(Term):
    r"""Penalize confident predictions, :math:`c \max(0, H_{min} - H(\mathrm{softmax}(a_M)))`.

    Mostafa (2019), eq. 8: the penalty is positive if the entropy of a prediction is below
    :math:`H_{min}`. It is most relevant if each client has few classes. The paper does not give its
    :math:`H_{min}`. Code derived from that of the paper uses 2 nats (the maximum for ten classes is
    2.303) and compares the mean entropy of the batch (``of_mean``).

    Args:
        min_entropy: Bound :math:`H_{min}` in nats, at least 0. 0 disables the penalty.
        coefficient: Factor :math:`c`, at least 0. A policy may set it for each round and client.
        of_mean: Compare the bound with the mean entropy of the batch instead of the entropy of each
            sample.

    Raises:
        FederationError: If a value is negative or not finite; in a step, if ``min_entropy`` exceeds
            the maximum entropy of a prediction.

    Example:
        >>> import torch
        >>> own = ModelView({}, outputs=torch.zeros(2, 10))
        >>> EntropyRegularizer(min_entropy=2.0)(own, ModelView({}), None)
        tensor(0.)
    """

    hyperparameters: ClassVar[Mapping[str, Mapping[str, Any]]] = {"coefficient": {"min": 0}}

    def __init__(
        self, min_entropy: float = 2.0, coefficient: float = 1.0, of_mean: bool = False
    ) -> None:
        super().__init__()
        self.min_entropy = check_number("min_entropy", min_entropy, min=0)
        self.coefficient = check_number("coefficient", coefficient, min=0)
        self.of_mean = check_flag("of_mean", of_mean)

    def forward(self, client_model: ModelView, global_model: ModelView, batch: Any) -> Tensor:
        """Return the penalty for the predictions of the client."""
        if self.min_entropy > math.log(classes := client_model.outputs.shape[-1]) + 1e-6:
            raise FederationError(
                f"min_entropy is {self.min_entropy}, and the maximum entropy of {classes} classes"
                f" is ln {classes} = {math.log(classes):.4f}: use a smaller value"
            )
        return self.coefficient * entropy_hinge(
            client_model.outputs, self.min_entropy, self.of_mean
        )
