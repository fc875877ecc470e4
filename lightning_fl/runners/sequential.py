"""``SequentialRunner``, which trains clients one after another in the user's module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fl.runners.base import ClientRunner, Rows, to_cpu
from lightning_fl.runners.local_step import reported_loss
from lightning_fl.runners.optimizer_state import OPTIMIZER_ROWS
from lightning_fl.runners.tensors import GLOBAL_PARAMETERS
from lightning_fl.types import ServerState


class SequentialRunner(ClientRunner):
    """Train one client at a time, on the LightningModule's own parameters."""

    def load(self, state: ServerState, rows: Sequence[Rows], lr: Sequence[float]) -> None:
        """Start a client; see :meth:`ClientRunner.load`."""
        (kept,), (self._ratio,) = rows, self._ratios(lr)
        self.write(ServerState(state.vector[0], state.counters))
        if self.wants_fixed:
            at_start = {n: p.detach().clone() for n, p in self.named_parameters.items()}
            vars(self.module)[GLOBAL_PARAMETERS] = at_start | self.tensors.constants
        if not kept:
            return
        with torch.no_grad():
            for name in self.private:
                if (row := kept.get(f"parameter.{name}")) is not None:
                    self.named_parameters[name].copy_(row, non_blocking=True)
            for name, buffer in self.named_buffers.items():
                if (row := kept.get(f"buffer.{name}")) is not None:
                    buffer.copy_(row, non_blocking=True)
        self.optimizer_state.load(
            {name: row for name, row in kept.items() if name.startswith(OPTIMIZER_ROWS)}
        )

    def collect(self, state: ServerState) -> tuple[Tensor, Tensor]:
        """Return the client's update and counters; see :meth:`ClientRunner.collect`."""
        self.adopt()
        delta = self._moved(self.vector.read()[None], state)
        return delta, (state.counters if self.buffers == "server" else self.counters.read())[None]

    def client_parameters(self) -> dict[str, Tensor]:
        """Return the client's parameters; see :meth:`ClientRunner.client_parameters`."""
        return {name: param.detach()[None] for name, param in self.shared.items()}

    def _trained_tensor(self, name: str) -> nn.Parameter:
        return self.shared[name]

    def reported(self, outputs: Any) -> Tensor:
        """Return the client's task loss; see :meth:`ClientRunner.reported`."""
        loss = reported_loss(outputs)
        return torch.full((1,), torch.nan) if loss is None else loss.reshape(1)

    def rows(self) -> list[dict[str, Tensor]]:
        """Return the local tensors of the client, by name."""
        self.adopt()
        rows = {f"parameter.{n}": self.named_parameters[n].detach() for n in self.private}
        if self.buffers == "local":
            rows |= {f"buffer.{name}": buffer for name, buffer in self.named_buffers.items()}
        if self.keep_optimizer:
            rows |= self.optimizer_state.rows()
        return [to_cpu(rows)]
