"""Interpolation of two models."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def interpolate(
    personal: Mapping[str, Tensor], shared: Mapping[str, Tensor], alpha: Tensor
) -> dict[str, Tensor]:
    r"""Return the parameters :math:`\alpha v + (1 - \alpha) w` (Deng et al., 2020, eq. 2).

    Args:
        personal: Parameters :math:`v` by name.
        shared: Parameters :math:`w` by name; further names are ignored.
        alpha: Weight :math:`\alpha`, a scalar.

    Example:
        >>> import torch
        >>> interpolate({"w": torch.tensor(4.0)}, {"w": torch.tensor(0.0)}, torch.tensor(0.25))
        {'w': tensor(1.)}
    """
    return {name: alpha * v + (1 - alpha) * shared[name] for name, v in personal.items()}


def between(end: Tensor, way: Tensor, weights: Tensor) -> Tensor:
    r"""Return a mixture by entries, :math:`v + (x - v) \odot W`.

    FedALA (Zhang et al., 2023, eq. 3). Weights of 1 give exactly :math:`x`.

    Args:
        end: Shared model :math:`x`.
        way: Its difference :math:`x - v` from the personal model.
        weights: Weights :math:`W` of the shared model.

    Example:
        >>> import torch
        >>> between(torch.tensor([4.0, 4.0]), torch.tensor([4.0, 4.0]), torch.tensor([0.25, 1.0]))
        tensor([1., 4.])
    """
    return end - way * (1 - weights)


def next_weights(weights: Tensor, gradient: Tensor, way: Tensor, lr: float) -> Tensor:
    r"""Return the weights of :func:`between` after a step of projected gradient descent.

    .. math:: \Pi_{[0, 1]} \bigl(W - \eta\, g \odot (x - v)\bigr)

    Args:
        weights: Weights :math:`W`.
        gradient: Gradient :math:`g` of the loss at the mixture.
        way: Difference :math:`x - v` of the models.
        lr: Step :math:`\eta`.

    Example:
        >>> import torch
        >>> way = torch.tensor([1.0, 2.0])
        >>> next_weights(torch.ones(2), torch.tensor([0.25, -1.0]), way, lr=1.0)
        tensor([0.7500, 1.0000])
    """
    return (weights - lr * (gradient * way).to(weights)).clamp(0, 1)
