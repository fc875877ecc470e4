"""The runner of a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule

from lightning_fl.runners.base import BufferPolicy, ClientRunner, KeepOptimizer
from lightning_fl.runners.local_tensors import split_tensors
from lightning_fl.runners.sequential import SequentialRunner
from lightning_fl.runners.vectorized_clients import VectorizedClients
from lightning_fl.runners.vectorized_runner import VectorizedRunner


def user_module(module: LightningModule) -> LightningModule:
    """Return the user's module, unwrapped from :class:`VectorizedClients`."""
    return module.module if isinstance(module, VectorizedClients) else module


def client_runner(
    module: LightningModule,
    buffers: BufferPolicy,
    optimizers: Sequence[torch.optim.Optimizer],
    keep_optimizer: KeepOptimizer,
    exchange_frozen: bool = False,
    local_patterns: Sequence[str] = (),
    otherwise: type[ClientRunner] = SequentialRunner,
) -> ClientRunner:
    """Return the runner of a module: vectorized for ``VectorizedClients``, otherwise sequential.

    Args:
        module: The user's module, or ``VectorizedClients`` of it.
        buffers: How floating-point buffers are aggregated; see :class:`ClientRunner`.
        optimizers: The optimizers of local training: one, unless the module optimizes manually.
        keep_optimizer: Whether a client keeps its optimizer state between rounds.
        exchange_frozen: Whether frozen parameters are exchanged; see
            :class:`~lightning_fl.callbacks.FederatedLoop`.
        local_patterns: Patterns of client-local parameters and buffers, in addition to those that
            the module names.
        otherwise: Class of the runner of other modules.
    """
    user = user_module(module)
    constants, local = split_tensors(user, exchange_frozen, local_patterns)
    if not isinstance(module, VectorizedClients) or module.reason is not None:
        return otherwise(user, buffers, optimizers, keep_optimizer, constants, local)
    module.runner = VectorizedRunner(
        user, buffers, optimizers[0], keep_optimizer, module.constants, local, module.stack
    )
    return module.runner
