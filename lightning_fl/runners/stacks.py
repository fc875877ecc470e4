"""Storage of the stacked tensors of several clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_fl.hooks import attributes_set
from lightning_fl.runners.hyperparameters import HYPERPARAMETERS
from lightning_fl.runners.local_step import Tensors
from lightning_fl.runners.tensors import GLOBAL_PARAMETERS, ModuleTensors


class Stacks:
    """Store the stacked parameters and buffers of the clients that train at once, ``[k, ...]``.

    Args:
        tensors: The tensors of the user's module.
        params: Stacked parameters by name, as in the optimizer. They are replaced when the number
            of clients changes.
        wants_channels_last: Whether to store images and filters in channels-last memory format if
            possible.
    """

    def __init__(
        self, tensors: ModuleTensors, params: dict[str, nn.Parameter], wants_channels_last: bool
    ) -> None:
        self.tensors, self.module = tensors, tensors.module
        self.params, self.wants_channels_last = params, wants_channels_last
        self._memory: Tensors = {}
        self.buffers: Tensors = {}
        #: Parameters that the clients started from, ``[k, ...]``, or ``[...]`` if they are equal
        #: for all clients; empty if the module does not ask for them.
        self.fixed: Tensors = {}
        self.fixed_is_shared = True
        #: Numbers of the module that the policy has set, by name, ``[k]``.
        self.hyperparameters: Tensors = {}
        #: Whether steps are vectorized; otherwise the clients train one after another.
        self.at_once = True
        #: Number of clients.
        self.count = 1
        #: The client whose tensors are in the module; None if there is none.
        self.row: int | None = None

    # --- memory -----------------------------------------------------------------------------------

    @property
    def first(self) -> nn.Parameter:
        """The first stacked parameter, for its device and dtype."""
        return next(iter(self.params.values()))

    @property
    def by_name(self) -> Tensors:
        """Stacked parameters and buffers, by name."""
        return {**self.params, **self.buffers}

    @property
    def maps(self) -> bool:
        """Whether the step of the clients in training is vectorized."""
        return self.at_once and self.count > 1

    @property
    def channels_last(self) -> bool:
        """Whether each client's images and filters are stored in channels-last memory format.

        Disabled for vectorized steps: under ``vmap``, two successive convolutions with such filters
        silently get wrong gradients for a batch of one sample (torch 2.14).
        """
        return self.wants_channels_last and not self.maps

    def train_one_by_one(self) -> None:
        """Switch to sequential steps."""
        self.at_once = False
        for param in self.params.values():
            param.data = self.laid_out(param.data)

    def laid_out(self, stack: Tensor) -> Tensor:
        """Return a stack of tensors in the memory layout that the clients train with."""
        if not self.channels_last or stack.ndim != 5:
            return stack
        _, n, c, h, w = stack.shape
        # Compare strides: with one channel, contiguous() accepts both memory formats.
        strides = (n * c * h * w, c * h * w, 1, c * w, c)
        if stack.stride() == strides:
            return stack
        return stack.new_empty_strided(stack.shape, strides).copy_(stack)

    def _resize(self, count: int, optimizer: torch.optim.Optimizer) -> None:
        """Make stacks for a number of clients, in the memory of earlier ones if they fit.

        A CUDA graph is launched for tensors at the same addresses only.
        """
        self.count = count
        resized: dict[int, tuple[str, nn.Parameter]] = {}
        for name, param in self.params.items():
            if len(param) == count and self.laid_out(param).stride() == param.stride():
                continue
            memory = self._memory.get(name)
            if memory is None or len(memory) < count or self.laid_out(memory) is not memory:
                memory = self.laid_out(param.new_empty(count, *param.shape[1:]))
                self._memory[name] = memory
            stack = nn.Parameter(memory[:count], requires_grad=param.requires_grad)
            resized[id(param)] = name, stack
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
        self.fixed_is_shared = is_shared
        if self.tensors.wants_start:
            self.fixed = {
                name: (param.detach()[0] if is_shared else param.detach()).clone()
                for name, param in self.params.items()
            }

    def follow_module(self) -> None:
        """Train the parameters that the module trains, which hooks may change."""
        for name, param in self.params.items():
            param.requires_grad_(self.tensors.parameters[name].requires_grad)

    def arguments(self, pick: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return the arguments of :meth:`LocalStep.many` for some clients, without their samples.

        Args:
            pick: Function that returns the rows of these clients from a stack.
        """
        fixed = self.fixed if self.fixed_is_shared else tree_map(pick, self.fixed)
        return {
            "params": tree_map(pick, self.params),
            "buffers": tree_map(pick, self.buffers),
            "fixed": fixed,
            "fixed_is_shared": self.fixed_is_shared,
            "hyperparameters": tree_map(pick, self.hyperparameters),
        }

    def leaves(self, pick: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return :meth:`arguments` with parameters that are leaves for autograd."""
        own = self.arguments(lambda t: pick(t.detach()))
        for name, param in own["params"].items():
            param.requires_grad_(self.params[name].requires_grad)
        return own

    @contextmanager
    def client(self, row: int) -> Iterator[None]:
        """Put a client's tensors into the module within a ``with`` block.

        The tensors are views of the stacks, so that in-place writes of the module arrive there.
        Tensors that it replaces, by ``data`` or as a buffer, are copied back.
        """
        start: dict[str, dict[str, Any]] = {}
        if self.tensors.wants_start:
            fixed = self.fixed
            if not self.fixed_is_shared:
                fixed = {name: values[row] for name, values in fixed.items()}
            start[GLOBAL_PARAMETERS] = fixed | self.tensors.constants
        if self.hyperparameters:
            own = {name: values[row] for name, values in self.hyperparameters.items()}
            start[HYPERPARAMETERS] = vars(self.module)[HYPERPARAMETERS] | own
        rows = {name: stack.detach()[row] for name, stack in self.by_name.items()}
        own_row = attributes_set(self, {"row": row})
        with attributes_set(self.module, start), own_row, self.values(rows):
            yield

    @contextmanager
    def values(self, values: Tensors) -> Iterator[None]:
        """Put values into the module within a ``with`` block, and copy its writes back to them."""
        tensors = self.tensors.by_name
        before = {name: tensor.data for name, tensor in tensors.items()}
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

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Undo a step's own writes to parameters and buffers, such as moving averages."""
        tensors = self.by_name
        before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        try:
            yield
        finally:
            for name, value in before.items():
                tensors[name].data.copy_(value)

    def versions(self) -> list[int]:
        """Return the version counters of the parameters, which every write increments."""
        return [param._version for param in self.params.values()]
