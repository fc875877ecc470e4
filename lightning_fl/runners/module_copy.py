"""Copies of a module that train apart from the module of the run."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

#: Types of attributes that a copy of a module shares with the original.
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
#: Hooks of a module that are called when its state is saved or loaded.
HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def copied_module(module: LightningModule, constants: Iterable[Tensor]) -> LightningModule:
    """Copy a module. The copy has the same Trainer, but what it passes to ``log`` is discarded.

    Functions set on it and constant tensors are shared, but functions that hold the module or a
    part of it hold the copy instead: Lightning's DDP, for example, sets ``forward`` on the module.
    """
    own = vars(module)
    functions = {k: v for k, v in own.items() if isinstance(v, FUNCTIONS)}
    attached, module._trainer = module._trainer, None
    for name in functions:
        del own[name]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in constants}
    for part in module.modules():  # its hooks may hold anything, and a copy is not saved
        memo |= {id(vars(part)[name]): OrderedDict() for name in HOOKS}
    try:
        made = copy.deepcopy(module, memo)
    finally:
        own.update(functions)
        module._trainer = attached
    copies = {
        id(part): copied for part, copied in zip(module.modules(), made.modules(), strict=True)
    }
    # The loop replaced configure_optimizers by a method bound to the original module.
    vars(made).update(
        {k: _rebound(v, copies) for k, v in functions.items() if k != "configure_optimizers"}
    )
    made.trainer = attached
    vars(made)["log"] = vars(made)["log_dict"] = lambda *args, **options: None
    return made


def _rebound(value: Any, copies: Mapping[int, nn.Module]) -> Any:
    """Return a function that holds the copies of modules, given by the ``id`` of the originals."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _rebound(value.__self__, copies))
    if isinstance(value, partial):
        args = [_rebound(each, copies) for each in value.args]
        named = {name: _rebound(each, copies) for name, each in value.keywords.items()}
        return partial(_rebound(value.func, copies), *args, **named)
    if not isinstance(value, FunctionType) or value.__closure__ is None:
        return value
    held = [cell.cell_contents for cell in value.__closure__]
    if not any(id(getattr(each, "__self__", each)) in copies for each in held):
        return value
    cells = tuple(CellType(_rebound(each, copies)) for each in held)
    made = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
    )
    made.__kwdefaults__ = value.__kwdefaults__
    vars(made).update({k: _rebound(v, copies) for k, v in vars(value).items()})  # __wrapped__
    return made
