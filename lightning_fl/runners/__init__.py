"""Runners, which train clients one after another or many at once.

- ``base``, ``sequential`` and ``vectorized_runner`` are the runners, ``global_model`` is what they
  exchange, ``stacks`` are the tensors of clients at once, ``vectorized_clients`` is the wrapper
  that Lightning gets for them, ``groups`` the number of these clients.
- ``local_step`` is a training step as a function of its tensors, ``compiled`` the same as a graph.
  ``samples`` goes into it, ``tensors`` and ``optimizer`` are changed by it; ``client_optimizers``
  makes the optimizers fresh for each client.
- ``local_tensors`` stay with a client, ``constants`` are shared by all, and ``phases`` tell which
  parameters are trained when. ``module_copy`` copies a module, ``user_hooks`` finds the hooks that
  a step calls.
"""

from lightning_fl.contracts.phases import Phase
from lightning_fl.runners.base import ClientRunner
from lightning_fl.runners.client_optimizers import ClientOptimizer, ClientOptimizers
from lightning_fl.runners.global_model import BufferPolicy
from lightning_fl.runners.optimizer import optimizers_in
from lightning_fl.runners.sequential import SequentialRunner
from lightning_fl.runners.tensors import TensorList, flat
from lightning_fl.runners.vectorized_clients import VectorizedClients, user_module

__all__ = [
    "BufferPolicy",
    "ClientOptimizer",
    "ClientOptimizers",
    "ClientRunner",
    "Phase",
    "SequentialRunner",
    "TensorList",
    "VectorizedClients",
    "flat",
    "optimizers_in",
    "user_module",
]
