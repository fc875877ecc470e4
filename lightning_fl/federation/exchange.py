"""What a rule adds to the local work of clients, besides their training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_fl.federation.context import Federation
from lightning_fl.runners.base import ClientRunner, GradientTerm
from lightning_fl.types import FederationError

#: Measures something of each client in training on all its training samples.
Measure = Callable[[], Tensor]


class ClientContext:
    """The clients that train in a process at the moment: one, or several that train at once.

    Every tensor has one row for each client, on the module's device.

    Args:
        federation: The run.
        round: Index of the round.
        clients: Ids, ``[k]``.
        num_samples: Training samples of each, ``[k]``.
        num_steps: Local steps of each in this round, ``[k]``.
        runner: Where the clients train.
        losses: Measures the mean loss of each client's model on its samples, ``[k]``.
        gradients: Measures the gradient of that loss, ``[k, num_parameters]``.
        trained: Mask of the trained parameters, ``[num_parameters]``; None means all.
    """

    def __init__(
        self,
        federation: Federation,
        round: int,
        clients: Tensor,
        num_samples: Tensor,
        num_steps: Tensor,
        runner: ClientRunner,
        losses: Measure,
        gradients: Measure,
        trained: Tensor | None = None,
    ) -> None:
        self.federation, self.round, self.clients = federation, round, clients
        self.num_samples, self.num_steps, self.trained = num_samples, num_steps, trained
        self._runner, self._losses, self._gradients = runner, losses, gradients
        self._delta, self._lr = torch.empty(0), torch.empty(0)

    def mean_losses(self) -> Tensor:
        """Return the mean loss of each client's model on all its training samples, ``[k]``.

        This is a pass over the samples in evaluation mode. The module needs a method
        ``federated_losses(batch)`` that returns the loss of each sample.
        """
        return self._losses()

    def mean_gradients(self) -> Tensor:
        """Return the gradient of :meth:`mean_losses` at each client's model, ``[k, P]``.

        ``P`` is the number of exchanged parameters; frozen ones have 0. In float64.
        """
        return self._gradients()

    def add_to_gradients(self, term: GradientTerm) -> None:
        """Add a term to the gradients of every local step of these clients in this round.

        It is added after the backward pass and after gradient clipping, before the optimizer's
        update.

        Args:
            term: Maps stacked parameters by name, ``[k, *shape]``, to what is added to their
                gradients, by name and of the same shapes. A name may be left out.
        """
        self._runner.add_to_gradients(term)

    @property
    def delta(self) -> Tensor:
        """Local models minus what the clients started from, ``[k, P]``; after training only.

        With buffers, and before attacks and update transforms.
        """
        return self._delta

    @property
    def lr(self) -> Tensor:
        """Mean learning rate of each client's local steps, ``[k]`` in float64; after training only.

        With schedulers, of the optimizer's first parameter group.
        """
        return self._lr

    def finish(self, delta: Tensor, lr: Tensor) -> None:
        """Note the result of local training. The round calls it.

        Args:
            delta: See :attr:`delta`.
            lr: See :attr:`lr`.
        """
        self._delta, self._lr = delta, lr


class ClientPart(ABC):
    """What a rule adds to the local work of a client; returned by ``Aggregator.client_parts``.

    A part works on several clients at once: every tensor that it gets or returns has one row for
    each client of ``client.clients``, whether they train at once or one after another.
    """

    def initial_memory(self, federation: Federation) -> dict[str, Tensor]:
        """Return what a client remembers before its first round, by name.

        Each client has its own copy, which is saved in checkpoints. By default nothing.
        """
        return {}

    def start(  # noqa: B027  # some parts act at the end only
        self, client: ClientContext, memory: dict[str, Tensor], broadcast: Mapping[str, Tensor]
    ) -> None:
        """Act before the first local step, when the clients hold the model that they start from.

        Args:
            client: The clients.
            memory: What they remember, ``[k, ...]`` by name.
            broadcast: What the rule sent with the model; the same tensors for all clients.
        """

    @abstractmethod
    def end(self, client: ClientContext, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """Act after the last local step; return what is sent with the update.

        A client whose update is dropped sends nothing, and forgets what is written here.

        Args:
            client: The clients, with ``client.delta`` and ``client.lr``.
            memory: What they remember, ``[k, ...]`` by name. Assign new tensors to the names.

        Returns:
            ``ClientUpdate.extras``: tensors ``[k, ...]`` by name; empty if nothing is sent.
        """


def check_losses(part: object, module: Any) -> None:
    """Refuse a module that does not tell the losses of samples.

    Args:
        part: The rule or policy that needs them.
        module: The user's module; None outside a fit, where nothing is checked.

    Raises:
        FederationError: If the module has no method ``federated_losses``.
    """
    if module is not None and not callable(getattr(module, "federated_losses", None)):
        raise FederationError(
            f"{type(part).__name__} looks at the losses of samples, and {type(module).__name__} has"
            " no method federated_losses(batch) that returns the loss of each sample: write one, or"
            " use a ClientModule"
        )


class MeanLosses(ClientPart):
    """Measure each client's loss on all its samples before and after training.

    The update gets ``extras["loss_before"]`` and ``extras["loss_after"]``, ``[k]`` in float64.
    """

    def __init__(self) -> None:
        self._before = torch.empty(0)

    def start(
        self, client: ClientContext, memory: dict[str, Tensor], broadcast: Mapping[str, Tensor]
    ) -> None:
        """Measure the loss of the model that the clients start from."""
        self._before = client.mean_losses()

    def end(self, client: ClientContext, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """Measure the loss of the clients' own models."""
        return {"loss_before": self._before, "loss_after": client.mean_losses()}
