"""Not too sure of oneself: entropy regularization."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lightning_fl.functional.entropy import entropy_hinge
from lightning_fl.objectives.terms import ModelView, Term, check_strength
from lightning_fl.types import FederationError


class EntropyRegularizer(Term):
    r"""Penalize confident predictions, :math:`c \max(0, H_{min} - H(\mathrm{softmax}(a_M)))`.

    Mostafa (2019), eq. 8: the penalty sets in where the entropy of a sample's prediction falls
    below :math:`H_{min}`. It matters where clients know few classes. The paper does not give its
    :math:`H_{min}`; code that descends from it uses 2 nats (ten classes have at most 2.303) and
    compares the mean entropy of the batch (``of_mean``).

    Args:
        min_entropy: The bound in nats, from 0 up; 0 is no penalty.
        coefficient: Factor :math:`c`, from 0 up.
        of_mean: Compare the mean entropy of the batch with the bound, not each sample's.

    Raises:
        FederationError: If a value is negative or not finite; in a step, if no prediction can have
            so much entropy.

    Example:
        >>> import torch
        >>> own = ModelView({}, outputs=torch.zeros(2, 10))
        >>> EntropyRegularizer(min_entropy=2.0)(own, ModelView({}), None)
        tensor(0.)
    """

    def __init__(
        self, min_entropy: float = 2.0, coefficient: float = 1.0, of_mean: bool = False
    ) -> None:
        super().__init__()
        check_strength(min_entropy=min_entropy, coefficient=coefficient)
        self.min_entropy, self.coefficient, self.of_mean = min_entropy, coefficient, of_mean

    def forward(self, client_model: ModelView, global_model: ModelView, batch: Any) -> Tensor:
        """Return the penalty of the client's predictions."""
        assert client_model.outputs is not None
        if self.min_entropy > math.log(classes := client_model.outputs.shape[-1]) + 1e-6:
            raise FederationError(
                f"min_entropy is {self.min_entropy}, and predictions of {classes} classes have an"
                f" entropy of at most ln {classes} = {math.log(classes):.4f}: lower it"
            )
        return self.coefficient * entropy_hinge(
            client_model.outputs, self.min_entropy, self.of_mean
        )
