"""Means of features by class."""

from __future__ import annotations

import torch
from torch import Tensor


def class_indicators(y: Tensor, classes: int, like: Tensor) -> Tensor:
    """Return 1 at the class of each sample and 0 elsewhere, ``[batch, classes]``.

    Args:
        y: Classes, ``[batch]``.
        classes: Number of classes.
        like: Tensor with the dtype and the device of the result.
    """
    return (y[:, None] == torch.arange(classes, device=y.device)).to(like)


def prototype_distances(
    features: Tensor, indicators: Tensor, prototypes: Tensor, known: Tensor
) -> Tensor:
    r"""Return the mean squared distance of each sample to the prototype of its class, ``[batch]``.

    FedProto (Tan et al., 2022): :math:`\frac1h \lVert f_i - c_{y_i} \rVert^2`, and 0 for a class
    without a prototype.

    Args:
        features: Features :math:`f`, ``[batch, h]``.
        indicators: See :func:`class_indicators`.
        prototypes: Prototypes :math:`c`, ``[classes, h]``.
        known: Which classes have a prototype, ``[classes]``.

    Example:
        >>> f, one_hot = torch.tensor([[3.0, 1.0], [9.0, 9.0]]), torch.eye(2)
        >>> prototype_distances(f, one_hot, torch.ones(2, 2), torch.tensor([True, False]))
        tensor([2., 0.])
    """
    away = (features - indicators @ prototypes).square().mean(1)
    return away * (indicators @ known.to(indicators))
