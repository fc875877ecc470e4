"""Number of clients that train at once, and number of local steps in one Lightning batch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_fl.contracts.step_module import StepModule
from lightning_fl.errors import FederationError

#: Number of clients that fills a processor's vector units.
FEW_CLIENTS = 10
#: Bytes that fit into a processor's cache.
CACHE = 2**25
#: Share of a GPU's memory for the clients that train at once.
GPU_SHARE = 0.25
#: Estimates of a client's activations in multiples of its batch. With convolutions, 90 to 650 were
#: measured on a GPU for networks of this package, with linear layers fewer than 5.
CONVOLUTIONS, LINEAR = 1000, 64
#: Maximum bytes of samples in one Lightning batch. Larger batches are slower, since their memory is
#: allocated anew each time.
BATCH_BYTES = 4 * 2**20
#: Maximum number of local steps in one Lightning batch, enough to hide Lightning's overhead.
MOST_STEPS = 50


def clients_at_once(
    module: LightningModule,
    constants: Mapping[str, nn.Parameter],
    option: int | Literal["auto"],
    clients: int,
    batch_bytes: int,
    memory: int,
    on_a_gpu: bool = False,
) -> int:
    """Return the number of clients that train at once.

    On a CPU, ``auto`` chooses the number of clients with parameters and samples that fit into a
    processor's cache together, and 1 for networks with convolutions. On a GPU, it chooses the
    number that fits into a quarter of the memory, by an estimate of their activations.

    Args:
        module: The user's module.
        constants: Its parameters that all clients share.
        option: The user's ``group_size``, a number or ``auto``.
        clients: Number of clients in the round.
        batch_bytes: Size of a client's batch in bytes; 0 if unknown.
        memory: Memory of the device for this process in bytes.
        on_a_gpu: Whether the device is a GPU.

    Raises:
        FederationError: If the clients do not fit into memory.
    """
    size = client_bytes(module, constants)
    most = memory // (4 * size)  # parameters, gradients, optimizer, workspace
    if option == "auto":
        if not on_a_gpu and has_convolutions(module):
            return 1
        if on_a_gpu and batch_bytes and (factor := activations(module)) is not None:
            many = int(GPU_SHARE * memory) // (4 * size + factor * batch_bytes)
        else:
            many = CACHE // (size + batch_bytes)
        return min(max(FEW_CLIENTS, many), max(most, 1), clients)
    if min(option, clients) > most:
        raise FederationError(
            f"group_size={option} does not fit into memory: {option} clients of"
            f" {size / 2**20:.0f} MiB each, with gradients and optimizer state. Set group_size to"
            f" at most {most}, or to auto"
        )
    return min(option, clients)


def num_steps(group_size: int, batch_bytes: int, stepwise: bool) -> int:
    """Return the number of local steps in one Lightning batch.

    Args:
        group_size: Number of clients that train at once.
        batch_bytes: Size of a client's batch in bytes; 0 if unknown.
        stepwise: Whether the loader fetches one local step at a time.
    """
    if stepwise:
        return MOST_STEPS
    if not batch_bytes:
        return 1
    return min(MOST_STEPS, BATCH_BYTES // (group_size * batch_bytes)) or 1


def client_bytes(module: nn.Module, constants: Mapping[str, nn.Parameter]) -> int:
    """Return the size of a client's parameters and buffers in bytes, at least 1.

    Args:
        module: The user's module.
        constants: Its parameters that all clients share.
    """
    tensors = [*module.parameters(), *module.buffers()]
    return sum(t.nbytes for t in tensors) - sum(p.nbytes for p in constants.values()) or 1


def activations(module: nn.Module) -> int | None:
    """Return an estimate of a client's activations in multiples of its batch; None if unknown.

    The activations of attention, recurrent and embedding layers are not proportional to the batch.
    """
    known = (nn.Linear, nn.Conv2d, _NormBase, nn.LayerNorm, nn.GroupNorm)
    layers = [m for m in module.modules() if m._parameters]
    if not all(isinstance(m, known) for m in layers):
        return None
    return CONVOLUTIONS if has_convolutions(module) else LINEAR


def has_convolutions(module: nn.Module) -> bool:
    """Return whether a module has 2-d convolutions."""
    return any(isinstance(m, nn.Conv2d) for m in module.modules())


def knows_weights(module: LightningModule) -> bool:
    """Return whether a module takes sample weights, and none of its layers mixes samples."""
    layers = [part for part in module.modules() if part is not module]
    are_known = all(
        type(layer).__module__.startswith(("torch.nn.", "lightning_fl.", "torchmetrics."))
        and not isinstance(layer, _NormBase)
        for layer in layers
    )
    return are_known and isinstance(module, StepModule) and module._knows_weights


def device_memory(device: torch.device, processes: int) -> int:
    """Return the total memory of a device in bytes; free memory would differ between runs.

    Args:
        device: The device.
        processes: Number of processes that share the memory of a CPU.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // processes
