"""``GlobalModel``, the tensors of a module that clients exchange, and those that they keep."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_fl.contracts.layout import VectorLayout
from lightning_fl.contracts.update import ServerState
from lightning_fl.runners.client_optimizers import Rows
from lightning_fl.runners.constants import Constants
from lightning_fl.runners.tensors import ModuleTensors, TensorList, flat

BufferPolicy = Literal["average", "server", "local"]


class GlobalModel:
    """Read and write the global model in the user's module.

    Args:
        tensors: The tensors of the user's module; between rounds they are the global model.
        buffers: How floating-point buffers are aggregated; see
            :class:`~lightning_fl.runners.ClientRunner`.
    """

    def __init__(self, tensors: ModuleTensors, buffers: BufferPolicy) -> None:
        self.tensors, self.module, self.buffers = tensors, tensors.module, buffers
        self.constants = Constants(type(tensors.module).__name__, tensors.constants)
        self.named_parameters, self.named_buffers = tensors.parameters, tensors.buffers
        #: Initial values of client-local parameters and buffers, by name.
        self.private = {name: tensors.by_name[name] for name in tensors.local_names}
        self.note_private()
        params, buffers_sent = (
            {name: tensor for name, tensor in named.items() if name not in self.private}
            for named in (self.named_parameters, self.named_buffers)
        )
        #: Aggregated parameters and floating-point buffers, by name.
        self.shared = {n: p for n, p in params.items() if p.is_floating_point()}
        self.shared_buffers = {n: b for n, b in buffers_sent.items() if b.is_floating_point()}
        #: Aggregated integer parameters and buffers, by name.
        sent = {**params, **buffers_sent}.items()
        self.named_counters = {n: t for n, t in sent if not t.is_floating_point()}
        floating = [*self.shared.values(), *self.shared_buffers.values()]
        self.vector = TensorList(floating, torch.float32)
        self.num_parameters = sum(flat(p).numel() for p in self.shared.values())
        self.counters = TensorList(self.named_counters.values(), torch.int64)
        #: Names of the parameters and buffers that are stored for each client.
        own_buffers = self.named_buffers if buffers == "local" else ()
        self.stored = list(dict.fromkeys([*self.private, *own_buffers]))

    def read(self) -> ServerState:
        """Return a copy of the module's state."""
        self.tensors.adopt()
        return ServerState(self.vector.read(), self.counters.read())

    def write(self, state: ServerState) -> None:
        """Load a state into the module."""
        self.tensors.adopt()
        self.tensors.warn_of_late_buffers()
        self.vector.write(state.vector)
        self.counters.write(state.counters)
        self.restore_private()

    def note_private(self) -> None:
        """Record the current values of client-local tensors as their initial values."""
        tensors = self.tensors.by_name
        self.private = {name: tensors[name].detach().clone() for name in self.private}

    def restore_private(self) -> None:
        """Load the initial values of client-local tensors into the module."""
        self.restore({self.row_name(name): first for name, first in self.private.items()})

    def row_name(self, name: str) -> str:
        """Return the name of a tensor in the stored rows of a client."""
        return f"{'parameter' if name in self.named_parameters else 'buffer'}.{name}"

    @torch.no_grad()
    def restore(self, rows: Rows) -> None:
        """Copy parameters and buffers of a client's rows into the module."""
        for name, tensor in self.tensors.by_name.items():
            if (row := rows.get(self.row_name(name))) is not None:
                tensor.copy_(row, non_blocking=True)

    @property
    def layout(self) -> VectorLayout:
        """The position of each exchanged tensor in the vector."""
        shapes = {n: t.shape for n, t in {**self.shared, **self.shared_buffers}.items()}
        counters = sum(self.counters.sizes)
        return VectorLayout(shapes, self.num_parameters, counters, self.vector.dtype)

    def _moved(self, local: Tensor, state: ServerState) -> Tensor:
        """Return the updates of local vectors, ``[k, P]``, which are overwritten."""
        at = self.num_parameters
        # A constant buffer may hold infinities, as attention masks do, or NaN: inf - inf is NaN.
        now, before = local[:, at:], state.vector[:, at:]
        kept = (now == before) | (now.isnan() & before.isnan())
        delta = local.sub_(state.vector)
        delta[:, at:].masked_fill_(kept, 0)
        if self.buffers == "server":
            delta[:, at:] = 0
        return delta
