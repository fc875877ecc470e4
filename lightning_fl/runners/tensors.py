"""The tensors of a module, tensors as vectors, and stacked tensors, ``[k, ...]``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from itertools import pairwise

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_fl.contracts.step_module import StepModule
from lightning_fl.errors import FederationError

#: Optional attribute of a module for the parameters that its client started from.
GLOBAL_PARAMETERS = "federated_global_parameters"


class ModuleTensors:
    """Hold the parameters and buffers of a module, by name, at the start of a fit.

    Args:
        module: The module. Its expanded buffers are copied, since they cannot be written to.
        constants: Frozen parameters that are not exchanged and that all clients share, by name.
        local_names: Names of the client-local tensors.
    """

    def __init__(
        self,
        module: LightningModule,
        constants: Mapping[str, nn.Parameter],
        local_names: Collection[str],
    ) -> None:
        self.module, self.constants, self.local_names = module, dict(constants), local_names
        self._has_warned = False
        #: Buffers with their owners and names there, full names and shapes.
        self._owned = []
        for prefix, owner in module.named_modules():
            for name, buffer in owner._buffers.items():
                if buffer is None:
                    continue
                if 0 in buffer.stride():
                    buffer = buffer.clone(memory_format=torch.contiguous_format)
                    owner._buffers[name] = buffer
                full_name = f"{prefix}.{name}".strip(".")
                self._owned.append((owner, name, full_name, buffer, buffer.shape))
        #: Parameters that differ between clients, by name.
        self.parameters = {
            name: p for name, p in module.named_parameters() if name not in self.constants
        }
        self.buffers = dict(module.named_buffers())
        #: Parameters and buffers, by name.
        self.by_name: dict[str, Tensor] = {**self.parameters, **self.buffers}

    @property
    def compared(self) -> list[str]:
        """Names of the parameters that the module compares with the start of its client."""
        if not wants_start(self.module):
            return []
        others = self.module._uncompared if isinstance(self.module, StepModule) else ()
        return [name for name in self.parameters if not name.startswith(others)]

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy buffers that the module replaced (``self.seen = self.seen + 1``) into the originals.

        Raises:
            FederationError: If the shape of a buffer has changed, or if its new values do not fit
                into its dtype.
        """
        changed = list[str]()
        for owner, name, full_name, buffer, shape in self._owned:
            if (now := owner._buffers[name]) is None:
                continue
            # Another dtype would cut off fractions.
            if now.shape != shape or not torch.can_cast(now.dtype, buffer.dtype):
                changed.append(
                    f"{full_name} from {tuple(shape)}, {buffer.dtype}"
                    f" to {tuple(now.shape)}, {now.dtype}"
                )
                buffer.data = buffer.new_zeros(shape)  # so that the global model can be restored
            elif now is not buffer:
                buffer.copy_(now)
            owner._buffers[name] = buffer
        if changed:
            raise FederationError(
                f"{type(self.module).__name__} changed the shape or dtype of its buffer"
                f" {changed[0]}, so that clients cannot be averaged. Register the buffer with its"
                " final shape and dtype"
            )

    def check_parameters(self) -> None:
        """Check that all parameters of the module are those of the start of the fit.

        Raises:
            FederationError: If a parameter was added or replaced.
        """
        known = {id(param) for param in (*self.parameters.values(), *self.constants.values())}
        for name, param in self.module.named_parameters():
            if id(param) not in known:
                raise FederationError(
                    f"{type(self.module).__name__}.{name} is a parameter that was added or replaced"
                    " during the fit, so that clients do not exchange it. Add it before the fit,"
                    " and write new values into it, as with param.data.copy_(values)"
                )

    def warn_of_late_buffers(self) -> None:
        """Warn once of buffers that were registered during the fit and cannot be reset."""
        late = [name for name, _ in self.module.named_buffers() if name not in self.buffers]
        if late and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{type(self.module).__name__} registered the buffer {late[0]} during the fit, so"
                " that it is carried over from client to client and not averaged. Register it"
                " before the fit, or run the module once on a sample before the fit"
            )


def wants_start(module: nn.Module) -> bool:
    """Return whether a module asks for the parameters that its client starts from."""
    return getattr(module, GLOBAL_PARAMETERS, None) is not None


def overlapping(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of two parameters or buffers of a module that share memory, or None.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> net[1].weight.data = net[0].weight.data
        >>> overlapping(net)
        ('0.weight', '1.weight')
    """
    spans = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not is_lazy(tensor) and tensor.layout == torch.strided and tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            size = 1 + sum((length - 1) * stride for length, stride in steps)
            spans.append((start := tensor.data_ptr(), start + size * tensor.element_size(), name))
    pairs = pairwise(sorted(span for span in spans if span[0]))
    return next(((one, two) for (_, end, one), (start, _, two) in pairs if start < end), None)


# --- tensors as vectors ---------------------------------------------------------------------------


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor as a vector."""
    return tensor.detach().reshape(-1)


class TensorList:
    """Read and write tensors as one vector, in their common promoted dtype."""

    def __init__(self, tensors: Iterable[Tensor], empty: torch.dtype) -> None:
        self.tensors = list(tensors)
        views = [flat(t) for t in self.tensors]
        self.sizes = [len(v) for v in views]
        dtypes = [view.dtype for view in views]
        self.dtype = reduce(torch.promote_types, dtypes) if dtypes else empty
        self.device = views[0].device if views else torch.device("cpu")

    def read(self) -> Tensor:
        """Return a copy, ``[sum of sizes]``."""
        empty = torch.zeros(0, dtype=self.dtype, device=self.device)
        return torch.cat([flat(t) for t in self.tensors] or [empty]).to(self.dtype)

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Copy a vector into the tensors."""
        if not self.tensors:
            return
        rows = zip(vector.split(self.sizes), self.tensors, strict=True)
        torch._foreach_copy_(self.tensors, [row.view_as(tensor) for row, tensor in rows])


# --- stacked tensors ------------------------------------------------------------------------------


def unflatten(rows: Tensor, like: Tensor) -> Tensor:
    """Return rows, ``[k, n]``, as a stack of tensors of the shape and dtype of another."""
    return rows.reshape(len(rows), *like.shape).to(like.dtype)


def flatten(stack: Tensor) -> Tensor:
    """Return a stack of tensors as rows, ``[k, n]``."""
    return stack.detach().reshape(len(stack), -1)


def beside(values: Tensor, stack: Tensor) -> Tensor:
    """Return one value per client, ``[k]``, in a shape that broadcasts over a stack."""
    return placed(values, stack).view(-1, *[1] * (stack.ndim - 1))


def placed(small: Tensor, like: Tensor) -> Tensor:
    """Return a small tensor on the device of another, without waiting for the device."""
    return small.to(like.device, non_blocking=True)


def select(stack: Tensor, rows: Tensor) -> Tensor:
    """Return the given rows of a stack."""
    return stack.index_select(0, placed(rows, stack))


def scattered(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return a stack of zeros with the values of some clients at their rows.

    Args:
        values: The values, ``[n, ...]``.
        rows: Their rows in the stack, ``[n]``.
        count: Length of the stack.
    """
    values = values.detach()
    return values.new_zeros(count, *values.shape[1:]).index_copy_(0, placed(rows, values), values)


def is_equal(one: Sequence[Tensor], other: Sequence[Tensor], rtol: float = 0.0) -> bool:
    """Return whether tensors are equal bit for bit or up to rounding, NaN included.

    Args:
        one: Tensors.
        other: Tensors to compare with.
        rtol: Largest relative difference. A hundredth of it is the largest absolute difference.
    """
    return len(one) == len(other) and all(
        torch.equal(a, b) or torch.allclose(a, b, rtol=rtol, atol=rtol / 100, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )
