"""Where clients train: the tensors of a module, loaded for a client and collected after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_fl.types import FederationError, ServerState

BufferPolicy = Literal["average", "server", "local"]


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


class TensorList:
    """Tensors that are read and written as one vector, in one dtype that holds them all."""

    def __init__(self, tensors: Iterable[Tensor], empty: torch.dtype) -> None:
        self.tensors = list(tensors)
        views = [_flat(t) for t in self.tensors]
        self.sizes = [len(v) for v in views]
        self.dtype = empty
        for i, view in enumerate(views):
            self.dtype = view.dtype if i == 0 else torch.promote_types(self.dtype, view.dtype)
        self.device = views[0].device if views else torch.device("cpu")

    def read(self) -> Tensor:
        """Return a copy, ``[sum of sizes]``."""
        if not self.tensors:
            return torch.zeros(0, dtype=self.dtype, device=self.device)
        return torch.cat([_flat(t).to(self.device) for t in self.tensors]).to(self.dtype)

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Copy a vector into the tensors."""
        if not self.tensors:
            return
        plain = [torch.view_as_real(t) if t.is_complex() else t for t in self.tensors]
        rows = vector.split(self.sizes)
        torch._foreach_copy_(plain, [r.view_as(t) for r, t in zip(rows, plain, strict=True)])


class ModuleLane:
    """One lane: a LightningModule's own parameters, in place.

    Args:
        module: Any LightningModule.
        buffers: What becomes of floating buffers after a client. ``average``: they are averaged
            like parameters, integer buffers keep their maximum. ``server``: the server keeps its
            own. ``local``: each client keeps its own, the server the average.
        optimizer: The module's optimiser.
        keep_optimizer: Whether a client keeps its optimiser's state from round to round.
    """

    def __init__(
        self,
        module: LightningModule,
        buffers: BufferPolicy,
        optimizer: torch.optim.Optimizer,
        keep_optimizer: bool,
    ) -> None:
        self.module = module
        self.buffers, self.optimizer, self.keep_optimizer = buffers, optimizer, keep_optimizer
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and 0 in buffer.stride():  # expanded: cannot be written to
                    owner._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)
        self.named_buffers = dict(module.named_buffers())
        self._owned = [
            (owner, name, buffer)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        params = list(module.parameters())
        floats = [b for b in self.named_buffers.values() if b.is_floating_point() or b.is_complex()]
        self._ratio, self._own_lr = 1.0, list[Any]()
        #: The optimiser's own learning rate, which a client's is a ratio to. With a scheduler it is
        #: the first value: the scheduler's factor stays in force.
        self.base_lr = float(optimizer.param_groups[0].get("lr", 0.0))
        self._hooks = [
            optimizer.register_step_pre_hook(self._set_lr),
            optimizer.register_step_post_hook(self._restore_lr),
        ]
        self.vector = TensorList([*params, *floats], torch.float32)
        self.num_parameters = sum(_flat(p).numel() for p in params)
        self.counters = TensorList(
            (
                b
                for b in self.named_buffers.values()
                if not (b.is_floating_point() or b.is_complex())
            ),
            torch.int64,
        )

    @torch.no_grad()
    def _adopt(self) -> None:
        """Take back buffers that the module set anew (``self.seen = self.seen + 1``)."""
        for owner, name, buffer in self._owned:
            if (now := owner._buffers[name]) is not buffer and now is not None:
                buffer.copy_(now)
                owner._buffers[name] = buffer

    def read(self) -> ServerState:
        """Return a copy of the module's state."""
        self._adopt()
        return ServerState(self.vector.read(), self.counters.read())

    def write(self, state: ServerState) -> None:
        """Put a state into the module and forget the optimiser's."""
        self._adopt()
        self.vector.write(state.vector)
        self.counters.write(state.counters)
        self.optimizer.state.clear()

    def close(self) -> None:
        """Let go of the optimiser."""
        for hook in self._hooks:
            hook.remove()
        self._restore_lr()  # an exception inside a step comes before the hook after it

    def _set_lr(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Only inside the step: in the groups it would corrupt the module's own schedulers."""
        if self._ratio != 1:
            self._own_lr = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self._ratio

    def _restore_lr(self, *_: Any) -> None:
        if self._own_lr:
            for group, lr in zip(self.optimizer.param_groups, self._own_lr, strict=True):
                group["lr"] = lr
            self._own_lr = []

    def load(self, state: ServerState, rows: dict[str, Tensor], lr: float) -> None:
        """Begin a client at the server's state, with the tensors it kept for itself.

        Args:
            state: What the client starts from.
            rows: What :meth:`rows` returned at the end of its last round.
            lr: Learning rate of the first parameter group; the others keep their ratio to it.

        Raises:
            FederationError: If the optimiser has no learning rate to be a ratio to.
        """
        self.write(state)
        if lr != self.base_lr and not self.base_lr:
            raise FederationError(
                f"the policy sets lr={lr} as a ratio to the optimiser's own learning rate, which is"
                " 0 or missing: give the optimiser a positive lr"
            )
        self._ratio = lr / self.base_lr if self.base_lr else 1.0
        if not rows:
            return
        with torch.no_grad():
            for name, buffer in self.named_buffers.items():
                if (row := rows.get(f"buffer.{name}")) is not None:
                    buffer.copy_(row)
        for i, (param, group) in enumerate(self._optimized()):
            prefix = f"optimizer.{i}."
            on_device = group.get("capturable") or group.get("fused")
            for name, row in rows.items():
                if name.startswith(prefix):
                    # As torch's own load: step counters stay on the CPU, unless the step is fused.
                    device = param.device if row.ndim or on_device else row.device
                    self.optimizer.state[param][name.removeprefix(prefix)] = row.to(
                        device, copy=True
                    )

    def collect(self, state: ServerState) -> tuple[Tensor, Tensor]:
        """Return a client's move away from the server, ``[1, P]``, and its counters, ``[C]``."""
        self._adopt()
        local, start = self.vector.read(), state.vector
        # A buffer may hold infinity for good, as attention masks do: what stayed has not moved.
        kept = local[self.num_parameters :] == start[self.num_parameters :]
        delta = local.sub_(start)
        delta[self.num_parameters :].masked_fill_(kept, 0)
        if self.buffers == "server":
            delta[self.num_parameters :] = 0
            return delta[None], state.counters
        return delta[None], self.counters.read()

    def rows(self) -> dict[str, Tensor]:
        """Return the tensors that the client keeps for itself."""
        self._adopt()
        rows = {}
        if self.buffers == "local":
            rows = {f"buffer.{name}": buffer for name, buffer in self.named_buffers.items()}
        if self.keep_optimizer:
            for i, (param, _) in enumerate(self._optimized()):
                for name, value in self.optimizer.state.get(param, {}).items():
                    if value is None:
                        continue
                    if not isinstance(value, Tensor):
                        raise FederationError(
                            f"optimizer_state: keep cannot keep {name} of"
                            f" {type(self.optimizer).__name__}: it is not a tensor. Choose reset"
                        )
                    rows[f"optimizer.{i}.{name}"] = value
        return rows

    def _optimized(self) -> Sequence[tuple[nn.Parameter, dict[str, object]]]:
        return [(p, group) for group in self.optimizer.param_groups for p in group["params"]]
