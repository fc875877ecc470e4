"""Detection of per-step training hooks in modules, data modules and callbacks."""

from __future__ import annotations

from collections.abc import Collection

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import nn

from lightning_fl.hooks import STEP_HOOKS, overrides
from lightning_fl.runners.tensors import overlapping

_HOOKS = {
    *(n for kind in (ModelHooks, DataHooks, CheckpointHooks) for n in vars(kind) if n[0] != "_"),
    *("validation_step", "test_step", "predict_step", "configure_callbacks"),
    *STEP_HOOKS,
}


def hooks_of(module: LightningModule) -> list[str]:
    """Return the names of the hooks that a module overrides."""
    return [name for name in _HOOKS if overrides(module, name, LightningModule)]


def why_alone(module: LightningModule) -> str | None:
    """Return the reason why a module cannot be vectorized regardless of its step, or None."""
    if not module.automatic_optimization:
        return "it optimizes manually"
    hooks = hooks_of(module)
    if own := [name for name in STEP_HOOKS if name in hooks]:
        return f"it overrides hooks that run per step or batch: {', '.join(sorted(own))}"
    for part in module.modules():
        if isinstance(part, nn.Embedding) and (part.max_norm or part.padding_idx is not None):
            return "an Embedding with max_norm or padding_idx writes to its weights"
    kinds = "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks"
    for name, each in (*module.named_modules(), *module.named_parameters()):
        if any(getattr(each, kind, None) for kind in kinds):
            return f"hooks of {name} run in the backward pass"
    if names := overlapping(module):
        return f"its tensors {names[0]} and {names[1]} share memory"
    return None


def callbacks_with(hooks: Collection[str], trainer: Trainer) -> list[str]:
    """Return the names of callbacks of users that override any of some hooks."""

    def sees(callback: Callback, hook: str) -> bool:
        owner = next(kind for kind in type(callback).__mro__ if hook in vars(kind))
        is_known = owner.__module__.startswith(("lightning.", "lightning_fl."))
        return hook in vars(callback) or not is_known

    return [
        type(callback).__name__
        for callback in trainer.callbacks  # type: ignore[attr-defined]  # a connector's
        if any(sees(callback, hook) for hook in hooks)
    ]
