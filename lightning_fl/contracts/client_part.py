"""Interface for client-side work of an aggregator in addition to training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_fl.contracts.context import Federation
from lightning_fl.errors import FederationError

#: Maps the stacked parameters of the clients in training and their gradients, ``[k, *shape]`` by
#: name, to values that are added to the gradients.
GradientTerm = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass
class ClientContext:
    """Access to the clients that train on this process: one client, or several at once.

    Every tensor has one row per client, on the device of the module.

    Args:
        federation: Description of the run.
        round: Index of the round.
        clients: Ids of the clients, ``[k]``.
        num_samples: Number of training samples per client, ``[k]``.
        num_steps: Number of local steps per client in this round, ``[k]``.
        received: Models that the clients received, ``[k, P]``, with buffers. They start from them.
        trained: Mask of the trained parameters, ``[num_parameters]``; None means all.
        add_to_gradients: Adds a term to the gradients in every local step of these clients in this
            round, after gradient clipping and before the update of the optimizer. A term maps
            stacked parameters and their gradients by name, ``[k, *shape]``, to values of the same
            shapes by name; names may be omitted.
        num_batches: Number of training batches per local epoch of each client, ``[k]``.
        start_from: Lets the clients start from other models, ``[k, P]``; for
            :meth:`ClientPart.start`. Tensors that stay with the clients do not change, and an
            update is still the local model minus the received model.
        mean_losses: Returns the mean loss of each client's model on all its training samples,
            ``[k]``, or of the models that it is given, ``[k, P]``. Runs one pass over the samples
            in evaluation mode. The module must have a method ``federated_losses(batch)`` that
            returns the loss of each sample.
        mean_gradients: Returns the gradient of ``mean_losses`` at each client's model,
            ``[k, num_parameters]`` in float64. The gradient of frozen parameters is 0.
        batch_gradients: Returns the gradient of the mean loss of the next training batch of each
            client, at the models that it is given, ``[k, P]``; as ``mean_gradients``. The batches
            are drawn and shuffled as in local training, without end, from a stream of their own
            that begins anew in each round.
    """

    federation: Federation
    round: int
    clients: Tensor
    num_samples: Tensor
    num_steps: Tensor
    received: Tensor
    trained: Tensor | None
    num_batches: Tensor
    add_to_gradients: Callable[[GradientTerm], None]
    start_from: Callable[[Tensor], None]
    mean_losses: Callable[..., Tensor]
    mean_gradients: Callable[[], Tensor]
    batch_gradients: Callable[[Tensor], Tensor]
    #: Local models minus the models that the clients received, ``[k, P]``. Available after
    #: training. Includes buffers; attacks and update transforms are not applied yet.
    delta: Tensor = field(init=False)
    #: Mean learning rate over the local steps of each client, ``[k]`` in float64. Available after
    #: training. Includes schedulers; taken from the first parameter group of the optimizer.
    lr: Tensor = field(init=False)


class ClientPart(ABC):
    """Client-side work of an aggregator, returned by ``Aggregator.client_parts``.

    For example, the control variates of :class:`~lightning_fl.aggregators.Scaffold` are the memory
    of a client part that corrects gradients, and :class:`MeanLosses` evaluates losses.

    All tensors have one row per client of ``client.clients``, both for clients that train at once
    and for clients that train one after another.
    """

    def initial_memory(self, federation: Federation) -> dict[str, Tensor]:
        """Return the initial client memory, tensors by name; empty by default.

        Each client has its own copy, which is saved in checkpoints.

        Args:
            federation: Description of the run.
        """
        return {}

    def start(  # noqa: B027  # some parts act at the end only
        self, client: ClientContext, memory: dict[str, Tensor], broadcast: Mapping[str, Tensor]
    ) -> None:
        """Run before the first local step. The clients hold the model from which they start.

        Args:
            client: The clients.
            memory: Memory of the clients, ``[k, ...]`` by name.
            broadcast: Tensors from ``Aggregator.broadcast``, the same for all clients.
        """

    def personal_models(
        self, federation: Federation, received: Tensor, memory: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Return the models that clients make of received ones before training, ``[k, P]``.

        :class:`~lightning_fl.callbacks.PersonalizedEvaluation` evaluates them. None, the default,
        if the part has none.

        Args:
            federation: Description of the run.
            received: The received models, ``[k, P]``.
            memory: Memory of the clients, ``[k, ...]`` by name.
        """
        return None

    @abstractmethod
    def end(self, client: ClientContext, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run after the last local step; return the tensors to send with the update.

        If the update of a client is dropped, its tensors and changes to its memory are discarded.

        Args:
            client: The clients, with ``client.delta`` and ``client.lr``.
            memory: Memory of the clients, ``[k, ...]`` by name. To change it, assign new tensors.

        Returns:
            Tensors for ``ClientUpdate.extras``, ``[k, ...]`` by name; may be empty.
        """


@runtime_checkable
class HasLosses(Protocol):
    """Module that returns the losses of samples."""

    def federated_losses(self, batch: Any) -> Tensor:
        """Return the loss of each sample, ``[n]``."""


def check_losses(part: object, module: Any) -> None:
    """Check that the module returns the losses of samples.

    Args:
        part: The aggregator or policy that requires these losses.
        module: The user's module; None outside of a fit, where nothing is checked.

    Raises:
        FederationError: If the module has no method ``federated_losses``.
    """
    if module is not None and not isinstance(module, HasLosses):
        raise FederationError(
            f"{type(part).__name__} requires a method federated_losses(batch) that returns the loss"
            f" of each sample: add it to {type(module).__name__}, or use a ClientModule"
        )


class MeanLosses(ClientPart):
    """Evaluate the loss of each client on all its samples before and after training.

    Sends ``extras["loss_before"]`` and ``extras["loss_after"]``, ``[k]`` in float64.

    Args:
        after: Whether the local models are evaluated as well.
    """

    def __init__(self, after: bool = True) -> None:
        self._before = torch.empty(0)
        self._after = after

    def start(
        self, client: ClientContext, memory: dict[str, Tensor], broadcast: Mapping[str, Tensor]
    ) -> None:
        """Evaluate the model from which the clients start."""
        self._before = client.mean_losses()

    def end(self, client: ClientContext, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """Send the losses, and evaluate the local models if asked."""
        after = {"loss_after": client.mean_losses()} if self._after else {}
        return {"loss_before": self._before, **after}
