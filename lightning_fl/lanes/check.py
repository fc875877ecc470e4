"""Whether a module's step, mapped over lanes, is what it is alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric

from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.lanes.local_step import LocalStep, Outcome

if TYPE_CHECKING:
    from lightning_fl.lanes.stacked import StackedLanes


def why_not_mapped(
    module: LightningModule, host: StackedLanes, batch: Any, size: int
) -> str | None:
    """Compare a step of two lanes, mapped and one after the other, on a copy in float64.

    Args:
        module: The user's module.
        host: The lanes, whose first two clients are compared.
        batch: Samples, ``[k, B, ...]``.
        size: Samples that both have.

    Returns:
        What is wrong: an exception, other losses, gradients or buffers, or a torchmetrics metric
        that the step updates, which fails silently in lanes. None if all is well.
    """
    try:
        double = _copied(module).double()
    except Exception as error:  # whatever a user's module may hold
        return f"it cannot be copied to be checked ({type(error).__name__}: {error})"
    for layer in double.modules():
        if isinstance(layer, _DropoutNd):
            layer.p = 0.0  # the lanes draw other numbers
    metrics = [m for m in double.modules() if isinstance(m, Metric)]
    counts = [m._update_count for m in metrics]
    local = LocalStep(double)

    def two(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        return _double(tensor.detach()[:2]).clone()

    batch = tree_map(lambda t: two(t)[:, :size] if isinstance(t, Tensor) else t, batch)
    params = {name: two(param) for name, param in host.params.items()}
    # Clients start alike: small steps apart, a mix-up of lanes shows.
    for param in params.values():
        param[1] *= 1 + 2**-6
    buffers = {name: two(buffer) for name, buffer in host.buffer_stack.items()}
    fixed = {n: _double(t) if host.fixed_is_shared else two(t) for n, t in host.fixed.items()}

    def step(at_once: bool) -> tuple[Outcome, list[Tensor]]:
        leaves = {
            n: p.clone().requires_grad_(host.params[n].requires_grad) for n, p in params.items()
        }
        with seeded_rng(0), torch.enable_grad():
            outcome = local.many(
                leaves,
                buffers,
                fixed,
                batch,
                None,
                0,
                fixed_is_shared=host.fixed_is_shared,
                at_once=at_once,
            )
        wanted = [p for p in leaves.values() if p.requires_grad]
        grads = torch.autograd.grad(outcome.loss.sum(), wanted, allow_unused=True)
        return outcome, [torch.zeros(()) if g is None else g for g in grads]

    try:
        alone, again, mapped = step(at_once=False), step(at_once=False), step(at_once=True)
    except Exception as error:  # vmap has no rule for an operation, or the user's own mistake
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    used = [m for m, count in zip(metrics, counts, strict=True) if m._update_count != count]
    if used:
        return f"training_step updates the metric {type(used[0]).__name__}"
    if not _close(alone, again):
        return None  # Random of its own making: there is nothing to compare with.
    return None if _close(alone, mapped) else "mapped over lanes it gives other results"


def _close(one: tuple[Outcome, list[Tensor]], other: tuple[Outcome, list[Tensor]]) -> bool:
    pairs = zip(_numbers(one), _numbers(other), strict=True)
    return all(torch.allclose(a, b, rtol=1e-8, atol=1e-10, equal_nan=True) for a, b in pairs)


def _numbers(result: tuple[Outcome, list[Tensor]]) -> list[Tensor]:
    return [
        t.detach().to(torch.complex128 if t.is_complex() else torch.float64)
        for t in tree_leaves(result)
    ]


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _copied(module: LightningModule) -> LightningModule:
    """Copy a module, but not the Trainer that it is in."""
    with _without_trainer(module):
        made = copy.deepcopy(module)
    for part in made.modules():
        if isinstance(part, LightningModule):
            part._trainer = module._trainer
    return made


@contextmanager
def _without_trainer(module: nn.Module) -> Iterator[None]:
    parts = [m for m in module.modules() if isinstance(m, LightningModule)]
    trainers = [m._trainer for m in parts]
    try:
        for part in parts:
            part._trainer = None
        yield
    finally:
        for part, trainer in zip(parts, trainers, strict=True):
            part._trainer = trainer
