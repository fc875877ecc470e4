"""Not too sure of oneself: entropy regularisation."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lightning_fl.functional.entropy import entropy_hinge
from lightning_fl.objectives.terms import Side, Term, check_strength
from lightning_fl.types import FederationError


class EntropyRegularizer(Term):
    r"""Penalise confident predictions, :math:`c \max(0, H_{min} - H(\mathrm{softmax}(a_M)))`.

    Mostafa (2019), eq. 8: the penalty sets in where the entropy of a sample's prediction falls
    below :math:`H_{min}`. It matters where clients know few classes. The paper does not give its
    :math:`H_{min}`; code that descends from it uses 2 nats (ten classes have at most 2.303) and
    compares the mean entropy of the batch (``of_mean``).

    Args:
        h_min: The bound in nats, from 0 up; 0 is no penalty.
        coefficient: Factor :math:`c`, from 0 up.
        of_mean: Compare the mean entropy of the batch with the bound, not each sample's.

    Raises:
        FederationError: If a value is negative or not finite; in a step, if no prediction can have
            so much entropy.

    Example:
        >>> import torch
        >>> own = Side({}, outputs=torch.zeros(2, 10))
        >>> EntropyRegularizer(h_min=2.0)(own, Side({}), None)
        tensor(0.)
    """

    def __init__(self, h_min: float = 2.0, coefficient: float = 1.0, of_mean: bool = False) -> None:
        super().__init__()
        check_strength(h_min=h_min, coefficient=coefficient)
        self.h_min, self.coefficient, self.of_mean = h_min, coefficient, of_mean

    def forward(self, own: Side, fixed: Side, batch: Any) -> Tensor:
        """Return the penalty of the client's predictions."""
        assert own.outputs is not None
        if self.h_min > math.log(classes := own.outputs.shape[-1]) + 1e-6:
            raise FederationError(
                f"h_min is {self.h_min}, and predictions of {classes} classes have an entropy of at"
                f" most ln {classes} = {math.log(classes):.4f}: lower it"
            )
        return self.coefficient * entropy_hinge(own.outputs, self.h_min, self.of_mean)
