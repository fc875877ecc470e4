"""Packages that import ``pytorch_lightning`` get ``lightning.pytorch``: import this module first.

Both packages have the same code, but their classes are not compatible. After ``import
lightning_fl.compat``, the names ``pytorch_lightning`` and ``lightning_fabric`` stand for
``lightning.pytorch`` and ``lightning.fabric`` in the whole process.

Raises:
    FederationError: If ``pytorch_lightning`` or ``lightning_fabric`` has been imported before.

Example:
    >>> import lightning_fl.compat
    >>> import lightning.pytorch, pytorch_lightning
    >>> pytorch_lightning is lightning.pytorch
    True
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_fl.errors import FederationError

#: Packages by the names that others use.
NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


class _Alias(MetaPathFinder, Loader):
    """Find the modules of :data:`NAMES`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.partition(".")[0] in NAMES else None

    def exec_module(self, module: ModuleType) -> None:
        package, *rest = module.__name__.split(".")
        sys.modules[module.__name__] = import_module(".".join([NAMES[package], *rest]))


for _name, _package in NAMES.items():
    if sys.modules.get(_name) not in (None, sys.modules.get(_package)):
        raise FederationError(
            f"{_name} has been imported before lightning_fl.compat: import lightning_fl.compat in"
            " the first line of the program"
        )
sys.meta_path.insert(0, _Alias())
