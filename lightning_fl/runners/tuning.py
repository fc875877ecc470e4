"""How the clients of a run train, chosen by checks and timing at its first local step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Literal, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.runners.attributes import left_alone
from lightning_fl.runners.check import carried, mixes_samples, why_not_mapped
from lightning_fl.runners.graphs import depends_on_batch_idx, reads_batch_idx
from lightning_fl.runners.samples import Padded, Samples
from lightning_fl.runners.tensors import select
from lightning_fl.runners.vectorized import VectorizedStep
from lightning_fl.types import FederationError

#: Seconds that compiling takes, and the share of a step that it saves, on the safe side.
COMPILING_TAKES, COMPILING_SAVES = 10, 0.5
#: Seconds of trials, after which there is no other.
LONG = 1.0


class Wishes(NamedTuple):
    """What a user leaves to be chosen.

    Args:
        timed: Whether the faster of mapped and sequential steps is chosen by timing.
        compile: Whether to compile; ``auto`` compiles where that pays.
        pays: Whether the run is long enough for compiling to pay.
    """

    timed: bool
    compile: bool | Literal["auto"]
    pays: bool


def tune(step: VectorizedStep, samples: Samples, wishes: Wishes) -> None:
    """Check that mapped steps do what the module does, and choose the fastest way to train.

    Args:
        step: The step, which takes over what is chosen.
        samples: Of the first local step.
        wishes: What is to be chosen.

    Raises:
        FederationError: If a step depends on what an earlier one left in plain attributes, of
            which there is one for all clients.
    """
    name, stacks = type(step.module).__name__, step.stacks
    if names := carried(step, samples):
        raise FederationError(
            f"{name}.training_step depends on what an earlier step has left in its attributes"
            f" ({', '.join(names[:3])}). Clients that train at once would share them: keep it"
            " in a buffer (register_buffer), of which each client has its own, or train the"
            " module itself instead of VectorizedClients(module)"
        )
    why = samples.why_not_stacked() or why_not_mapped(step, samples.pair())
    if why is not None:
        stacks.train_one_by_one()
        rank_zero_warn(f"{name} is trained one client after another, not at once: {why}")
        return
    if isinstance(samples, Padded) and step.weighted:
        step.weighted = not mixes_samples(step, samples.tensors)
    if wishes.timed:
        with left_alone(step.module):
            mapped, one_by_one = (
                seconds(partial(trial, step, samples, at_once=way)) for way in (True, False)
            )
        if one_by_one < mapped:
            stacks.train_one_by_one()
    may_compile = wishes.compile is True or (wishes.compile and wishes.pays and stacks.at_once)
    if may_compile and (why := why_not_compiled(step, samples)) is not None:
        rank_zero_warn(f"lanes are not compiled: {why}")
    elif may_compile:
        step.compile()
    how = "at once" if stacks.at_once else "one after another, which is faster"
    compiled = ", compiled" * (step.graphs is not None)
    rank_zero_info(f"{name}: {stacks.count} clients {how}{compiled}")


def compiling_pays(num_parameters: int, samples: int, steps: float) -> bool:
    """Return whether a run is long enough to compile, by its work: not by time, which varies.

    A step costs 6 operations a parameter and sample, at about 100 GFLOP/s, or Python's time.

    Args:
        num_parameters: Number of trained parameters of a client.
        samples: Number of samples of a step of all clients.
        steps: Number of steps that are left.
    """
    step_seconds = max(2e-3, 6 * num_parameters * samples / 1e11)
    return steps * step_seconds * COMPILING_SAVES > COMPILING_TAKES


def why_not_compiled(step: VectorizedStep, samples: Samples) -> str | None:
    """Return what keeps a step from being compiled; None if nothing does.

    A graph has zeros where the step leaves a parameter without a gradient: momentum and weight
    decay would move it. And each value of ``batch_idx`` would be another graph.
    """
    if unused := unused_parameters(step, samples):
        return (
            f"the first step does not use {unused[0]}. Freeze it with"
            " requires_grad_(False), or leave it out, to have them compiled"
        )
    if uses_batch_idx(step, samples):
        return (
            "training_step uses batch_idx, and each of its values would"
            " be compiled anew. Leave it out of training_step to have them compiled"
        )
    return None


# --- trials ---------------------------------------------------------------------------------------


def seconds(step: Callable[[], None], repeats: int = 3) -> float:
    """Return the shortest of several times, after one that is not counted; of few, if long."""
    times = list[float]()
    while len(times) <= repeats and sum(times) < LONG:
        start = perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(perf_counter() - start)
    return min(times[1:] or times)


def trial(step: VectorizedStep, samples: Samples, at_once: bool) -> None:
    """Make a step forward and back, of which nothing remains."""
    everyone = torch.ones(step.stacks.count, dtype=torch.bool)
    with seeded_rng(0), step.stacks.untouched(), torch.enable_grad():
        if not at_once:
            step.one_by_one(samples, everyone)
            return
        total, _ = step.mapped(samples, everyone)
        wanted = [p for p in step.stacks.params.values() if p.requires_grad]
        torch.autograd.grad(total, wanted, allow_unused=True)


def unused_parameters(step: VectorizedStep, samples: Samples) -> list[str]:
    """Return the names of the parameters that a step gives no gradient."""
    with seeded_rng(0), step.stacks.untouched(), torch.enable_grad():
        total, _ = step.mapped(samples, torch.ones(step.stacks.count, dtype=torch.bool))
    wanted = {name: p for name, p in step.stacks.params.items() if p.requires_grad}
    grads = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    return [name for name, grad in zip(wanted, grads, strict=True) if grad is None]


def uses_batch_idx(step: VectorizedStep, samples: Samples) -> bool:
    """Return whether a step depends on ``batch_idx``, as far as a graph of it shows."""
    if not reads_batch_idx(step.module):
        return False
    stacks, rows = step.stacks, torch.arange(2)
    params = {n: p.detach()[:2].clone() for n, p in stacks.params.items()}
    for name, param in params.items():
        param.requires_grad_(stacks.params[name].requires_grad)
    fixed = stacks.fixed if stacks.fixed_is_shared else select(stacks.fixed, rows)
    tensors = (params, select(stacks.buffers, rows), fixed, samples.pair(), None)
    how = {"fixed_is_shared": stacks.fixed_is_shared, "at_once": True}
    with seeded_rng(0):
        return depends_on_batch_idx(step.local, *tensors, **how)
