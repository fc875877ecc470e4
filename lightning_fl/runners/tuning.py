"""Choice of vectorized or sequential, and of compiled steps, by timing at the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.flop_counter import FlopCounterMode

from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.runners.attributes import left_alone
from lightning_fl.runners.graphs import (
    can_update,
    depends_on_batch_idx,
    reads_batch_idx,
    sgd_update,
)
from lightning_fl.runners.local_step import gradients_of
from lightning_fl.runners.optimizer_values import rates_scaled
from lightning_fl.runners.samples import Samples, copied
from lightning_fl.runners.vectorized import VectorizedStep

#: Conservative estimates of the seconds that compiling takes, and of the share of a step that it
#: saves for clients that train at once or one after another.
COMPILING_TAKES, COMPILING_SAVES, COMPILING_ONE_SAVES = 10, 0.5, 0.2
#: Estimates of floating-point operations per second, by type of device.
SPEED = {"cpu": 1e11, "cuda": 1e13}
#: Seconds of timing after which no further trial starts: of clients at once or one after another,
#: and of compiled steps, for which a run must be longer anyway.
LONG, LONG_COMPILED = 1.0, 3.0


def tune(
    step: VectorizedStep,
    samples: Samples,
    is_timed: bool,
    compile: bool | Literal["auto"],
    steps_per_batch: int,
) -> None:
    """Choose the fastest way to train clients whose steps can be vectorized.

    Args:
        step: The step; the choices are stored in it.
        samples: The samples of the first local step.
        is_timed: Whether to choose the faster of vectorized and sequential steps by timing.
        compile: Whether to compile. ``auto`` compiles if the run is long enough for it to pay.
        steps_per_batch: Number of local steps in a Lightning batch.
    """
    stacks = step.stacks
    if is_timed:
        with _put_back(step):
            mapped, one_by_one = (
                seconds(partial(trial, step, samples, at_once=way)) for way in (True, False)
            )
        if one_by_one < mapped:
            stacks.train_one_by_one()
    may_compile = compile is not False and (stacks.at_once or can_compile_one(step))
    if may_compile and compile == "auto":
        trainer = step.module.trainer
        rounds = (trainer.max_epochs or 0) - trainer.current_epoch
        steps = rounds * trainer.fit_loop.max_batches * steps_per_batch
        speed = SPEED.get(stacks.first.device.type, SPEED["cpu"])
        may_compile = compiling_pays(operations(step, samples) / speed, steps, stacks.at_once)
    if may_compile and (why := why_not_compiled(step, samples)) is not None:
        rank_zero_warn(f"the vectorized step is not compiled: {why}")
    elif may_compile and stacks.at_once:
        step.compile()
    elif may_compile:
        try_one(step, samples)
    how = "at once" if stacks.at_once else "one after another, which is faster"
    compiled = ", compiled" * (step.graphs is not None or step.side_by_side is not None)
    rank_zero_info(f"{type(step.module).__name__}: {stacks.count} clients {how}{compiled}")


def try_one(step: VectorizedStep, samples: Samples) -> None:
    """Compile the step of one client if that is faster; see `VectorizedStep.compile_one`.

    Args:
        step: The step of clients that train one after another.
        samples: The samples of the first local step.
    """
    one_by_one = partial(trial, step, samples, at_once=False)
    with _put_back(step):
        eager = seconds(one_by_one, LONG_COMPILED)
        step.compile_one()
        one_by_one()  # compiles
        if step.side_by_side is not None and seconds(one_by_one, LONG_COMPILED) > eager:
            step.discard_one()


def can_compile_one(step: VectorizedStep) -> bool:
    """Return whether the step of one client can be compiled: on a CPU, with SGD."""
    is_sgd = type(step.optimizer) is torch.optim.SGD
    return is_sgd and step.stacks.first.device.type == "cpu"


def operations(step: VectorizedStep, samples: Samples) -> float:
    """Return the floating-point operations of a local step of all clients, counted for one."""
    with FlopCounterMode(display=False) as counter:
        step.tried_first(samples)
    return float(counter.get_total_flops()) * step.stacks.count


def compiling_pays(work: float, steps: float, at_once: bool) -> bool:
    """Return whether a run is long enough for compiling to pay.

    The decision rests on an estimate of the work, since timings vary. A step takes at least the
    overhead of Python.

    Args:
        work: Estimate of the seconds that a step of all clients computes.
        steps: Number of remaining steps.
        at_once: Whether the clients train at once.
    """
    step_seconds = max(2e-3, work)
    saves = COMPILING_SAVES if at_once else COMPILING_ONE_SAVES
    return steps * step_seconds * saves > COMPILING_TAKES


def why_not_compiled(step: VectorizedStep, samples: Samples) -> str | None:
    """Return the reason why a step cannot be compiled, or None.

    A graph returns zeros for a parameter without a gradient, which momentum and weight decay would
    then change. Each value of ``batch_idx`` would need another graph.
    """
    with step.undone():
        everyone = torch.ones(step.stacks.count, dtype=torch.bool)
        total, _ = step.mapped(copied(samples), everyone, updates=False)
    if unused := step.unused(gradients_of(total, step.stacks.params)):
        return (
            f"the first step does not use {unused[0]}. To compile it, freeze the parameter with"
            " requires_grad_(False) or remove it"
        )
    if uses_batch_idx(step, samples):
        return (
            "training_step uses batch_idx, so that each value would be compiled anew. To compile"
            " it, do not use batch_idx in training_step"
        )
    return None


# --- trials ---------------------------------------------------------------------------------------


def seconds(step: Callable[[], None], long: float = LONG) -> float:
    """Return the minimum of three timings after a warm-up; long steps are repeated less often."""
    times = list[float]()
    while len(times) <= 3 and sum(times) < long:
        start = perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(perf_counter() - start)
    return min(times[1:] or times)


@contextmanager
def _put_back(step: VectorizedStep) -> Iterator[None]:
    """Undo what trials change in the module, the tensors of clients, and the state of SGD.

    The learning rate is 0 meanwhile.
    """
    is_sgd = type(step.optimizer) is torch.optim.SGD
    groups, state = step.optimizer.param_groups if is_sgd else [], step.optimizer.state
    params = [p for group in groups if group["momentum"] for p in group["params"]]
    before = {p: state.pop(p) for p in params if p in state}
    with left_alone(step.module), step.stacks.untouched(), rates_scaled(groups, 0.0):
        try:
            for p in params:  # so that a step includes the update
                state[p] = {"momentum_buffer": torch.zeros_like(p)}
            yield
        finally:
            for p in params:
                del state[p]
            state.update(before)


def trial(step: VectorizedStep, samples: Samples, at_once: bool) -> None:
    """Make a forward and backward pass, and the update of SGD; see :func:`_put_back`."""
    stacks, everyone = step.stacks, torch.ones(step.stacks.count, dtype=torch.bool)
    samples = copied(samples)
    with seeded_rng(0, step.module.device), torch.enable_grad():
        if not at_once:
            step.one_by_one(samples, everyone, updates=True)
            return
        total, _ = step.mapped(samples, everyone, updates=False)
        grads = gradients_of(total, stacks.params)
    if can_update(step.optimizer):
        sgd_update(step.optimizer, stacks.params, slice(None), grads)


def uses_batch_idx(step: VectorizedStep, samples: Samples) -> bool:
    """Return whether the graph of a step depends on ``batch_idx``."""
    if not reads_batch_idx(step.module):
        return False
    own = step.stacks.leaves(lambda t: t[:2].clone())
    with seeded_rng(0, step.module.device):
        return depends_on_batch_idx(
            step.local, **own, batch=copied(samples.pair()), weight=None, at_once=True
        )
