"""Whether an optimizer can train many clients at once, each as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.runners.optimizer_state import OptimizerState
from lightning_fl.runners.optimizer_trial import (
    random_problem,
    scalars,
    stood_still,
    take_steps,
    trial_shape,
)
from lightning_fl.runners.optimizer_values import holds_other_parameters, params_of
from lightning_fl.types import FederationError

#: Steps of a trial: enough for estimates that need some steps to begin.
STEPS = 25
#: Factors of the gradients of two clients.
SCALES = (0.03, 1e3)
#: Relative and absolute difference of two steps in float64 that is rounding.
RTOL, ATOL = 1e-8, 1e-13

#: Optimizers that treat all numbers alike, with steps proportional to their rate: known, not tried.
PROPORTIONAL = {
    *(torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta),
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam),
    torch.optim.RAdam,
}

ShapeOf = Callable[[Sequence[int]], tuple[int, ...]]


def fresh(optimizer: Optimizer, param: Tensor, name: str) -> Tensor:
    """Return the state of a parameter before the first step: zero, or what the optimizer says."""
    made = getattr(optimizer, "fresh", None)
    value: Tensor = torch.zeros_like(param) if made is None else made(param, name)
    return value.detach().clone()


def check_separable(state: OptimizerState, keep: bool) -> bool:
    """Refuse an optimizer whose step for one client depends on the clients beside it.

    Some optimizers of torch are known. Others are tried: see :func:`check_by_trial`.

    Args:
        state: Of an optimizer of stacked parameters, ``[lanes, ...]``, which is left alone.
        keep: Whether clients keep the state of their optimizers.

    Returns:
        Whether a step is proportional to its learning rate.

    Raises:
        FederationError: If they differ, as with norms of whole tensors (LARS), estimates that all
            parameters share (Prodigy), or line searches (LBFGS).
    """
    is_known = type(state.optimizer) in PROPORTIONAL and not holds_other_parameters(state.optimizer)
    return True if is_known and not keep else check_by_trial(state, keep)


def check_by_trial(state: OptimizerState, keep: bool) -> bool:
    """Do :func:`check_separable` for any optimizer.

    Small copies of the optimizer, with its own groups and options, train two clients apart and
    stacked. Their gradients differ much in size.
    """
    optimizer = state.optimizer
    name, device = type(optimizer).__name__, params_of(optimizer)[0].device
    refused = f"{name} cannot train clients in lanes"
    remedy = (
        "train the module itself instead of VectorizedClients(module), or choose another optimizer"
    )
    if holds_other_parameters(optimizer):
        raise FederationError(
            f"{refused}: it holds parameters outside of its parameter groups: {remedy}"
        )
    try:
        with seeded_rng(0, device):
            for with_closure in (True, False):
                both, singles = _trial(state, with_closure)
                for lane, single in enumerate(singles):
                    if stood_still(single.state.optimizer, single.ends, single.starts):
                        raise ValueError("a copy of it makes no step")
                    if not _agree(_lane_of(both.ends, lane), single.ends, single.starts):
                        raise FederationError(
                            f"{refused}: its step for one client depends on the others (norms of"
                            f" whole tensors or estimates for all of them): {remedy}"
                        )
            first = singles[0]
            is_linear = _is_linear(state, first)
    except FederationError:
        raise
    except Exception as error:  # of many kinds
        raise FederationError(f"{refused} ({type(error).__name__}: {error}): {remedy}") from error
    one, other = (scalars(single.state) for single in singles)
    for key in sorted(scalars(both.state)):
        if one.get(key) != other.get(key):
            raise FederationError(
                f"{refused}: it learns {key.rpartition('.')[2]}, which is one number for all"
                f" clients: {remedy}"
            )
    if keep:
        _check_kept(both.state, remedy)
        if not _begins_at_fresh(state, first):
            raise FederationError(
                f"optimizer_state: keep does not work in lanes with {name}, whose state does not"
                f" begin at 0: give it a method fresh(param, name), choose reset, or {remedy}"
            )
    return is_linear


def _check_kept(state: OptimizerState, remedy: str) -> None:
    """Refuse to keep what is one value for all clients."""
    name = type(state.optimizer).__name__
    shared = [key.rpartition(".")[2] for key in scalars(state)]
    shared += [key for key in state.rows() if not key.startswith("optimizer.")]
    if any(group.get("dampening") for group in state.optimizer.param_groups):
        shared.append("the first step of its dampening")
    if shared:
        raise FederationError(
            f"optimizer_state: keep does not work in lanes with {name}, whose {shared[0]} is one"
            f" for all: choose reset, or {remedy}"
        )


@dataclass
class _Run:
    """What a copy of the optimizer was given, and where it ended."""

    state: OptimizerState
    starts: list[Tensor]
    gradients: list[list[Tensor | None]]
    ends: list[Tensor]


def _trial(state: OptimizerState, with_closure: bool) -> tuple[_Run, list[_Run]]:
    """Train two clients stacked, then apart."""

    def run(shape: Callable[..., Tensor], given: Any = None) -> _Run:
        optimizer, learned = state.replica(partial(shape, shape_of=partial(trial_shape, state)))
        starts, gradients = _problem_of_two(optimizer) if given is None else given
        learned.watch()
        ends = take_steps(optimizer, starts, gradients, with_closure=with_closure)
        return _Run(learned, starts, gradients, ends)

    both = run(_stack_of_two)
    parts = [
        (_lane_of(both.starts, lane), [_lane_of(each, lane) for each in both.gradients])
        for lane in range(2)
    ]
    return both, [run(_alone, part) for part in parts]


def _is_linear(state: OptimizerState, run: _Run) -> bool:
    """Say whether half the learning rate makes half of each step."""
    halves = []
    for ratio, factor in ((0.5, 1.0), (1.0, 0.5)):
        optimizer, _ = state.replica(partial(_alone, shape_of=partial(trial_shape, state)))
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * factor
        halves.append(take_steps(optimizer, run.starts, run.gradients, ratio))
    return _agree(halves[0], halves[1], run.starts)


def _begins_at_fresh(state: OptimizerState, run: _Run) -> bool:
    """Say whether a state from :func:`fresh` is as good as none."""
    used, _ = state.replica(partial(_alone, shape_of=partial(trial_shape, state)))
    take_steps(used, run.starts, run.gradients[:1])
    ends = []
    for is_given in (True, False):
        optimizer, _ = state.replica(partial(_alone, shape_of=partial(trial_shape, state)))
        for param, start in zip(params_of(optimizer), run.starts, strict=True):
            param.data.copy_(start)
        if is_given:
            for param, known in zip(params_of(optimizer), params_of(used), strict=True):
                for name, value in used.state.get(known, {}).items():
                    if value is not None:
                        optimizer.state[param][name] = fresh(optimizer, param, name)
        ends.append(take_steps(optimizer, run.starts, run.gradients[:1]))
    return _agree(ends[0], ends[1], run.starts)


# --- tensors of a trial ---------------------------------------------------------------------------


def _alone(stack: Tensor, shape_of: ShapeOf) -> Tensor:
    """Return a small tensor, in double precision, like one lane of a stack."""
    dtype = stack.dtype
    if stack.is_complex() or stack.is_floating_point():
        dtype = torch.complex128 if stack.is_complex() else torch.float64
    return torch.zeros(shape_of(stack.shape[1:]), dtype=dtype, device=stack.device)


def _stack_of_two(stack: Tensor, shape_of: ShapeOf) -> Tensor:
    return torch.stack([_alone(stack, shape_of)] * 2)


def _problem_of_two(optimizer: Optimizer) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    starts, gradients = random_problem(optimizer, STEPS, torch.Generator().manual_seed(0))
    for gradient in (gradient for each in gradients for gradient in each):
        if gradient is not None:
            for lane, scale in zip(gradient, SCALES, strict=True):
                lane.mul_(scale)
    return starts, gradients


def _lane_of(tensors: Sequence[Any], lane: int) -> list[Any]:
    return [None if tensor is None else tensor[lane] for tensor in tensors]


def _agree(one: Sequence[Tensor], other: Sequence[Tensor], starts: Sequence[Tensor]) -> bool:
    """Say whether two runs from the same start differ by rounding alone."""
    for a, b, start in zip(one, other, starts, strict=True):
        if not (a.is_floating_point() or a.is_complex()) or not a.numel():
            continue
        if not torch.equal(a.isfinite(), b.isfinite()):
            return False
        finite = a.isfinite()
        a, b, start = a[finite], b[finite], start[finite]
        if a.numel():
            moved, size = (b - start).abs().max(), b.abs().max()
            if (a - b).abs().max() > RTOL * moved + ATOL * size:
                return False
    return True
