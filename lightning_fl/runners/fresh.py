"""Check, before a fit, that an optimizer can be reset for each client."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.runners.optimizer_state import OptimizerState, not_fresh, not_kept
from lightning_fl.runners.optimizer_trial import (
    random_problem,
    stood_still,
    take_steps,
    trial_shape,
)
from lightning_fl.runners.optimizer_values import params_of, tensors_in, varies
from lightning_fl.runners.tensors import is_equal
from lightning_fl.types import FederationError

#: Keys of parameter groups that schedulers set.
_SCHEDULED = ("lr", "momentum", "betas")
#: Steps of two successive clients in a trial. The first is not a multiple of common periods.
FIRST_STEPS, NEXT_STEPS = 13, 23


def check_fresh(state: OptimizerState, keep: bool) -> None:
    """Check that an optimizer can be reset for the next client.

    A small copy of the optimizer trains one client, is reset, and trains the next client. The next
    client's steps must equal those of an unused copy bit for bit.

    Args:
        state: State of the optimizer. The optimizer is not changed; the entries that its steps
            change are recorded in ``state.learned``.
        keep: Whether clients keep the state of their optimizers.

    Raises:
        FederationError: If the steps differ, or if the copy cannot make steps at all.
    """
    name, params = type(state.optimizer).__name__, params_of(state.optimizer)
    if state.is_simple:
        return
    has_scheduler = any("initial_lr" in group for group in state.optimizer.param_groups)
    versions = [p._version for p in params]
    try:
        with seeded_rng(0, params[0].device):
            unused = [_trained(state, used=False)[0] for _ in range(2)]
            used, copied = _trained(state, used=True)
            goes_on = not keep or _goes_on(state)
    except FederationError:
        raise
    except Exception as error:  # third-party optimizers raise many kinds
        raise FederationError(
            f"the check that {name} can be reset for each client failed at the start of the fit"
            f" ({type(error).__name__}: {error}). Choose another optimizer"
        ) from error
    if [p._version for p in params] != versions:
        raise FederationError(not_fresh(state.optimizer, "references to the module's parameters"))
    if not is_equal(unused[0], used) or not is_equal(*unused):
        raise FederationError(not_fresh(state.optimizer, "hidden state that reset does not reach"))
    for place, key in copied.learned_keys():
        value = state.set_outside.get(place, {}).get(key)
        if any(varies(tensor) for tensor in tensors_in(value)):
            raise FederationError(
                not_fresh(state.optimizer, f"{key}, a copy of its parameters, from the start")
            )
        if has_scheduler and key in _SCHEDULED:
            raise FederationError(
                f"both {name} and a learning-rate scheduler change {key} of the parameter groups."
                " Remove the scheduler, or choose another optimizer"
            )
    state.learned = {place: set(keys) for place, keys in copied.learned.items()}
    if not goes_on:
        raise FederationError(not_kept(state.optimizer, "hidden state"))


def _trained(state: OptimizerState, used: bool) -> tuple[list[Tensor], OptimizerState]:
    """Return the final parameters of a client.

    Args:
        state: State of the optimizer.
        used: Whether another client has used the optimizer before.
    """
    random = torch.Generator().manual_seed(0)
    optimizer, copied = state.replica(
        lambda param: param.new_zeros(trial_shape(state, param.shape))
    )
    first, following = (random_problem(optimizer, n, random) for n in (FIRST_STEPS, NEXT_STEPS))
    copied.watch()
    if used:
        take_steps(optimizer, *first)
        copied.reset()
    ends = take_steps(optimizer, *following)
    if stood_still(optimizer, ends, following[0]):
        raise ValueError("a copy of it makes no step")
    return ends, copied


def _goes_on(state: OptimizerState) -> bool:
    """Return whether a copy that loads the state of another copy continues like that copy."""
    random = torch.Generator().manual_seed(0)
    (optimizer, copied), (other, restored) = (
        state.replica(torch.zeros_like, every=True) for _ in range(2)
    )
    first, following, between = (
        random_problem(optimizer, n, random) for n in (FIRST_STEPS, NEXT_STEPS, FIRST_STEPS)
    )
    for each in (copied, restored):
        each.watch()
    take_steps(optimizer, *first)
    take_steps(other, *between)
    rows = {name: row.clone() for name, row in copied.rows().items()}
    state.kept = {name: row for name, row in rows.items() if not name.startswith("optimizer.")}
    restored.reset()
    restored.load(rows)
    return is_equal(take_steps(optimizer, *following), take_steps(other, *following))
