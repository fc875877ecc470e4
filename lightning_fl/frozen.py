"""Frozen parameters that checkpoints leave out, and the digest that they hold instead."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fl.errors import FederationError

#: Entry of a checkpoint that describes the parameters that it leaves out.
LEFT_OUT = "frozen_parameters"


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
        data = tensor.reshape(-1).contiguous().view(torch.uint8)
        for piece in data.split(2**26):  # copied to the CPU one by one
            sha.update(piece.cpu().numpy())
    return sha.hexdigest()
