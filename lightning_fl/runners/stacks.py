"""Storage of the tensors of several clients, stacked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_fl.hooks import attributes_set
from lightning_fl.runners.local_step import Tensors
from lightning_fl.runners.tensors import GLOBAL_PARAMETERS, ModuleTensors


class Stacks:
    """Parameters and buffers of the clients that train at once, stacked, ``[k, ...]``.

    Args:
        tensors: The tensors of the user's module.
        params: Stacked parameters by name, which the optimizer holds. They are replaced where
            the number of clients changes.
        wants_channels_last: Whether images and filters have their channels last in memory where
            that is possible.
    """

    def __init__(
        self, tensors: ModuleTensors, params: dict[str, nn.Parameter], wants_channels_last: bool
    ) -> None:
        self.tensors, self.module = tensors, tensors.module
        self.params, self.wants_channels_last = params, wants_channels_last
        self.buffers: Tensors = {}
        #: Parameters that the clients started from, ``[k, ...]``, or ``[...]`` where all started
        #: from the same; empty if the module does not ask for them.
        self.fixed: Tensors = {}
        self.fixed_is_shared = True
        #: Whether the step is mapped over the clients; else they train one after another.
        self.at_once = True
        #: Number of clients.
        self.count = 1

    # --- memory -----------------------------------------------------------------------------------

    @property
    def first(self) -> nn.Parameter:
        """The first stacked parameter, an example of device and dtype."""
        return next(iter(self.params.values()))

    @property
    def maps(self) -> bool:
        """Whether the step is mapped over the clients that are in training."""
        return self.at_once and self.count > 1

    @property
    def channels_last(self) -> bool:
        """Whether images and filters have their channels last in memory, client by client.

        Not where the step is mapped: with such filters two convolutions, one after the other, get
        wrong gradients under vmap for a batch of one sample (torch 2.14), without an error.
        """
        return self.wants_channels_last and not self.maps

    def train_one_by_one(self) -> None:
        """Do not map the step over the clients."""
        self.at_once = False
        for param in self.params.values():
            param.data = self.laid_out(param.data)

    def laid_out(self, stack: Tensor) -> Tensor:
        """Return a stack of tensors in the layout in memory that the clients train with."""
        if not self.channels_last or stack.ndim != 5:
            return stack
        _, n, c, h, w = stack.shape
        # By its strides: contiguous() takes one channel for first and last at once.
        strides = (n * c * h * w, c * h * w, 1, c * w, c)
        if stack.stride() == strides:
            return stack
        return stack.new_empty_strided(stack.shape, strides).copy_(stack)

    def _resize(self, count: int, optimizer: torch.optim.Optimizer) -> None:
        """Make room for a number of clients."""
        self.count = count
        resized = {
            id(param): (
                name,
                nn.Parameter(
                    self.laid_out(param.new_empty(count, *param.shape[1:])),
                    requires_grad=param.requires_grad,
                ),
            )
            for name, param in self.params.items()
            if len(param) != count or self.laid_out(param).stride() != param.stride()
        }
        if not resized:
            return
        self.params.update(resized.values())
        for group in optimizer.param_groups:
            group["params"] = [
                resized[id(p)][1] if id(p) in resized else p for p in group["params"]
            ]

    # --- values -----------------------------------------------------------------------------------

    def load(
        self,
        count: int,
        starts: Mapping[str, Tensor],
        is_shared: bool,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Copy the values that the clients start from into the stacks.

        Args:
            count: Number of clients.
            starts: Parameters and buffers by name, ``[k, ...]``, or ``[...]`` for all clients.
            is_shared: Whether all clients start from the same parameters.
            optimizer: Gets the new stacks where the number of clients has changed.
        """
        self._resize(count, optimizer)
        for name, param in self.params.items():
            param.copy_(starts[name])
            param.grad = None
            param.requires_grad_(self.tensors.parameters[name].requires_grad)
        self.buffers = {
            name: starts[name].clone(memory_format=torch.contiguous_format)
            for name in self.tensors.buffers
        }
        self.fixed_is_shared = is_shared
        if self.tensors.wants_start:
            self.fixed = {
                name: (param.detach()[0] if is_shared else param.detach()).clone()
                for name, param in self.params.items()
            }

    @contextmanager
    def client(self, row: int) -> Iterator[None]:
        """Let the module have the tensors of a client within a ``with`` block.

        They are views of the stacks, so that what the module writes to them in place is there
        already. What it replaces, by ``data`` or as a buffer, is copied.
        """
        start: dict[str, Tensors] = {}
        if self.tensors.wants_start:
            start[GLOBAL_PARAMETERS] = (
                self.fixed
                if self.fixed_is_shared
                else {name: values[row] for name, values in self.fixed.items()}
            )
        stacks: Tensors = {**self.params, **self.buffers}
        rows = {name: stack.detach()[row] for name, stack in stacks.items()}
        with attributes_set(self.module, start), self.values(rows):
            yield

    @contextmanager
    def values(self, values: Tensors) -> Iterator[None]:
        """Let the module have these values; what it writes is in them afterwards."""
        own = {**self.tensors.parameters, **self.tensors.buffers}
        before = {name: tensor.data for name, tensor in own.items()}
        try:
            for name, tensor in own.items():
                tensor.data = values[name]
            yield
        finally:
            self.tensors.adopt()
            for name, tensor in own.items():
                if tensor.data_ptr() != values[name].data_ptr():
                    values[name].data.copy_(tensor.data)
                tensor.data = before[name]

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Undo what a step writes to parameters and buffers by itself, as averages are."""
        tensors: Tensors = {**self.params, **self.buffers}
        before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        try:
            yield
        finally:
            for name, value in before.items():
                tensors[name].data.copy_(value)

    def versions(self) -> list[int]:
        """Return the versions of the parameters, which tell whether they were written to."""
        return [param._version for param in self.params.values()]
