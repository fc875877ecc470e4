"""``SequentialRunner``, which trains clients one after another in the user's module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fl.contracts.hyperparameters import HYPERPARAMETERS
from lightning_fl.contracts.update import ServerState
from lightning_fl.runners.base import ClientRunner
from lightning_fl.runners.client_optimizers import OPTIMIZER_ROWS, Rows
from lightning_fl.runners.local_step import reported_loss
from lightning_fl.runners.tensors import GLOBAL_PARAMETERS


class SequentialRunner(ClientRunner):
    """Train one client at a time, on the LightningModule's own parameters."""

    def load(self, state: ServerState, rows: Sequence[Rows], lr: Sequence[float]) -> None:
        """Start a client; see :meth:`ClientRunner.load`."""
        (kept,), (self._ratio,) = rows, self._ratios(lr)
        for parameter in self.module.parameters():
            parameter.grad = None  # of a module that accumulates gradients over steps
        self.write(ServerState(state.vector[0], state.counters))
        self.restore(kept)
        learned = {name: row for name, row in kept.items() if name.startswith(OPTIMIZER_ROWS)}
        if learned:
            self.optimizer_state.load(learned)
        self.note_start()

    def note_start(self) -> None:
        """Record where the client starts from; see :meth:`ClientRunner.note_start`."""
        if names := self.tensors.compared:
            start = {name: self.named_parameters[name].detach().clone() for name in names}
            vars(self.module)[GLOBAL_PARAMETERS] = start | self.tensors.constants

    def set_hyperparameters(self, values: Mapping[str, Tensor]) -> None:
        """Set numbers of the module; see :meth:`ClientRunner.set_hyperparameters`."""
        if placed := self.declared.placed(values, self.vector.dtype, self.vector.device):
            given = {name: value[0] for name, value in placed.items()}
            vars(self.module)[HYPERPARAMETERS] = self.declared.values | given

    def collect(self, state: ServerState) -> tuple[Tensor, Tensor]:
        """Return the client's update and counters; see :meth:`ClientRunner.collect`."""
        self.tensors.adopt()
        delta = self._moved(self.vector.read()[None], state)
        return delta, (state.counters if self.buffers == "server" else self.counters.read())[None]

    def client_parameters(self) -> dict[str, Tensor]:
        """Return the client's parameters; see :meth:`ClientRunner.client_parameters`."""
        return {name: param.detach()[None] for name, param in self.shared.items()}

    def reported(self, outputs: Any) -> Tensor:
        """Return the client's task loss; see :meth:`ClientRunner.reported`."""
        loss = reported_loss(outputs)
        return torch.full((1,), torch.nan) if loss is None else loss.reshape(1)

    def of_client(self, values: Tensor) -> Tensor | None:
        """Return the value of the client; see :meth:`ClientRunner.of_client`."""
        return values[0]

    def rows(self) -> list[dict[str, Tensor]]:
        """Return the local tensors of the client, by name."""
        self.tensors.adopt()
        tensors = self.tensors.by_name
        rows = {self.row_name(name): tensors[name].detach() for name in self.stored}
        return [{name: t.cpu() for name, t in {**rows, **self._optimizer_rows()}.items()}]
