"""Checks that a vectorized step agrees with the module's own, before training starts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric

from lightning_fl.functional.randomness import rng_state, seeded_rng
from lightning_fl.runners.attributes import left_alone, metrics_of
from lightning_fl.runners.later_rounds import Operations
from lightning_fl.runners.local_step import LocalStep, Outcome, Tensors, gradients_of
from lightning_fl.runners.samples import copied
from lightning_fl.runners.step_hooks import has_backward_hooks
from lightning_fl.runners.tensors import is_floating
from lightning_fl.runners.vectorized import VectorizedStep
from lightning_fl.runners.watch import Watch
from lightning_fl.types import FederationError, first_line

#: Maximum size of constant parameters that are copied in float64 for the comparison.
MAX_WIDE_BYTES = 2**26
#: Data types that are replaced by float64 for the comparison.
NARROW = (torch.float32, torch.bfloat16, torch.float16)
#: Seed of the compared steps. A module is not likely to set the same one.
SEED = 1_846_297_503
#: The outcome of a step, gradients, and frozen parameters after the step.
Result = tuple[Outcome, list[Tensor], list[Tensor]]


def why_not_mapped(step: VectorizedStep, batch: Any) -> str | None:
    """Compare vectorized and sequential steps of two clients in float64.

    Both draw the same random numbers: the sequential steps start from the same seed, and the
    vectorized step draws once for all clients.

    Args:
        step: The step. Its first two clients are compared; their tensors are not changed.
        batch: Batches of two clients, stacked.

    Returns:
        The reason why the step cannot be vectorized, or None. Reasons are an exception; different
        losses, gradients, buffers or frozen parameters; writes to trained parameters; random
        numbers of Python or NumPy, which all clients would share; random numbers with a seed of
        the step's own, which ``vmap`` draws anew for each client; hooks of the backward pass, which
        are not called under ``vmap``; and an update of a torchmetrics metric, which would be
        silently wrong under ``vmap``.

    Raises:
        FederationError: If the step reads the stacked parameters of the optimizer.
    """
    module = step.module
    for m in module.modules():
        if isinstance(m, nn.Embedding) and m.padding_idx is not None:
            return "an Embedding with padding_idx would train its padding under vmap"
    with (
        _without_dropout(module),
        left_alone(module) as attributes,
        _metrics_reset(module) as updated,
        _Trial(step, batch) as trial,
    ):
        try:
            own = trial.first()
        except Exception as error:
            return first_line(error)
        if own.stacks:
            name = type(module).__name__
            raise FederationError(
                f"{name}.training_step reads the parameters of its optimizer ({own.stacks[0]})."
                " With VectorizedClients these are the stacked parameters of all clients. Use the"
                " module's own parameters (self.parameters()), or train the module without"
                " VectorizedClients"
            )
        if why := own.why_not_mapped(trial.trained):
            return why
        try:
            again = trial.by_itself()
            with left_alone(module):  # same initial attributes as in the module's own step
                alone = trial.stacked(at_once=False)
            mapped = trial.stacked(at_once=True)
        except Exception as error:  # an operation without vmap rule, or a mistake of the user
            if "same randomness" in str(error):
                return (
                    "its random numbers are drawn with other parameters for each client"
                    " (torch.bernoulli, multinomial, normal or poisson of tensors), so that steps"
                    " cannot be compared"
                )
            return first_line(error)
        if metric := updated():
            return f"training_step updates the metric {type(metric).__name__}"
        if names := attributes.mapped():
            return f"training_step stores tensors in the attribute {names[0]}"
    if not trial.agree(own.result, again.result):
        return "two equal steps of a client give different results, so they cannot be compared"
    if not trial.agree(own.result, tree_map(lambda t: t[0], alone)):
        return (
            "training_step gives different results with other parameters in place of the module's,"
            " so it does not access them as attributes of the module (but in a list, for example)"
        )
    return None if trial.agree(alone, mapped) else "its vectorized step gives different results"


class _Own(NamedTuple):
    """Hold what a client's step in the module itself has done.

    Args:
        result: Its result.
        written: Names of the tensors that it has written to.
        stacks: Names of the stacked parameters that it has used, instead of the client's.
        draws: Whether it has drawn random numbers of Python or NumPy.
        has_own_seed: Whether it has drawn random numbers with a seed or generator of its own.
        has_hooks: Whether hooks of layers or of tensors see its gradients.
    """

    result: Result
    written: set[str]
    stacks: list[str]
    draws: bool
    has_own_seed: bool
    has_hooks: bool

    def why_not_mapped(self, trained: Collection[str]) -> str | None:
        """Return the reason why the step cannot be vectorized, or None.

        Args:
            trained: Names of the trained parameters.
        """
        if names := sorted(self.written.intersection(trained)):
            return f"training_step writes to the trained parameter {names[0]}"
        if self.draws:
            return (
                "training_step draws random numbers with Python or NumPy, which all clients would"
                " share (draw them with torch)"
            )
        if self.has_own_seed:
            return (
                "training_step draws random numbers with a seed or generator of its own, which"
                " would be others for each client"
            )
        return "hooks of its backward pass would not be called" if self.has_hooks else None


class _Trial:
    """Make a step of the first two clients on copies of their tensors in float64.

    Args:
        step: The step.
        batch: Batches of two clients, stacked.
    """

    def __init__(self, step: VectorizedStep, batch: Any) -> None:
        self.stacks, self.module, self.batch = step.stacks, step.module, batch
        self.local = LocalStep(step.module, self.stacks.tensors.constants)
        self.local.batch_idx = step.local.batch_idx
        #: Names of the trained parameters.
        self.trained = [name for name, p in self.stacks.params.items() if p.requires_grad]
        self._wide, self._exactness = dict.fromkeys(NARROW, torch.float64), 1e-8
        constants = self.stacks.tensors.constants.values()
        #: Values of the constant parameters, which are in float64 meanwhile if they are small.
        self._constants = [(p, p.data) for p in constants]
        if sum(p.nbytes for p in constants) > MAX_WIDE_BYTES:
            self.use_its_precision()

    def __enter__(self) -> _Trial:
        for param, value in self._constants:
            param.data = value.to(self._wide.get(value.dtype, value.dtype))
        return self

    def __exit__(self, *_: object) -> None:
        self._restore_constants()

    def _restore_constants(self) -> None:
        for param, value in self._constants:
            param.data = value

    def use_its_precision(self) -> None:
        """Use the precision of the module instead of float64."""
        self._wide, self._exactness = {}, 1e-4
        self._restore_constants()

    def first(self) -> _Own:
        """Make the first client's step, in the module's precision if it needs that."""
        try:
            return self.by_itself()
        except Exception:  # the step may not support double precision
            self.use_its_precision()
            return self.by_itself()

    def by_itself(self) -> _Own:
        """Make the first client's step in the module itself."""
        stacks = self.stacks
        fixed = {n: t if stacks.fixed_is_shared else t[0] for n, t in self._fixed().items()}
        values = {n: p.detach()[0] for n, p in self._params().items()}
        values |= {n: self._two(b)[0] for n, b in stacks.buffers.items()}
        first = tree_map(lambda t: self._two(t)[0], self.batch)
        numbers = tree_map(lambda t: self._two(t)[0], stacks.hyperparameters)
        has_hooks = has_backward_hooks(self.module)
        with (
            left_alone(self.module),
            seeded_rng(SEED, self.module.device),
            torch.enable_grad(),
            stacks.values(values),
            Watch(stacks.params) as of_optimizer,
            Watch(stacks.tensors.by_name) as watch,
            Operations() as operations,
        ):
            before = rng_state()
            outcome, grads = self.local.by_itself(fixed, first, numbers)
            draws = _draws_outside_torch(before, rng_state())
            written = watch.written
        buffers = {name: values[name] for name in stacks.tensors.buffers}
        outcome = outcome._replace(buffers=buffers)
        result = outcome, self._of_trained(grads, values), self._frozen(values)
        stacks_used = sorted(of_optimizer.read | of_optimizer.written)
        # Under vmap no tensor requires a gradient: hooks of layers are not called, and a step that
        # asks a tensor first does not register its hook.
        has_hooks |= any(name == "register_hook" for name, *_ in operations.calls)
        return _Own(result, written, stacks_used, draws, watch.has_own_seed, has_hooks)

    def stacked(self, at_once: bool) -> Result:
        """Make the step of both clients on stacked tensors, with the same random numbers.

        Args:
            at_once: Whether to vectorize it; otherwise the clients train one after another.
        """
        params, fixed = self._params(), self._fixed()
        own = {
            "params": params,
            "buffers": tree_map(self._two, self.stacks.buffers),
            "batch": tree_map(self._two, self.batch),
            "hyperparameters": tree_map(self._two, self.stacks.hyperparameters),
        }
        if not self.stacks.fixed_is_shared:
            own["fixed"] = fixed

        def many(rows: slice) -> Outcome:
            tensors = {"fixed": fixed, "weight": None, **tree_map(lambda t: t[rows], own)}
            how: dict[str, Any] = {"fixed_is_shared": self.stacks.fixed_is_shared}
            how |= {"at_once": at_once, "randomness": "same"}
            with seeded_rng(SEED, self.module.device), torch.enable_grad():
                return self.local.many(**tensors, **how)

        clients = [slice(0, 2)] if at_once else [slice(0, 1), slice(1, 2)]
        outcome = tree_map(lambda *t: torch.cat(t), *map(many, clients))
        grads = gradients_of(outcome.loss.sum(), params)
        return outcome, self._of_trained(grads, params), self._frozen(params)

    def agree(self, one: Result, other: Result) -> bool:
        """Return whether two results differ by rounding only."""
        exactness = self._exactness
        pairs = zip(_numbers(one), _numbers(other), strict=True)
        return all(
            torch.allclose(a, b, rtol=exactness, atol=exactness / 100, equal_nan=True)
            for a, b in pairs
        )

    def _two(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        return tensor.detach()[:2].to(self._wide.get(tensor.dtype, tensor.dtype), copy=True)

    def _params(self) -> Tensors:
        params = self.stacks.params
        leaves: Tensors = {n: self._two(p) for n, p in params.items()}
        for name, leaf in leaves.items():
            is_trained = params[name].requires_grad
            if is_floating(leaf):
                # Clients start from equal values. Perturb them to reveal mixed-up clients, and
                # frozen copies that the step makes equal to the trained parameters.
                leaf[1] *= 1 + (2**-6 if is_trained else 2**-7)
            leaf.requires_grad_(is_trained)
        return leaves

    def _fixed(self) -> Tensors:
        fixed = self.stacks.fixed
        if self.stacks.fixed_is_shared:
            return {n: t.to(self._wide.get(t.dtype, t.dtype)) for n, t in fixed.items()}
        return {n: self._two(t) for n, t in fixed.items()}

    def _of_trained(self, grads: Tensors, values: Tensors) -> list[Tensor]:
        """Return the gradients of the trained parameters; 0 for those without one."""
        return [grads.get(n, torch.zeros_like(values[n])) for n in self.trained]

    def _frozen(self, values: Tensors) -> list[Tensor]:
        return [values[n].detach() for n in self.stacks.params if n not in self.trained]


def mixes_samples(step: VectorizedStep, batch: Any) -> bool:
    """Return whether samples of weight 0 change a client's loss or tensors, as in a batch mean.

    A batch of one sample does not tell, so that it is assumed.

    Args:
        step: The step of a module that supports sample weights. Its first client is checked.
        batch: Samples, ``[k, B, ...]``.
    """
    stacks, module = step.stacks, step.module
    size = tree_leaves(batch)[0].shape[1]
    half = (size + 1) // 2

    def result(count: int) -> list[Tensor]:
        weight = (torch.arange(count) < half)[None].double() / half
        weight = weight.to(stacks.first.device, stacks.first.dtype.to_real())
        with seeded_rng(0, module.device), torch.no_grad():
            first = stacks.arguments(lambda t: t.detach()[:1].clone())
            samples = copied(tree_map(lambda t: t[:1, :count], batch))
            outcome = local.many(**first, batch=samples, weight=weight, at_once=False)
        return _numbers([outcome.loss, outcome.buffers, first["params"]])

    with _without_dropout(module), left_alone(module), stacks.untouched():
        local = LocalStep(module, stacks.tensors.constants)
        pairs = zip(result(half), result(size), strict=True)
        is_same = all(torch.allclose(*each, rtol=1e-4, atol=1e-6, equal_nan=True) for each in pairs)
    return size == 1 or not is_same


def _draws_outside_torch(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether the states of the generators of Python or NumPy differ."""
    pairs = zip(before["numpy"], after["numpy"], strict=True)
    return before["python"] != after["python"] or any(np.any(a != b) for a, b in pairs)


def _numbers(result: Any) -> list[Tensor]:
    """Return the tensors of a result in double precision."""
    wide = {True: torch.complex128, False: torch.float64}
    return [t.detach().to(wide[t.is_complex()]) for t in tree_leaves(result)]


@contextmanager
def _metrics_reset(module: nn.Module) -> Iterator[Callable[[], Metric | None]]:
    """Reset the metrics that steps update within a ``with`` block.

    Yields:
        A function that returns one of them, or None.
    """
    counts = [(metric, metric._update_count) for metric in metrics_of(module)]

    def updated() -> Metric | None:
        return next((m for m, count in counts if m._update_count != count), None)

    try:
        yield updated
    finally:
        for metric, count in counts:
            if metric._update_count != count:
                metric.reset()


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    """Disable dropout, since vectorized steps draw different random numbers."""
    layers = [(layer, layer.p) for layer in module.modules() if isinstance(layer, _DropoutNd)]
    try:
        for layer, _ in layers:
            layer.p = 0.0
        yield
    finally:
        for layer, p in layers:
            layer.p = p
