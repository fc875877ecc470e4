"""``Stacks``, the tensors of the clients that train at once."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fl.contracts.hyperparameters import HYPERPARAMETERS
from lightning_fl.hooks import attributes_set
from lightning_fl.runners.local_step import Tensors
from lightning_fl.runners.optimizer import restack
from lightning_fl.runners.tensors import GLOBAL_PARAMETERS, ModuleTensors, wants_start


@cache
def keep_freed_memory() -> None:
    """Keep freed memory in the process instead of returning it to the system (glibc only).

    Stacked tensors are allocated anew in every step. Above 128 KiB, glibc requests their memory
    from the system each time, which fills it with zeros page by page. For a small model this takes
    longer than the arithmetic. After this call, glibc keeps up to 1 GiB, in blocks of up to 32 MiB.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "gnu_get_libc_version"):
        for threshold, size in ((-3, 2**25), (-1, 2**30)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            libc.mallopt(threshold, size)


class Stacks:
    """Store the stacked parameters and buffers of the clients that train at once, ``[k, ...]``.

    Args:
        tensors: The tensors of the user's module.
        params: Stacked parameters by name, as in the optimizer. They are replaced when the number
            of clients changes.
    """

    def __init__(self, tensors: ModuleTensors, params: dict[str, nn.Parameter]) -> None:
        self.tensors, self.module, self.params = tensors, tensors.module, params
        self._memory: Tensors = {}
        self.buffers: Tensors = {}
        #: Parameters that the clients started from, ``[k, ...]``; empty if the module does not ask
        #: for them.
        self.fixed: Tensors = {}
        #: Numbers of the module that the policy has set, by name, ``[k]``.
        self.hyperparameters: Tensors = {}
        #: Number of clients.
        self.count = 1

    @property
    def first(self) -> nn.Parameter:
        """The first stacked parameter, for its device and dtype."""
        return next(iter(self.params.values()))

    @property
    def by_name(self) -> Tensors:
        """Stacked parameters and buffers, by name."""
        return {**self.params, **self.buffers}

    def _resize(self, count: int, optimizer: torch.optim.Optimizer) -> None:
        """Make stacks for a number of clients, in the memory of earlier ones if they fit.

        A CUDA graph is launched for tensors at the same addresses only.
        """
        self.count = count
        stacks = dict[int, nn.Parameter]()
        for name, param in self.params.items():
            if len(param) == count:
                continue
            memory = self._memory.get(name)
            if memory is None or len(memory) < count:
                memory = self._memory[name] = param.new_empty(count, *param.shape[1:])
            stack = nn.Parameter(memory[:count], requires_grad=param.requires_grad)
            self.params[name] = stacks[id(param)] = stack
        restack(optimizer, stacks)

    def load(
        self, count: int, starts: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        """Copy the values that the clients start from into the stacks.

        Args:
            count: Number of clients.
            starts: Parameters and buffers by name, ``[k, ...]``.
            optimizer: The optimizer; it gets the new stacks if the number of clients has changed.
        """
        self._resize(count, optimizer)
        for name, param in self.params.items():
            param.copy_(starts[name])
            param.grad = None
        self.follow_module()
        self.buffers = {
            name: starts[name].clone(memory_format=torch.contiguous_format)
            for name in self.tensors.buffers
        }

    def note_start(self, equal: Container[str] = ()) -> None:
        """Record the parameters that clients start from, if the module asks for them.

        Args:
            equal: Names of the parameters that are the same for all clients.
        """
        self.fixed = {}
        for name in self.tensors.compared:
            param = self.params[name].detach()
            self.fixed[name] = param[: 1 if name in equal else None].clone().expand(param.shape)

    def follow_module(self) -> None:
        """Train the parameters that the module trains, which hooks may change."""
        for name, param in self.params.items():
            param.requires_grad_(self.tensors.parameters[name].requires_grad)

    @property
    def arguments(self) -> dict[str, Tensors]:
        """The arguments of :meth:`LocalStep.many`, without samples."""
        return {
            "params": {**self.params},
            "buffers": self.buffers,
            "fixed": self.fixed,
            "hyperparameters": self.hyperparameters,
        }

    @contextmanager
    def client(self, row: int) -> Iterator[None]:
        """Put a client's tensors into the module within a ``with`` block.

        The tensors are views of the stacks, so that in-place writes of the module arrive there.
        Tensors that it replaces, by ``data`` or as a buffer, are copied back.
        """
        start: dict[str, dict[str, Any]] = {}
        if wants_start(self.module):
            fixed = {name: values[row] for name, values in self.fixed.items()}
            start[GLOBAL_PARAMETERS] = fixed | self.tensors.constants
        if self.hyperparameters:
            own = {name: values[row] for name, values in self.hyperparameters.items()}
            start[HYPERPARAMETERS] = vars(self.module)[HYPERPARAMETERS] | own
        values = {name: stack.detach()[row] for name, stack in self.by_name.items()}
        tensors = self.tensors.by_name
        before = {name: tensor.data for name, tensor in tensors.items()}
        with attributes_set(self.module, start):
            try:
                for name, tensor in tensors.items():
                    tensor.data = values[name]
                yield
            finally:
                try:
                    self.tensors.adopt()
                finally:  # also if it refuses a buffer
                    for name, tensor in tensors.items():
                        if tensor.data_ptr() != values[name].data_ptr():
                            values[name].data.copy_(tensor.data)
                        tensor.data = before[name]
