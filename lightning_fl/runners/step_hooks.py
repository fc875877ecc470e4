"""Hooks for each step of training, of a module, its data and the callbacks beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

#: Hooks of a module for each step of its training, which lanes do not call.
STEP_HOOKS = (
    "on_before_batch_transfer",
    "on_after_batch_transfer",
    "transfer_batch_to_device",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
)
TRANSFER_HOOKS = STEP_HOOKS[:3]
#: Hooks of a callback that see gradients.
GRADIENT_HOOKS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
)
_HOOKS = {
    *(name for kind in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(kind)),
    *("validation_step", "test_step", "predict_step", "configure_callbacks"),
    *STEP_HOOKS,
}


def hooks_of(module: LightningModule) -> list[str]:
    """Return the names of the hooks that a module defines itself."""

    def is_own(name: str) -> bool:
        inherited = getattr(LightningModule, name, None)
        own = vars(module).get(name) or getattr(type(module), name, None)
        return callable(own) and own is not inherited

    return [name for name in _HOOKS if is_own(name)]


def why_alone(module: LightningModule, hooks: Sequence[str]) -> str | None:
    """Return what keeps a module from lanes, whatever its step does; None if nothing does.

    Args:
        module: The module.
        hooks: What :func:`hooks_of` returns for it.
    """
    if own := [name for name in STEP_HOOKS if name in hooks]:
        return f"it has a hook for each step or batch of a client: {', '.join(sorted(own))}"
    if any(isinstance(m, nn.Embedding) and m.max_norm for m in module.modules()):
        return "an Embedding with max_norm changes its own weights in the forward pass"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters()):
        return "its parameters have hooks of their own"
    return None


def changes_transfers(trainer: Trainer) -> bool:
    """Return whether the precision or the data module changes samples on their way."""
    plugin: Any = trainer.precision_plugin
    data = trainer.datamodule  # type: ignore[attr-defined]  # set by the connector
    return type(plugin).convert_input is not Precision.convert_input or any(
        is_overridden(hook, data) for hook in TRANSFER_HOOKS
    )


def sees_gradients(trainer: Trainer) -> bool:
    """Return whether a callback sees gradients in every step, and may change them."""
    return any(
        is_overridden(hook, callback, Callback)
        for callback in trainer.callbacks  # type: ignore[attr-defined]  # a connector's
        if not callback.__module__.startswith("lightning_fl.")
        for hook in GRADIENT_HOOKS
    )
