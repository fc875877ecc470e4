"""Federated learning as a PyTorch Lightning collection: one Trainer is the federation."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from lightning_fl.objectives import ClientModule
from lightning_fl.runners import VectorizedClients
from lightning_fl.strategies import ClientParallelStrategy  # the Trainer knows it by name
from lightning_fl.types import FederationError

if TYPE_CHECKING:
    from lightning_fl.callbacks import (
        FederatedLoop,
        PersonalizedEvaluation,
        RoundCheckpoint,
        RoundProgress,
        RunReport,
        complete_checkpoint,
    )
    from lightning_fl.datamodules import FederatedDataModule

__version__ = version("lightning_fl")
__all__ = [
    "ClientModule",
    "ClientParallelStrategy",
    "FederatedDataModule",
    "FederatedLoop",
    "FederationError",
    "PersonalizedEvaluation",
    "RoundCheckpoint",
    "RoundProgress",
    "RunReport",
    "VectorizedClients",
    "__version__",
    "complete_checkpoint",
]

#: Names that are imported on first use: the packages that define them import much more.
_LAZY = {
    "FederatedDataModule": "lightning_fl.datamodules",
    "FederatedLoop": "lightning_fl.callbacks",
    "PersonalizedEvaluation": "lightning_fl.callbacks",
    "RoundCheckpoint": "lightning_fl.callbacks",
    "RoundProgress": "lightning_fl.callbacks",
    "RunReport": "lightning_fl.callbacks",
    "complete_checkpoint": "lightning_fl.callbacks",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
