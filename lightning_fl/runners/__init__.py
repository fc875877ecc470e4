"""Runners, which train clients one after another or many at once."""

from lightning_fl.runners.base import BufferPolicy, ClientRunner, TensorList, flat
from lightning_fl.runners.module import VectorizedClients, client_runner
from lightning_fl.runners.optimizer_values import optimizers_in
from lightning_fl.runners.sequential import SequentialRunner

__all__ = [
    "BufferPolicy",
    "ClientRunner",
    "SequentialRunner",
    "TensorList",
    "VectorizedClients",
    "client_runner",
    "flat",
    "optimizers_in",
]
