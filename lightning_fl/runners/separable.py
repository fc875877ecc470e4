"""Check that an optimizer can train many clients at once, each independently of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from lightning_fl.runners.tensors import is_floating
from lightning_fl.types import FederationError

#: Number of steps of a trial, enough for estimates with a warm-up.
STEPS = 25
#: Factors of the gradients of two clients.
SCALES = (0.03, 1e3)
#: Relative and absolute tolerance for rounding differences in float64.
RTOL, ATOL = 1e-8, 1e-13

#: Optimizers known to be elementwise, with steps proportional to the learning rate.
PROPORTIONAL = {
    *(torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta),
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam),
    torch.optim.RAdam,
}


def fresh(optimizer: Optimizer, param: Tensor, name: str) -> Tensor:
    """Return the initial state of a parameter: zero, or the result of the optimizer's ``fresh``."""
    made = getattr(optimizer, "fresh", None)
    value: Tensor = torch.zeros_like(param) if made is None else made(param, name)
    return value.detach().clone()


def check_separable(state: OptimizerState, keep: bool) -> bool:
    """Check that an optimizer's step for one client does not depend on the other clients.

    Some optimizers of torch are known to qualify. Others are checked by :func:`check_by_trial`.

    Args:
        state: State of an optimizer of stacked parameters, ``[k, ...]``; it is not changed.
        keep: Whether clients keep the state of their optimizers.

    Returns:
        Whether a step is proportional to its learning rate.

    Raises:
        FederationError: If a step depends on other clients, as with norms of whole tensors (LARS),
            estimates that all parameters share (Prodigy), or line searches (LBFGS).
    """
    is_known = type(state.optimizer) in PROPORTIONAL and not holds_other_parameters(state.optimizer)
    return True if is_known and not keep else check_by_trial(state, keep)


def check_by_trial(state: OptimizerState, keep: bool) -> bool:
    """Check any optimizer by a trial; see :func:`check_separable`.

    Small copies of the optimizer, with the same groups and options, train two clients separately
    and stacked. The gradients of the two clients differ strongly in scale.
    """
    optimizer = state.optimizer
    name, device = type(optimizer).__name__, params_of(optimizer)[0].device
    refused = f"{name} cannot train vectorized clients"
    remedy = "train the module without VectorizedClients, or choose another optimizer"
    if holds_other_parameters(optimizer):
        raise FederationError(
            f"{refused}: it holds parameters outside of its parameter groups. To continue, {remedy}"
        )
    try:
        with seeded_rng(0, device):
            ends = dict[bool, list[Tensor]]()
            for with_closure in (True, False):
                both, singles = _trial(state, with_closure)
                ends[with_closure] = singles[0].ends
                for row, single in enumerate(singles):
                    if stood_still(single.state.optimizer, single.ends, single.starts):
                        raise ValueError("a copy of it makes no step")
                    if not _agree(_row_of(both.ends, row), single.ends, single.starts):
                        raise FederationError(
                            f"{refused}: its step for one client depends on the other clients (by"
                            f" norms of whole tensors or shared estimates). To continue, {remedy}"
                        )
            first = singles[0]
            is_equal = _agree(ends[True], ends[False], first.starts)
            if getattr(optimizer, "evaluations", 1) == 1 and not is_equal:
                raise FederationError(
                    f"{refused}: its step with a closure differs from its step without, and most"
                    " local steps get none. If it evaluates the closure several times in a step,"
                    " give it an attribute evaluations with their number. Otherwise, " + remedy
                )
            is_linear = _is_linear(state, first)
    except FederationError:
        raise
    except Exception as error:  # third-party optimizers raise many kinds
        raise FederationError(
            f"{refused} ({type(error).__name__}: {error}). To continue, {remedy}"
        ) from error
    one, other = (scalars(single.state) for single in singles)
    for key in sorted(scalars(both.state)):
        if one.get(key) != other.get(key):
            raise FederationError(
                f"{refused}: its estimate {key.rpartition('.')[2]} is one number for all clients."
                f" To continue, {remedy}"
            )
    if keep:
        _check_kept(both.state, remedy)
        if not _begins_at_fresh(state, first):
            raise FederationError(
                f"optimizer_state='keep' does not support vectorized clients with {name}: its"
                " initial state is not 0. Add a method fresh(param, name) to the optimizer, choose"
                f" optimizer_state='reset', or {remedy}"
            )
    return is_linear


def _check_kept(state: OptimizerState, remedy: str) -> None:
    """Check that the state holds no values that all clients share."""
    name = type(state.optimizer).__name__
    shared = [key.rpartition(".")[2] for key in scalars(state)]
    shared += [key for key in state.rows() if not key.startswith("optimizer.")]
    if any(group.get("dampening") for group in state.optimizer.param_groups):
        shared.append("the first step of its dampening")
    if shared:
        raise FederationError(
            f"optimizer_state='keep' does not support vectorized clients with {name}: all clients"
            f" share {shared[0]}. Choose optimizer_state='reset', or {remedy}"
        )


@dataclass
class _Run:
    """Hold the inputs and the final parameters of a trial."""

    state: OptimizerState
    starts: list[Tensor]
    gradients: list[list[Tensor | None]]
    ends: list[Tensor]


def _trial(state: OptimizerState, with_closure: bool) -> tuple[_Run, list[_Run]]:
    """Train two clients stacked, then separately."""

    def run(is_stacked: bool, given: Any = None) -> _Run:
        optimizer, learned = _replica(state, is_stacked)
        starts, gradients = _problem_of_two(optimizer) if given is None else given
        learned.watch()
        ends = take_steps(optimizer, starts, gradients, with_closure=with_closure)
        return _Run(learned, starts, gradients, ends)

    both = run(is_stacked=True)
    parts = [
        (_row_of(both.starts, row), [_row_of(each, row) for each in both.gradients])
        for row in range(2)
    ]
    return both, [run(False, part) for part in parts]


def _is_linear(state: OptimizerState, run: _Run) -> bool:
    """Return whether half the learning rate gives half of each step."""
    halves = []
    for ratio, factor in ((0.5, 1.0), (1.0, 0.5)):
        optimizer, _ = _replica(state)
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * factor
        halves.append(take_steps(optimizer, run.starts, run.gradients, ratio))
    return _agree(halves[0], halves[1], run.starts)


def _begins_at_fresh(state: OptimizerState, run: _Run) -> bool:
    """Return whether a state from :func:`fresh` is equivalent to an empty state."""
    used, _ = _replica(state)
    take_steps(used, run.starts, run.gradients[:1])
    ends = []
    for is_given in (True, False):
        optimizer, _ = _replica(state)
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


def _replica(state: OptimizerState, is_stacked: bool = False) -> tuple[Optimizer, OptimizerState]:
    """Return a small copy of an optimizer in double precision, of one client or of two stacked."""

    def convert(stack: Tensor) -> Tensor:
        dtype = stack.dtype
        if is_floating(stack):
            dtype = torch.complex128 if stack.is_complex() else torch.float64
        shape = trial_shape(state, stack.shape[1:])
        return torch.zeros((2, *shape) if is_stacked else shape, dtype=dtype, device=stack.device)

    return state.replica(convert)


def _problem_of_two(optimizer: Optimizer) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    starts, gradients = random_problem(optimizer, STEPS, torch.Generator().manual_seed(0))
    for gradient in (gradient for each in gradients for gradient in each):
        if gradient is not None:
            for row, scale in zip(gradient, SCALES, strict=True):
                row.mul_(scale)
    return starts, gradients


def _row_of(tensors: Sequence[Any], row: int) -> list[Any]:
    return [None if tensor is None else tensor[row] for tensor in tensors]


def _agree(one: Sequence[Tensor], other: Sequence[Tensor], starts: Sequence[Tensor]) -> bool:
    """Return whether two runs from the same start differ by rounding only."""
    for a, b, start in zip(one, other, starts, strict=True):
        if not is_floating(a) or not a.numel():
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
