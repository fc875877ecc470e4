"""Frozen parameters that all clients share, so that they exist once per process."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from lightning_fl.errors import FederationError
from lightning_fl.runners.tensors import flat

#: Size in bytes above which frozen parameters take noticeable time and memory.
LARGE = 2**24


def constant_parameters(
    module: nn.Module, exchange_frozen: bool, local: Collection[str] = ()
) -> dict[str, nn.Parameter]:
    """Return the frozen parameters that are not exchanged.

    Args:
        module: The user's module.
        exchange_frozen: Whether all are exchanged, because a callback will unfreeze some. Otherwise
            they are exchanged unless they are larger than the trained parameters and ``LARGE``.
        local: Names of client-local parameters, which are never constant.
    """
    if exchange_frozen:
        return {}
    shared = {name: p for name, p in module.named_parameters() if name not in local}
    frozen = {name: p for name, p in shared.items() if not p.requires_grad}
    size = sum(p.nbytes for p in frozen.values())
    rest = sum(p.nbytes for p in shared.values()) - size
    return frozen if are_large(size, rest) else {}


def are_large(size: int, trained: int) -> bool:
    """Return whether frozen parameters are shared, given their bytes and those of trained ones."""
    return size > max(LARGE, trained)


class Constants:
    """Check that constant parameters stay constant in a fit.

    Writes through ``param.data`` do not change the version counter of a parameter, so values are
    compared by a checksum.

    Args:
        owner: Name of the module for error messages.
        parameters: The constant parameters, by name.
    """

    def __init__(self, owner: str, parameters: Mapping[str, nn.Parameter]) -> None:
        self.owner, self.parameters = owner, parameters
        self._sums: list[int] = []

    def note(self) -> None:
        """Record the current values; the parameters must not change from here on."""
        self._sums = checksums(self.parameters)

    def check(self) -> None:
        """Check that no parameter has changed; waits for the device once.

        Raises:
            FederationError: If a parameter was changed or unfrozen.
        """
        sums = checksums(self.parameters) if self._sums else []
        for i, (name, parameter) in enumerate(self.parameters.items()):
            if parameter.requires_grad or sums[i : i + 1] != self._sums[i : i + 1]:
                how = "unfrozen" if parameter.requires_grad else "changed"
                raise FederationError(
                    f"{self.owner}.{name} was frozen at the start of the fit (requires_grad=False),"
                    f" so all clients share it, but it was {how} during the fit. Keep what the"
                    " module changes in a buffer, and unfreeze layers by a finetuning callback of"
                    " Lightning"
                )


def checksums(tensors: Mapping[str, Tensor]) -> list[int]:
    """Return the checksum of each tensor; waits for the device once.

    Args:
        tensors: Tensors by name, on one device.

    Example:
        >>> checksums({"w": torch.zeros(3)})
        [0]
    """
    return torch.stack([checksum(t) for t in tensors.values()]).tolist() if tensors else []


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of a tensor, read as 64-bit integers, without a copy of it.

    Example:
        >>> one = torch.ones(3)
        >>> checksum(one) == checksum(one.clone()), checksum(one) == checksum(0.99 * one)
        (tensor(True), tensor(False))
    """
    data = flat(tensor).contiguous().view(torch.uint8)
    words = data[: len(data) // 8 * 8]
    if words.storage_offset() % 8:  # cannot be viewed as integers
        words = words.clone()
    return words.view(torch.int64).sum() + data[len(words) :].sum()
