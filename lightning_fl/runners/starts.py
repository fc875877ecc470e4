"""Clients at other models than the one that they received."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_fl.runners.base import ClientRunner


@torch.no_grad()
def start_from(runner: ClientRunner, models: Tensor) -> None:
    """Let the clients in training start from other models.

    Args:
        runner: Runner of the clients, before their first local step.
        models: The models, ``[k, P]``. Tensors that stay with the clients do not change.
    """
    for row, model in enumerate(models):
        with runner.client(row):
            _write(runner, model)
    runner.note_start()


@contextmanager
def at_model(runner: ClientRunner, row: int, model: Tensor) -> Iterator[None]:
    """Put a client into the module, at another model within a ``with`` block.

    Args:
        runner: Runner of the clients.
        row: The client.
        model: The model, ``[P]``.
    """
    with runner.client(row):
        before = runner.vector.read()
        try:
            _write(runner, model)
            yield
        finally:
            runner.vector.write(before)


def _write(runner: ClientRunner, model: Tensor) -> None:
    """Load a model into the module, without buffers that stay with the client."""
    if runner.buffers == "local":
        at = runner.num_parameters
        model = torch.cat([model[:at], runner.vector.read()[at:]])
    runner.vector.write(model)
