"""How many clients train at once, and how many local steps one Lightning batch holds."""

from __future__ import annotations

import os
import sys
from typing import Literal

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_fl.types import FederationError

#: Enough to fill a processor's vector units.
FEW_LANES = 10
#: Bytes that stay in a processor's cache.
CACHE = 2**25
#: Samples of one Lightning batch: more take longer, since their memory is new each time.
BATCH_BYTES = 4 * 2**20
#: Local steps of one Lightning batch: Lightning's own time is nothing beside them.
MOST_STEPS = 50


def num_lanes(
    module: LightningModule,
    option: int | Literal["auto"],
    clients: int,
    batch_bytes: int,
    memory: int,
) -> int:
    """Return how many clients train at once.

    ``auto`` takes as many as have parameters and samples in a processor's cache. It takes few for
    convolutions, whose hidden layers need much more memory than that.

    Args:
        module: The user's module.
        option: The number that the user asks for, or ``auto``.
        clients: Number of clients in the round.
        batch_bytes: Bytes of a client's batch.
        memory: Bytes of memory of the device, for this process.

    Raises:
        FederationError: If so many clients do not fit into memory.
    """
    size = model_bytes(module)
    most = memory // (4 * size)  # parameters, gradients, optimizer, workspace
    if option == "auto":
        many = FEW_LANES if has_convolutions(module) else CACHE // (size + batch_bytes)
        return min(max(FEW_LANES, many), max(most, 1), clients)
    if min(option, clients) > most:
        raise FederationError(
            f"{option} lanes of {size / 2**20:.0f} MiB each do not fit into memory"
            f" with their gradients: set lanes to at most {most}, or to auto"
        )
    return min(option, clients)


def num_steps(
    option: int | Literal["auto"], group_size: int, batch_bytes: int, stepwise: bool
) -> int:
    """Return the number of local steps in one Lightning batch.

    Args:
        option: The number that the user asks for, or ``auto``.
        group_size: Number of clients that train at once.
        batch_bytes: Bytes of a client's batch.
        stepwise: Whether the loader fetches one local step of them only.
    """
    if option != "auto":
        return option
    if stepwise:
        return MOST_STEPS
    return min(MOST_STEPS, BATCH_BYTES // (group_size * batch_bytes or 1)) or 1


def model_bytes(module: nn.Module) -> int:
    """Return the bytes of the parameters and buffers of a module, at least 1."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors) or 1


def has_convolutions(module: nn.Module) -> bool:
    """Return whether a module has 2-d convolutions."""
    return any(isinstance(m, nn.Conv2d) for m in module.modules())


def device_memory(device: torch.device, processes: int) -> int:
    """Return the bytes of all memory of a device: what is free just now differs from run to run.

    Args:
        device: The device.
        processes: Number of processes that share the memory of a CPU.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):  # Windows
        return sys.maxsize
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // processes
