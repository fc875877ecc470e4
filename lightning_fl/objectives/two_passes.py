"""Base class of modules whose local step takes a gradient before the one of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from lightning_fl.objectives.client_module import ClientModule
from lightning_fl.objectives.local_network import trained_parameters


class TwoPassModule(ClientModule):
    """Know the trained parameters, and the gradient of the loss at other values of them.

    Args:
        net: Network from inputs to logits, ``[batch, classes]``.
        optimizer: Function that creates the optimizer from the parameters.
    """

    def __init__(self, net: nn.Module, optimizer: OptimizerCallable) -> None:
        super().__init__(net, (), optimizer)
        #: Names of the trained parameters. Under ``vmap`` tensors do not tell requires_grad.
        self._trained = list(trained_parameters(self.net))

    def on_client_start(self) -> None:
        """Note the trained parameters, which callbacks may have changed."""
        super().on_client_start()
        self._trained = list(trained_parameters(self.net))

    def _trained_now(self) -> dict[str, Tensor]:
        """Return the trained parameters, by name in the module."""
        params = dict(self.net.named_parameters(prefix="net"))
        return {name: params[name] for name in self._trained}

    def _gradient(self, params: Mapping[str, Tensor], batch: Any) -> dict[str, Tensor]:
        """Return the gradient of the loss; the buffers of the network do not change."""

        def loss(params: Mapping[str, Tensor]) -> Tensor:
            buffers = {n: b.clone() for n, b in self.net.named_buffers(prefix="net")}
            return self.loss_with(batch, {**params, **buffers})

        gradient: dict[str, Tensor] = torch.func.grad(loss)(dict(params))
        return gradient
