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
from lightning_fl.lanes.attributes import left_alone
from lightning_fl.lanes.host import is_floating
from lightning_fl.lanes.local_step import LocalStep, Outcome
from lightning_fl.lanes.watch import Watch

if TYPE_CHECKING:
    from lightning_fl.lanes.stacked import StackedLanes

#: What a step makes, gradients, and frozen parameters after it.
Result = tuple[Outcome, list[Tensor], list[Tensor]]


def why_not_mapped(module: LightningModule, host: StackedLanes, batch: Any) -> str | None:
    """Compare a step of two lanes, mapped and one after the other, in float64.

    Args:
        module: The user's module; its tensors are left alone.
        host: The lanes, whose first two clients are compared.
        batch: Batches of two clients, stacked.

    Returns:
        What is wrong: an exception, other losses, gradients, buffers or frozen parameters, a step
        that writes to parameters that it trains, or a torchmetrics metric that the step updates,
        which fails silently in lanes. None if all is well.
    """
    for m in module.modules():
        if isinstance(m, nn.Embedding) and m.padding_idx is not None:
            return "an Embedding with padding_idx trains its padding when it is mapped"
    wide = {torch.float32: torch.float64}

    def two(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        return tensor.detach()[:2].to(wide.get(tensor.dtype, tensor.dtype), copy=True)

    def leaf_params() -> dict[str, Tensor]:
        leaves = {n: two(p) for n, p in host.params.items()}
        for name, leaf in leaves.items():
            is_trained = host.params[name].requires_grad
            if is_floating(leaf):
                # Clients start alike: a little apart, a mix-up of lanes shows. So does a frozen
                # copy that the step makes equal to the trained parameters.
                leaf[1] *= 1 + (2**-6 if is_trained else 2**-7)
            leaf.requires_grad_(is_trained)
        return leaves

    def fixed_params() -> dict[str, Tensor]:
        if host.fixed_is_shared:
            return {n: t.to(wide.get(t.dtype, t.dtype)) for n, t in host.fixed.items()}
        return {n: two(t) for n, t in host.fixed.items()}

    def own_step() -> tuple[Result, set[str]]:
        """Make the first lane's step by the module itself; also return what it writes to."""
        fixed = {n: t if host.fixed_is_shared else t[0] for n, t in fixed_params().items()}
        values = {n: p.detach()[0] for n, p in leaf_params().items()}
        values |= {n: two(b)[0] for n, b in host.buffer_stack.items()}
        own = {**host.named_parameters, **host.named_buffers}
        first = tree_map(lambda t: two(t)[0], batch)
        with (
            left_alone(module),
            seeded_rng(0, module.device),
            torch.enable_grad(),
            host.values(values),
            Watch(own) as watch,
        ):
            outcome, grads = local.by_itself(fixed, first)
            written = watch.written
        buffers = {name: values[name] for name in host.named_buffers}
        each = [grads.get(n, torch.zeros_like(values[n])) for n in trained]
        return (outcome._replace(buffers=buffers), each, _frozen(values)), written

    def _frozen(values: dict[str, Tensor]) -> list[Tensor]:
        return [values[name].detach() for name in host.params if name not in trained]

    def first_step() -> Result:
        with left_alone(module):  # it begins as the module's own does
            return step(at_once=False)

    def step(at_once: bool, seed: int = 0) -> Result:
        leaves, fixed = leaf_params(), fixed_params()
        with seeded_rng(seed, module.device), torch.enable_grad():
            outcome = local.many(
                leaves,
                tree_map(two, host.buffer_stack),
                fixed,
                tree_map(two, batch),
                None,
                fixed_is_shared=host.fixed_is_shared,
                at_once=at_once,
            )
        wanted = [leaves[name] for name in trained]
        grads = torch.autograd.grad(outcome.loss.sum(), wanted, allow_unused=True)
        pairs = zip(grads, wanted, strict=True)
        each = [torch.zeros_like(p) if g is None else g.to_dense() for g, p in pairs]
        return outcome, each, _frozen(leaves)

    trained = [name for name, p in host.params.items() if p.requires_grad]
    metrics = [m for m in module.modules() if isinstance(m, Metric)]
    counts = [m._update_count for m in metrics]
    with _without_dropout(module), left_alone(module) as attributes:
        local, exactness = LocalStep(module), 1e-8
        local.batch_idx = host.local.batch_idx
        try:
            try:
                own, written = own_step()
            except Exception:  # a step written for single precision, maybe
                wide, exactness = {}, 1e-4
                own, written = own_step()
            if names := sorted(written.intersection(trained)):
                return f"its training_step writes to {names[0]}, which it trains"
            alone = first_step()
            other, mapped = step(at_once=False, seed=1), step(at_once=True)
        except Exception as error:  # vmap has no rule for an operation, or the user's own mistake
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        finally:
            used = [m for m, n in zip(metrics, counts, strict=True) if m._update_count != n]
            for metric in used:
                metric.reset()
        if used:
            return f"training_step updates the metric {type(used[0]).__name__}"
        if names := attributes.mapped():
            return f"training_step keeps tensors in {names[0]}"
        is_random = not _close(alone, other, exactness)
        if not is_random and not _close(own, tree_map(lambda t: t[0], alone), exactness):
            return (
                "its step gives other results on parameters that it is handed than on its own, so"
                " it reaches them in another way than by its attributes (a list of them, say)"
            )
    if is_random:
        return None  # of its own making: there is nothing to compare with
    return None if _close(alone, mapped, exactness) else "mapped over lanes it gives other results"


def mixes_samples(module: LightningModule, host: StackedLanes, batch: Any) -> bool:
    """Say whether samples of weight 0 change a client's loss: something takes their mean.

    Args:
        module: The user's module, which knows weights.
        host: The lanes, whose first client is looked at.
        batch: Samples, ``[k, B, ...]``.
    """
    size = tree_leaves(batch)[0].shape[1]
    half = (size + 1) // 2
    first = next(iter(host.params.values()))

    def loss(count: int) -> Tensor:
        one = {name: t.detach()[:1] for name, t in host.params.items()}
        buffers = {name: t[:1].clone() for name, t in host.buffer_stack.items()}
        fixed = host.fixed
        if not host.fixed_is_shared:
            fixed = {name: t[:1] for name, t in fixed.items()}
        weight = (torch.arange(count) < half)[None].to(first) / half
        with seeded_rng(0, module.device), torch.no_grad():
            return local.many(
                one,
                buffers,
                fixed,
                tree_map(lambda t: t[:1, :count], batch),
                weight,
                fixed_is_shared=host.fixed_is_shared,
                at_once=False,
            ).loss

    with _without_dropout(module), left_alone(module), host.untouched():
        local = LocalStep(module)
        return not torch.allclose(loss(half), loss(size), rtol=1e-4, atol=1e-6, equal_nan=True)


def _close(one: Result, other: Result, exactness: float) -> bool:
    pairs = zip(_numbers(one), _numbers(other), strict=True)
    return all(
        torch.allclose(a, b, rtol=exactness, atol=exactness / 100, equal_nan=True) for a, b in pairs
    )


def _numbers(result: Result) -> list[Tensor]:
    wide = {True: torch.complex128, False: torch.float64}
    return [t.detach().to(wide[t.is_complex()]) for t in tree_leaves(result)]


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
