"""Choice of vectorized or sequential steps, by checks and timing at the first local step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.runners.attributes import Attributes, left_alone
from lightning_fl.runners.carried import carried, comparison
from lightning_fl.runners.check import mixes_samples, why_not_mapped
from lightning_fl.runners.graphs import (
    can_update,
    depends_on_batch_idx,
    reads_batch_idx,
    sgd_update,
)
from lightning_fl.runners.later_rounds import OF_LIGHTNING, Count, Operations, Switches
from lightning_fl.runners.local_step import gradients_of
from lightning_fl.runners.optimizer_values import rates_scaled
from lightning_fl.runners.samples import Padded, Samples, copied
from lightning_fl.runners.vectorized import VectorizedStep
from lightning_fl.types import FederationError

#: Conservative estimates of the seconds that compiling takes, and of the share of a step that it
#: saves for clients that train at once or one after another.
COMPILING_TAKES, COMPILING_SAVES, COMPILING_ONE_SAVES = 10, 0.5, 0.2
#: Estimates of floating-point operations per second, by type of device.
SPEED = {"cpu": 1e11, "cuda": 1e13}
#: Seconds of timing after which no further trial starts: of clients at once or one after another,
#: and of compiled steps, for which a run must be longer anyway.
LONG, LONG_COMPILED = 1.0, 3.0
#: Number of different steps that are checked in a fit.
MOST_CALLS = 20


def check_state(step: VectorizedStep, samples: Samples) -> None:
    """Check that clients affect each other only through parameters and buffers.

    Args:
        step: The step.
        samples: The samples of a local step.

    Raises:
        FederationError: If a step depends on what an earlier step has set; see :func:`carried`.
    """
    if names := carried(step, samples):
        name = type(step.module).__name__
        raise FederationError(
            f"{name}.training_step depends on values that an earlier step has set"
            f" ({', '.join(names[:3])}). Clients that train at once would share them. Store them in"
            " buffers (register_buffer), which are separate for each client; instead of"
            " global_step, use batch_idx. Or train the module without VectorizedClients"
        )


def check_start(step: VectorizedStep, samples: Samples, first: Attributes) -> None:
    """Check that no step depends on an attribute that ``on_client_start`` sets for one client.

    Args:
        step: The step.
        samples: The samples of the first local step of the clients.
        first: The attributes as ``on_client_start`` has set them for the first client.

    Raises:
        FederationError: If one does; clients that train at once share the attributes of the last.
    """
    names = [name for name in first.changed() if name not in OF_LIGHTNING]
    row = first_row(step, samples)

    def result(*of_first: str) -> list[Tensor]:
        """Return the gradients of a step with some attributes of the first client."""
        with left_alone(step.module):
            first.restore(of_first)
            return list(step.tried(row, samples.client(row)).values())

    if names and (differs := comparison(result)) is not None and differs(*names):
        name = type(step.module).__name__
        raise FederationError(
            f"{name}.training_step depends on {' and '.join(names[:3])}, which on_client_start sets"
            " to another value for each client. Clients that train at once would share it. Store it"
            " in a buffer (register_buffer), or train the module without VectorizedClients"
        )


def check_rates(step: VectorizedStep, samples: Samples) -> None:
    """Train clients one after another if a step reads the learning rate, which differs.

    Clients that train at once share the optimizer, and so the rate that a step finds there.

    Args:
        step: The step of clients with different learning rates.
        samples: The samples of the local step.
    """
    if not step.stacks.maps:
        return
    row, groups = first_row(step, samples), step.optimizer.param_groups
    own, seen = list(groups), [_Group(group) for group in groups]
    groups[:] = seen
    try:
        step.tried(row, samples.client(row))
    finally:
        groups[:] = own
    if any(group.is_read for group in seen):
        step.stacks.train_one_by_one()
        rank_zero_warn(
            f"{type(step.module).__name__} is trained one client after another, not at once:"
            " training_step reads the optimizer's learning rate, which differs between clients"
        )


class _Group(dict[str, Any]):
    """A parameter group that notes whether its learning rate is read."""

    is_read = False

    def __getitem__(self, key: str) -> Any:
        self.is_read |= key == "lr"
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.is_read |= key == "lr"
        return super().get(key, default)


def check_mapping(step: VectorizedStep, samples: Samples) -> None:
    """Check vectorized steps once more; if they are wrong, train clients one after another.

    Args:
        step: The step.
        samples: The samples of a local step. Some cannot be stacked, and are not checked.
    """
    if not step.stacks.maps or samples.why_not_stacked():
        return
    if why := why_not_mapped(step, samples.pair()):
        step.stacks.train_one_by_one()
        rank_zero_warn(
            f"{type(step.module).__name__} is trained one client after another from here on, not at"
            f" once: {why}"
        )
    elif isinstance(samples, Padded) and step.weighted and int(samples.sizes.max()) > 1:
        step.weighted = not mixes_samples(step, samples.tensors)


class Changes:
    """Tell whether a step may do something that it has not done when it was checked.

    A module may begin with something after a warm-up. Then attributes have changed since the last
    round, or a step that reads the round calls other functions of torch.

    Args:
        step: The step.
    """

    def __init__(self, step: VectorizedStep) -> None:
        self._step, self._switches = step, Switches(step.module)
        #: Whether a step reads the round.
        self.current_round = Count(step.module, "current_epoch")
        self._round, self._known = -1, set[tuple[Any, ...]]()

    def are_found(self, samples: Samples) -> bool:
        """Return whether there are changes since the last call.

        Args:
            samples: The samples of the first local step of the clients.
        """
        return self._switches.have_changed() or self._calls_others(samples)

    def _calls_others(self, samples: Samples) -> bool:
        before, self._round = self._round, self._step.module.current_epoch
        is_same = before == self._round or not self.current_round.is_read
        if is_same or len(self._known) >= MOST_CALLS:
            return False
        row = first_row(self._step, samples)
        with Operations() as operations:
            self._step.tried(row, samples.client(row))
        is_new = (calls := tuple(operations.calls)) not in self._known
        self._known.add(calls)
        return is_new


def tune(
    step: VectorizedStep,
    samples: Samples,
    is_timed: bool,
    compile: bool | Literal["auto"],
    steps: float,
) -> None:
    """Check that vectorized steps agree with the module's own, and choose the fastest way to train.

    Args:
        step: The step; the choices are stored in it.
        samples: The samples of the first local step.
        is_timed: Whether to choose the faster of vectorized and sequential steps by timing.
        compile: Whether to compile. ``auto`` compiles if the run is long enough for it to pay.
        steps: Number of remaining local steps of all clients at once.

    Raises:
        FederationError: See :func:`check_state`.
    """
    name, stacks = type(step.module).__name__, step.stacks
    check_state(step, samples)
    why = samples.why_not_stacked() or why_not_mapped(step, samples.pair())
    if why is not None:
        stacks.train_one_by_one()
        rank_zero_warn(f"{name} is trained one client after another, not at once: {why}")
        return
    if isinstance(samples, Padded) and step.weighted:
        step.weighted = not mixes_samples(step, samples.tensors)
    if is_timed:
        with _put_back(step):
            mapped, one_by_one = (
                seconds(partial(trial, step, samples, at_once=way)) for way in (True, False)
            )
        if one_by_one < mapped:
            stacks.train_one_by_one()
    may_compile = compile is not False and (stacks.at_once or can_compile_one(step))
    if may_compile and compile == "auto":
        speed = SPEED.get(stacks.first.device.type, SPEED["cpu"])
        work = operations(step, samples) / speed
        may_compile = compiling_pays(work, steps, stacks.at_once)
    if may_compile and (why := why_not_compiled(step, samples)) is not None:
        rank_zero_warn(f"the vectorized step is not compiled: {why}")
    elif may_compile and stacks.at_once:
        step.compile()
    elif may_compile:
        try_one(step, samples)
    how = "at once" if stacks.at_once else "one after another, which is faster"
    compiled = ", compiled" * (step.graphs is not None or step.side_by_side is not None)
    rank_zero_info(f"{name}: {stacks.count} clients {how}{compiled}")


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
    row = first_row(step, samples)
    with FlopCounterMode(display=False) as counter:
        step.tried(row, samples.client(row))
    return float(counter.get_total_flops()) * step.stacks.count


def first_row(step: VectorizedStep, samples: Samples) -> int:
    """Return the first client that makes a local step."""
    return next(i for i in range(step.stacks.count) if samples.client(i) is not None)


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
    if unused := unused_parameters(step, samples):
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


def unused_parameters(step: VectorizedStep, samples: Samples) -> list[str]:
    """Return the names of the parameters that get no gradient in a step."""
    with step.undone():
        everyone = torch.ones(step.stacks.count, dtype=torch.bool)
        total, _ = step.mapped(copied(samples), everyone, updates=False)
    return step.unused(gradients_of(total, step.stacks.params))


def uses_batch_idx(step: VectorizedStep, samples: Samples) -> bool:
    """Return whether the graph of a step depends on ``batch_idx``."""
    if not reads_batch_idx(step.module):
        return False
    own = step.stacks.leaves(lambda t: t[:2].clone())
    with seeded_rng(0, step.module.device):
        return depends_on_batch_idx(
            step.local, **own, batch=copied(samples.pair()), weight=None, at_once=True
        )
