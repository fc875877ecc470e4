"""Copies of a module that train apart from the module of the run."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import CellType, FunctionType
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fl.hooks import attributes_set


def copied_module(module: LightningModule, constants: Iterable[Tensor]) -> LightningModule:
    """Copy a module. The copy has the same Trainer, but what it passes to ``log`` is discarded.

    Constant tensors are shared. Functions set on the module that hold it or a part of it hold the
    copy instead.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in constants}
    with attributes_set(module, {"_trainer": None}):
        made = copy.deepcopy(module, memo)
    own, attached = vars(made), module._trainer
    own |= {n: _rebound(v, memo) for n, v in own.items() if isinstance(v, FunctionType)}
    # The loop replaced configure_optimizers by a method bound to the original module.
    own.pop("configure_optimizers", None)
    made.trainer = attached
    own["log"] = own["log_dict"] = lambda *args, **options: None
    return made


def _rebound(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """Return a function that holds copies of modules and of their methods.

    Args:
        function: The function, in which ``deepcopy`` copies nothing.
        memo: The copies, by the ``id`` of the originals.
    """
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    is_copied = [id(getattr(each, "__self__", each)) in memo for each in held]
    held = [copy.deepcopy(v, memo) if c else v for v, c in zip(held, is_copied, strict=True)]
    cells = tuple(map(CellType, held))
    code, names = function.__code__, function.__globals__
    made = FunctionType(code, names, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    vars(made).update(vars(function))
    return made
