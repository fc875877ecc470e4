"""Client state between rounds, and the transforms of client updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_fl.contracts.client_part import ClientPart
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.errors import FederationError
from lightning_fl.files import short_repr
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.runners.base import ClientRunner
from lightning_fl.store import ClientStore
from lightning_fl.transforms import UpdateTransform

#: Name prefixes of the client state of update transforms and client parts.
TRANSFORM, PART = "transform.", "part."


class ClientMemory:
    """Client state of the runner, the update transforms and the client parts of an aggregator.

    Args:
        store: Storage of the tensors of all clients.
        transforms: Update transforms, in order.
        parts: Client-side work of the aggregator in addition to training.
        federation: Description of the run.
        device: Device of training.
    """

    def __init__(
        self,
        store: ClientStore,
        transforms: Sequence[UpdateTransform],
        parts: Sequence[ClientPart],
        federation: Federation,
        device: torch.device,
    ) -> None:
        self.store, self.transforms, self.parts = store, transforms, parts
        self._seed, self._device = federation.seed, device
        self._num_parameters = federation.known_layout.num_parameters
        #: Initial client memory of each part.
        self.initial = [part.initial_memory(federation) for part in parts]

    def of_runner(self, client: int) -> dict[str, Tensor]:
        """Return the runner's state of a client: local tensors and optimizer state."""
        stored = self.store.get(client)
        return {name: row for name, row in stored.items() if not name.startswith((TRANSFORM, PART))}

    def of_parts(self, clients: Tensor) -> list[dict[str, Tensor]]:
        """Return the memory of clients for each part, stacked as ``[k, ...]``."""
        stored = [self.store.get(client) for client in clients.tolist()]
        return [
            {
                name: torch.stack([rows.get(f"{PART}{i}.{name}", first) for rows in stored]).to(
                    self._device
                )
                for name, first in initial.items()
            }
            for i, initial in enumerate(self.initial)
        ]

    def keep(
        self,
        update: ClientUpdate,
        of_runner: Sequence[dict[str, Tensor]],
        of_parts: Sequence[dict[str, Tensor]],
        round: int,
        trained: Tensor | None,
    ) -> ClientUpdate:
        """Store the state of clients; return their transformed updates.

        Transforms get the trained parameters only. Their state is stored for all parameters, as
        other layers may be trained in later rounds.

        Args:
            update: Updates of the clients, before transforms.
            of_runner: State of the runner for each client.
            of_parts: Memory of each part, ``[k, ...]`` by name.
            round: Index of the round.
            trained: Positions of the trained parameters in the vector; None means all.
        """
        delta = update.delta.clone() if self.transforms else update.delta
        for i, rows in enumerate(of_parts):
            self._check(i, rows, len(update.clients))
        for row, client in enumerate(update.clients.tolist()):
            memory = self._transform(delta[row], client, round, trained)
            for i, rows in enumerate(of_parts):
                memory |= {f"{PART}{i}.{name}": rows[name][row] for name in self.initial[i]}
            self.store.put(client, {**of_runner[row], **memory})
        return replace(update, delta=delta)

    def check_stored(self, runner: ClientRunner) -> None:
        """Check the names and shapes of the state of all clients, which comes from a checkpoint.

        Args:
            runner: Runner of the clients.

        Raises:
            FederationError: If a client keeps a tensor that clients of this run do not keep.
        """
        tensors = runner.tensors.by_name
        shapes = {runner.row_name(name): tensors[name].shape for name in runner.stored}
        for i, initial in enumerate(self.initial):
            shapes |= {f"{PART}{i}.{name}": first.shape for name, first in initial.items()}
        of_owners = (TRANSFORM, "optimizer.", "number.")
        for client, rows in self.store.rows.items():
            for name, row in rows.items():
                if not name.startswith(of_owners) and shapes.get(name) != row.shape:
                    raise FederationError(
                        f"client {client} keeps {short_repr(name)} of shape {list(row.shape)},"
                        " and clients here do not: restore the module and the aggregator"
                    )

    def _check(self, i: int, rows: Mapping[str, Tensor], count: int) -> None:
        """Check the memory returned by a part against its ``initial_memory``."""
        declared = {
            name: ((count, *first.shape), first.dtype) for name, first in self.initial[i].items()
        }
        stored = {name: (tuple(row.shape), row.dtype) for name, row in rows.items()}
        if stored != declared:
            raise FederationError(
                f"{type(self.parts[i]).__name__} stores {stored} as client memory, but its"
                f" initial_memory declares {declared}: declare every name as it is stored"
            )

    def _transform(
        self, delta: Tensor, client: int, round: int, trained: Tensor | None
    ) -> dict[str, Tensor]:
        """Transform the update of a client in place; return the state of the transforms."""
        n, stored, left = self._num_parameters, self.store.get(client), dict[str, Tensor]()
        for i, transform in enumerate(self.transforms):
            prefix = f"{TRANSFORM}{i}."
            memory = {
                name.removeprefix(prefix): _of_trained(tensor.to(delta.device), n, trained)
                for name, tensor in stored.items()
                if name.startswith(prefix)
            }
            random = generator(self._seed, RandomStream.TRANSFORM, round, client, i)
            if trained is None:
                delta[:n] = transform(delta[:n], memory, random)
            else:
                delta[trained] = transform(delta[trained], memory, random)
            for name, tensor in memory.items():
                left[prefix + name] = _of_all(tensor, n, trained, stored.get(prefix + name))
        return left


def _of_trained(tensor: Tensor, count: int, trained: Tensor | None) -> Tensor:
    """Return the entries of trained parameters from a tensor of all ``count`` parameters."""
    return tensor if trained is None or tensor.shape != (count,) else tensor[trained]


def _of_all(tensor: Tensor, count: int, trained: Tensor | None, before: Tensor | None) -> Tensor:
    """Undo :func:`_of_trained`. Other parameters keep what was stored, or have zeros."""
    if trained is None or tensor.shape != trained.shape:
        return tensor
    if before is None or before.shape != (count,):
        before = tensor.new_zeros(count)
    return before.to(tensor).index_copy(0, trained, tensor)
