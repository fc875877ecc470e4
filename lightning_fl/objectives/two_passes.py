"""Base class of modules whose local step takes a gradient before the one of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from lightning_fl.errors import FederationError
from lightning_fl.objectives.client_module import ClientModule
from lightning_fl.objectives.local_network import trained_parameters
from lightning_fl.strategies import ClientParallelStrategy


class TwoPassModule(ClientModule):
    """Know the trained parameters, and the gradient of the loss at other values of them.

    Args:
        net: Network from inputs to logits, ``[batch, classes]``.
        optimizer: Function that creates the optimizer from the parameters.
    """

    #: Whether a step needs the whole batch of a client in one process.
    needs_whole_batches = False

    def __init__(self, net: nn.Module, optimizer: OptimizerCallable) -> None:
        super().__init__(net, (), optimizer)
        #: Names of the trained parameters. Under ``vmap`` tensors do not tell requires_grad.
        self._trained = list(trained_parameters(self.net))

    def setup(self, stage: str) -> None:
        """Refuse processes that share the batch of a client, where a step needs all of it."""
        super().setup(stage)
        strategy = self.trainer.strategy
        is_split = self.trainer.world_size > 1 and not isinstance(strategy, ClientParallelStrategy)
        if stage == "fit" and self.needs_whole_batches and is_split:
            raise FederationError(
                f"{type(self).__name__} needs the whole batch of a client, and"
                f" {type(strategy).__name__} splits it over processes: use"
                " strategy='client_parallel'"
            )

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
