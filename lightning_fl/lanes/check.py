"""Whether a module's step, mapped over lanes, is what it is alone."""

from __future__ import annotations

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

Result = tuple[Outcome, list[Tensor]]


def why_not_mapped(
    module: LightningModule, host: StackedLanes, batch: Any, size: int
) -> str | None:
    """Compare a step of two lanes, mapped and one after the other, in float64.

    Args:
        module: The user's module; its tensors are left alone.
        host: The lanes, whose first two clients are compared.
        batch: Samples, ``[k, B, ...]``.
        size: Samples that both have.

    Returns:
        What is wrong: an exception, other losses, gradients or buffers, or a torchmetrics metric
        that the step updates, which fails silently in lanes. None if all is well.
    """

    def two(tensor: Tensor) -> Tensor:
        return _double(tensor.detach()[:2]).clone()

    batch = tree_map(lambda t: two(t)[:, :size] if isinstance(t, Tensor) else t, batch)
    params = {name: two(param) for name, param in host.params.items()}
    for param in params.values():
        param[1] *= 1 + 2**-6  # clients start alike: a little apart, a mix-up of lanes shows
    buffers = {name: two(buffer) for name, buffer in host.buffer_stack.items()}
    fixed = {n: _double(t) if host.fixed_is_shared else two(t) for n, t in host.fixed.items()}
    local = LocalStep(module)

    def step(at_once: bool, seed: int = 0) -> Result:
        leaves = {
            n: p.clone().requires_grad_(host.params[n].requires_grad) for n, p in params.items()
        }
        with seeded_rng(seed, module.device), torch.enable_grad():
            outcome = local.many(
                leaves,
                buffers,
                fixed,
                batch,
                None,
                fixed_is_shared=host.fixed_is_shared,
                at_once=at_once,
            )
        wanted = [p for p in leaves.values() if p.requires_grad]
        grads = torch.autograd.grad(outcome.loss.sum(), wanted, allow_unused=True)
        return outcome, [torch.zeros(()) if g is None else g for g in grads]

    metrics = [m for m in module.modules() if isinstance(m, Metric)]
    counts = [m._update_count for m in metrics]
    try:
        with _without_dropout(module):
            alone, mapped, other = step(at_once=False), step(at_once=True), step(False, seed=1)
    except Exception as error:  # vmap has no rule for an operation, or the user's own mistake
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:
        used = [m for m, count in zip(metrics, counts, strict=True) if m._update_count != count]
        for metric in used:
            metric.reset()
    if used:
        return f"training_step updates the metric {type(used[0]).__name__}"
    if not _close(alone, other):
        return None  # random of its own making: there is nothing to compare with
    return None if _close(alone, mapped) else "mapped over lanes it gives other results"


def _close(one: Result, other: Result) -> bool:
    pairs = zip(_numbers(one), _numbers(other), strict=True)
    return all(torch.allclose(a, b, rtol=1e-8, atol=1e-10, equal_nan=True) for a, b in pairs)


def _numbers(result: Result) -> list[Tensor]:
    wide = {True: torch.complex128, False: torch.float64}
    return [t.detach().to(wide[t.is_complex()]) for t in tree_leaves(result)]


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    """Let nothing drop out: lanes draw other numbers."""
    layers = [(layer, layer.p) for layer in module.modules() if isinstance(layer, _DropoutNd)]
    try:
        for layer, _ in layers:
            layer.p = 0.0
        yield
    finally:
        for layer, p in layers:
            layer.p = p
