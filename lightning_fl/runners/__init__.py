"""Runners, which train clients one after another or many at once."""

from lightning_fl.runners.base import BufferPolicy, ClientRunner
from lightning_fl.runners.hyperparameters import Declared
from lightning_fl.runners.module import VectorizedClients, client_runner, user_module
from lightning_fl.runners.optimizer_values import optimizers_in
from lightning_fl.runners.phases import Phase
from lightning_fl.runners.sequential import SequentialRunner
from lightning_fl.runners.tensors import TensorList, flat

__all__ = [
    "BufferPolicy",
    "ClientRunner",
    "Declared",
    "Phase",
    "SequentialRunner",
    "TensorList",
    "VectorizedClients",
    "client_runner",
    "flat",
    "optimizers_in",
    "user_module",
]
