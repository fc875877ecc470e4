"""Federated learning as a PyTorch Lightning collection: one Trainer is the federation."""

from importlib.metadata import version

from lightning_fl.lanes import Lanes
from lightning_fl.objectives import ClientModule

__version__ = version("lightning_fl")
__all__ = ["ClientModule", "Lanes", "__version__"]
