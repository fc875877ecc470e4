"""Downpour SGD: one server step per client update."""

from __future__ import annotations

from functools import partial

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from lightning_fl.aggregators.fedopt import FedOpt
from lightning_fl.contracts.update import ClientUpdate


class Downpour(FedOpt):
    r"""Sequential Downpour SGD (Dean et al., 2012, as used by Yurochkin et al., 2019).

    The server optimizer takes one step per client, in the order of client indices, with the
    negative client update as the gradient:

    .. math:: w \leftarrow \operatorname{Opt}(w, -\Delta_k), \qquad k \in S_t

    All clients of a round start from the same model; in the original they fetch it asynchronously.
    Floating-point buffers are averaged. Memory grows with the number of clients per round.

    Args:
        optimizer: Function that creates the optimizer from the parameters. None means Adam with
            learning rate 0.01.
        scheduler: See :class:`FedOpt`; it makes a step after each round.

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

    def __init__(
        self,
        optimizer: OptimizerCallable | None = None,
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer or partial(torch.optim.Adam, lr=0.01), scheduler=scheduler)

    def allocate(self, server: Tensor) -> None:
        """Declare also the list of client updates."""
        super().allocate(server)
        self.add_lists("ids", "deltas")

    def update(self, clients: ClientUpdate) -> None:
        """Store updates until the end of the round."""
        super().update(clients)
        self.append(ids=clients.clients, deltas=clients.delta)

    def compute(self) -> Tensor:
        """Return the global model after one step per client."""
        found = self.gather_by_client("ids", "deltas")
        return self._stepped(found[1], self._mean()) if found else self.server
