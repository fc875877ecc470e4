"""Federated learning as a PyTorch Lightning collection: one Trainer is the federation."""

import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fl.callbacks import (
        FederatedLoop,
        PersonalizedEvaluation,
        RoundCheckpoint,
        RoundProgress,
        RunReport,
    )
    from lightning_fl.datamodules import FederatedDataModule
    from lightning_fl.errors import FederationError
    from lightning_fl.objectives import ClientModule
    from lightning_fl.runners import VectorizedClients
    from lightning_fl.strategies import ClientParallelStrategy

if sys.platform == "win32":  # files are locked with fcntl
    raise ImportError("lightning_fl requires Linux or macOS. On Windows, use it in WSL")
# git on Windows checks out links as text files, also for WSL; so do some unpackers of archives.
if (link := Path(__file__).with_name("callbacks")).is_file():
    raise ImportError(
        f"{link} must be a link to a folder, but is a text file. Clone again with"
        " git clone -c core.symlinks=true, or run pip install . and leave this folder: Python"
        " imports the package from the working directory first"
    )

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
]

#: Names by the package that defines them. They are imported on first use: torch and Lightning take
#: seconds, which the help of the command line need not wait for.
_LAZY = {
    "ClientModule": "objectives",
    "ClientParallelStrategy": "strategies",
    "FederatedDataModule": "datamodules",
    "FederatedLoop": "callbacks",
    "FederationError": "types",
    "PersonalizedEvaluation": "callbacks",
    "RoundCheckpoint": "callbacks",
    "RoundProgress": "callbacks",
    "RunReport": "callbacks",
    "VectorizedClients": "runners",
}
#: Packages that need not be imported by themselves: ``lightning_fl.policies.Schedule``.
_PACKAGES = (
    *("aggregators", "callbacks", "datamodules", "functional", "models", "objectives"),
    *("optimizers", "partition", "policies", "runners", "samplers", "strategies", "transforms"),
)


def __getattr__(name: str) -> Any:
    """Import a name or a package on first use."""
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
