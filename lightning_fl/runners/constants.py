"""Frozen parameters that all clients share, so that they exist once per process.

Checkpoints leave them out and hold a digest of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fl.errors import FederationError
from lightning_fl.runners.tensors import flat

#: Size in bytes above which frozen parameters take noticeable time and memory.
LARGE = 2**24
#: Entry of a checkpoint that describes the parameters that it leaves out.
LEFT_OUT = "frozen_parameters"


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


def with_all_names(module: nn.Module, parameters: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return parameters of a module under all of their names; tied parameters have several."""
    ids = {id(parameter) for parameter in parameters}
    everything = module.named_parameters(remove_duplicate=False)
    return {name: parameter.detach() for name, parameter in everything if id(parameter) in ids}


def complete(checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Add the parameters that a checkpoint leaves out, from a module that has the same.

    Args:
        checkpoint: The checkpoint, which is changed in place.
        module: The user's module.

    Raises:
        FederationError: If the module has other frozen parameters.
    """
    if (entry := checkpoint.pop(LEFT_OUT, None)) is None:
        return
    own = dict(module.named_parameters(remove_duplicate=False))
    # The Trainer may convert the module to its precision only after the checkpoint is loaded.
    dtypes = entry["dtypes"].items()
    tensors = {name: own[name].detach().to(dtype) for name, dtype in dtypes if name in own}
    if digest(tensors) != entry["digest"]:
        first = next(iter(entry["dtypes"]))
        raise FederationError(
            f"the checkpoint leaves out {len(dtypes)} frozen parameters ({first}, ...), and those"
            f" of {type(module).__name__} differ: build it with the weights that it had in the fit"
        )
    checkpoint["state_dict"].update(tensors)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a SHA-256 digest of names, data types, shapes and values; the order is ignored.

    Example:
        >>> digest({"w": torch.ones(2)}) == digest({"w": torch.ones(2, dtype=torch.float64)})
        False
    """
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        sha.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        data = flat(tensor).contiguous().view(torch.uint8)
        for piece in data.split(2**26):  # copied to the CPU one by one
            sha.update(piece.cpu().numpy())
    return sha.hexdigest()
