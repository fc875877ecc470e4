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
