"""What stands for the clients of a server: their runner, their client part and their data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fl.contracts.client_part import ClientContext, ClientPart
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.update import ServerState
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.datamodules.splits import Split
from lightning_fl.integrations.messages import Reply
from lightning_fl.runners import ClientRunner
from lightning_fl.runners.client_optimizers import Rows


class RemoteRunner(ClientRunner):
    """Clients on other machines: the module holds the model that is sent, a reply what comes back.

    See :class:`~lightning_fl.runners.ClientRunner` for the methods.
    """

    trains_here = False
    #: What the clients have been sent and have sent back; set by the server.
    exchange: Exchange

    def load(self, state: ServerState, rows: Sequence[Rows], lr: Sequence[float]) -> None:
        """Load the model from which the client starts."""
        self.vector.write(state.vector[0])

    def set_hyperparameters(self, values: Mapping[str, Tensor]) -> None:
        """Do nothing: the client gets them with its task."""

    def collect(self, state: ServerState) -> tuple[Tensor, Tensor]:
        """Return the update and the counters of the reply."""
        device, reply = state.vector.device, self.exchange.reply
        return reply.delta[None].to(device), reply.counters[None].to(device)

    def reported(self, outputs: Any) -> Tensor:
        """Return the loss of the reply."""
        return torch.tensor([self.exchange.reply.loss], dtype=torch.float64)

    def mean_lr(self, steps: int, lr: float) -> float:
        """Return the learning rate of the reply."""
        return self.exchange.reply.lr

    def rows(self) -> list[dict[str, Tensor]]:
        """Return nothing: the client keeps its tensors."""
        return [{}]

    def client_parameters(self) -> dict[str, Tensor]:
        """Return nothing: no client trains here."""
        return {}

    def of_client(self, values: Tensor) -> Tensor | None:
        """Return None: no client trains here."""
        return None


class Exchange(ClientPart):
    """What the server does for a client, which does the work of the rule itself.

    Its memory of a client is the last update that it has used.
    """

    #: Reply of the client whose update is collected.
    reply: Reply

    def __init__(self) -> None:
        #: Id of the updates of this round, and of the client's last used one.
        self.update = self.last = 0
        self.broadcast: Mapping[str, Tensor] = {}

    def initial_memory(self, federation: Federation) -> dict[str, Tensor]:
        """Return the id of no update."""
        return {"last": torch.zeros((), dtype=torch.int64)}

    def start(
        self, client: ClientContext, memory: dict[str, Tensor], broadcast: Mapping[str, Tensor]
    ) -> None:
        """Note what the task of the client needs."""
        self.last, self.broadcast = int(memory["last"]), broadcast

    def end(self, client: ClientContext, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """Remember the update, and return the tensors that came with it."""
        memory["last"] = torch.full_like(memory["last"], self.update)
        device = client.delta.device
        return {name: value.to(device) for name, value in self.reply.extras.items()}


class Elsewhere(FederatedDataModule):
    """The data of clients on other machines, of which the sizes are known.

    Args:
        num_samples: Number of training samples of each client.
        batches_per_epoch: Number of batches in a local epoch of each client.
    """

    checksum = ""  # a resumed run may have other samples, with a warning
    samples_are = "training samples"
    sample_bytes = 0

    def __init__(self, num_samples: Sequence[int], batches_per_epoch: Sequence[int]) -> None:
        super().__init__(num_clients=len(num_samples), batch_size=None, val_size=0)
        parts = [torch.zeros(1, dtype=torch.int64).expand(count) for count in num_samples]
        self.split = Split(parts=parts, stream_steps=[parts], samples=str(sum(num_samples)))
        self._num_batches = torch.tensor(batches_per_epoch, dtype=torch.int64)

    @property
    def batches_per_epoch(self) -> Tensor:
        """Number of batches in a local epoch of each client."""
        return self._num_batches

    def example(self) -> None:
        """Return None: there are no samples here."""

    def train_dataloader(self) -> Any:
        """Return batches that nobody reads."""
        return range(int(self._num_batches.max()))  # a list of as many as clients say may be large
