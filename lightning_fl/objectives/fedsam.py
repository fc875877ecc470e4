"""FedSAM: sharpness-aware local training."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from lightning_fl.functional.sharpness import ascent
from lightning_fl.objectives.two_passes import TwoPassModule
from lightning_fl.options import check_flag, check_number


class FedSAM(TwoPassModule):
    r"""Take each local step with the gradient at a nearby point of larger loss.

    FedSAM (Qu et al., 2022; Caldarola et al., 2022): with the gradient :math:`g` of a batch at
    :math:`w`,

    .. math:: e = \rho \frac{g}{\lVert g \rVert}, \qquad w \leftarrow w - \eta \nabla f(w + e).

    The adaptive form (ASAM) is :math:`e = \rho \, T^2 g / \lVert T g \rVert` with
    :math:`T = |w| + a` for tensors of two or more dimensions, and 1 for others, such as biases and
    scales. The norm is over all trained parameters. Any optimizer makes the step; its weight decay
    acts at :math:`w`. The loss that is logged is :math:`f(w + e)`.

    A step takes two forward and backward passes. The first one uses the statistics of the batch
    (BatchNorm) and leaves the running ones; dropout draws a mask in each pass. ``rho=0`` is FedAvg.

    Args:
        net: Network from inputs to logits, ``[batch, classes]``.
        rho: Distance :math:`\rho`, at least 0. The authors use 0.7 for the adaptive form.
        adaptive: Whether to use the adaptive form.
        offset: Constant :math:`a` of the adaptive form, at least 0.
        optimizer: Function that creates the optimizer from the parameters.

    Raises:
        FederationError: If an option is out of range.

    Example:
        >>> module = FedSAM(nn.Linear(4, 3), rho=0.05)
        >>> module.training_step((torch.ones(2, 4), torch.tensor([0, 1])), 0).shape
        torch.Size([])
    """

    def __init__(
        self,
        net: nn.Module,
        rho: float = 0.1,
        adaptive: bool = False,
        offset: float = 0.2,
        optimizer: OptimizerCallable = torch.optim.SGD,
    ) -> None:
        super().__init__(net, optimizer)
        self.rho = check_number("rho", rho, min=0)
        self.adaptive = check_flag("adaptive", adaptive)
        self.offset = check_number("offset", offset, min=0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss at the nearby point; its gradient is the one of the local step."""
        w = self._trained_now()
        fixed = {name: p.detach() for name, p in w.items()}
        gradient = self._gradient(fixed, batch)
        moves = ascent(fixed, gradient, self.rho, self.offset if self.adaptive else None)
        loss = self.loss_with(batch, {name: p + moves[name] for name, p in w.items()})
        self._record(loss, len(batch[1]))
        return loss
