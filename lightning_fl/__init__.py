"""Federated learning as a PyTorch Lightning collection: one Trainer is the federation."""

from importlib.metadata import version

from lightning_fl.lanes import Lanes
from lightning_fl.objectives import ClientModule
from lightning_fl.strategies import ClientParallelStrategy  # the Trainer knows it by name

__version__ = version("lightning_fl")
__all__ = ["ClientModule", "ClientParallelStrategy", "Lanes", "__version__"]
