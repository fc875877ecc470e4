"""What clients return to the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from lightning_fl.errors import FederationError


class ServerState(NamedTuple):
    """Model state of the server, from which clients start.

    Args:
        vector: Parameters and floating-point buffers, flattened, ``[P]``.
        counters: Integer buffers, flattened, ``[C]``.
    """

    vector: Tensor
    counters: Tensor


#: Fields of a client update with one row per client, besides its extras.
_FIELDS = ("clients", "delta", "num_samples", "num_steps", "lr")


@dataclass(frozen=True)
class ClientUpdate:
    """Client updates after local training, one row per client.

    Args:
        clients: Ids of the clients, ``[k]``.
        delta: Local models minus the models from which the clients started, ``[k, P]``.
        num_samples: Number of training samples per client, ``[k]``.
        num_steps: Number of local steps per client, ``[k]``; None if unknown.
        lr: Mean learning rate over the local steps of each client, ``[k]``; None if unknown.
        extras: Tensors returned by the :class:`~lightning_fl.contracts.client_part.ClientPart`
            objects of the aggregator, ``[k, ...]`` by name.

    Raises:
        FederationError: If the lengths differ.

    Example:
        >>> import torch
        >>> update = ClientUpdate(torch.tensor([3, 5]), torch.ones(2, 4), torch.tensor([10, 20]))
        >>> update.select(torch.tensor([False, True])).clients
        tensor([5])
    """

    clients: Tensor
    delta: Tensor
    num_samples: Tensor
    num_steps: Tensor | None = None
    lr: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        k = len(self.clients)
        for name, value in {**{name: vars(self)[name] for name in _FIELDS}, **self.extras}.items():
            if value is None:
                continue
            ndim = {"delta": 2, "num_samples": 1}.get(name, value.ndim)
            if value.shape[:1] != (k,) or value.ndim != ndim:
                raise FederationError(
                    f"{name} must have one row for each of the {k} clients, got shape"
                    f" {tuple(value.shape)}"
                )

    def select(self, rows: Tensor) -> ClientUpdate:
        """Return the updates of selected clients.

        Args:
            rows: Boolean mask, ``[k]``, or positions.
        """

        def pick(value: Any) -> Any:
            return None if value is None else value[rows.to(value.device)]

        extras = {name: pick(value) for name, value in self.extras.items()}
        return ClientUpdate(**{n: pick(vars(self)[n]) for n in _FIELDS}, extras=extras)
