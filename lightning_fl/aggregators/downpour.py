"""An optimizer of the server that takes clients' moves one after another."""

from __future__ import annotations

from functools import partial

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lightning_fl.aggregators.fedopt import FedOpt
from lightning_fl.types import ClientUpdate


class Downpour(FedOpt):
    r"""Downpour SGD, its clients in turn (Dean et al., 2012, as Yurochkin et al., 2019, use it).

    Each client's move is a gradient for the server's optimizer, one step a client, in the order of
    their numbers:

    .. math:: w \leftarrow \operatorname{Opt}(w, -\Delta_k), \qquad k \in S_t

    Clients start a round from the same model; in the original they fetch it when they please.
    Floating buffers are averaged. Memory grows with the number of clients of a round.

    Args:
        optimizer: Makes the optimizer from the parameters; None is Adam with learning rate 0.01.

    Raises:
        FederationError: See :class:`FedOpt`.

    Example:
        >>> rule = Downpour(partial(torch.optim.SGD, lr=0.5))
        >>> rule.start(torch.zeros(1))
        >>> two = torch.tensor([[1.0], [3.0]])
        >>> rule.update(ClientUpdate(torch.tensor([0, 1]), two, torch.tensor([8, 1])))
        >>> rule.compute()
        tensor([2.])
    """

    ids: list[Tensor] | Tensor
    deltas: list[Tensor] | Tensor

    def __init__(self, optimizer: OptimizerCallable | None = None) -> None:
        super().__init__(optimizer or partial(torch.optim.Adam, lr=0.01))

    def allocate(self, server: Tensor) -> None:
        """Declare the moves of a round, too."""
        super().allocate(server)
        for name in ("ids", "deltas"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, clients: ClientUpdate) -> None:
        """Keep the moves until all are there."""
        super().update(clients)
        self.ids.append(clients.clients.to(clients.delta.device))  # type: ignore[union-attr]
        self.deltas.append(clients.delta.clone())  # type: ignore[union-attr]

    def compute(self) -> Tensor:
        """Return the server's model after a step for each client."""
        found = self.gather_by_client("ids", "deltas")
        return self._stepped(found[1]) if found else self.server
