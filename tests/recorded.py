"""Hooks that note their calls."""

from unittest import mock

import lightning as L
import torch


def _shown(value):
    """What a hook was given, so that two runs can be compared."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().tolist()
    if isinstance(value, dict):
        return {k: _shown(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(v) for v in value]
    return value if isinstance(value, int | float | str | None) else type(value).__name__


MODULE_HOOKS = [
    *(name for name in vars(L.pytorch.core.hooks.ModelHooks) if name.startswith("on_")),
    *("training_step", "validation_step", "optimizer_step", "optimizer_zero_grad", "backward"),
    *("configure_gradient_clipping", "lr_scheduler_step", "setup", "teardown"),
]
CALLBACK_HOOKS = [
    name for name in vars(L.Callback) if name.startswith("on_") and "checkpoint" not in name
]


def recorded(owner, names, calls, who, skip):
    """Let an object note each call of these hooks, with its arguments."""

    def noted(name, hook):
        def call(*args, **options):
            calls.append((who, name, *map(_shown, args[skip:])))
            return hook(*args, **options)

        return call

    for name in names:
        vars(owner)[name] = noted(name, getattr(owner, name))
    return owner


def steps_by_lightning():
    """Return a context in which Lightning makes the steps of fits, with all calls of hooks."""
    return mock.patch("lightning_fl.callbacks.federated_loop.lean_steps")
