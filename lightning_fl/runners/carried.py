"""State outside of parameters and buffers, through which clients affect each other's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.hooks import attributes_set
from lightning_fl.runners.attributes import Attributes, left_alone, names_in
from lightning_fl.runners.hooked_step import HookedStep
from lightning_fl.runners.later_rounds import LATER, OF_LIGHTNING, Count, Switches
from lightning_fl.runners.local_step import LocalStep
from lightning_fl.runners.optimizer_values import Options, options_of, options_set
from lightning_fl.runners.samples import Samples, copied
from lightning_fl.runners.step_hooks import HOOKS_AFTER_TRANSFER, hooks_of
from lightning_fl.runners.tensors import ModuleTensors, is_equal
from lightning_fl.runners.vectorized import VectorizedStep

#: Name of the Trainer's count of steps in messages.
GLOBAL_STEP = "trainer.global_step"
#: Name of the options of the optimizer in messages.
OPTIONS = "the optimizer's options"


def carried(step: VectorizedStep, samples: Samples) -> list[str]:
    """Return the values through which a step of one client affects that of another.

    A client's first and second step are made twice from the current attributes, and once with a
    step of another client before the last one, each time on the same tensors, batch and random
    numbers. In a group of one client, the other one has the same batch, but other parameters. Only
    the returned losses and gradients are compared, so that a list of losses for the end of an epoch
    is allowed. Steps have the right ``batch_idx``, since a module may reset its state if it is 0.
    A step that reads the Trainer's ``global_step`` is repeated with other values.

    Args:
        step: The step; its clients and its module are not changed.
        samples: The samples of the local step.

    Returns:
        The names of all attributes that a step changes, if another step depends on them,
        ``trainer.global_step``, or the optimizer's options if each step moves them. The list is
        empty if a step depends on none, or if it draws from random generators other than torch's.
    """
    module, at = step.module, step.local.batch_idx
    one, other, *_ = [i for i in range(step.stacks.count) if samples.client(i) is not None] * 2
    first, second, between = (other, 0, False), (other, 1, False), (one, 0, True)
    global_step = Count(module, "global_step")

    def results(*steps: tuple[int, int, bool]) -> list[Tensor]:
        """Return loss and gradients of the last of some steps.

        Args:
            steps: The client, its step, and whether its parameters are perturbed.
        """
        attributes.restore()
        for client, number, is_perturbed in steps:
            batch = copied(samples.client(client))
            step.local.batch_idx = at + number
            with (
                seeded_rng(0, module.device),
                step.stacks.untouched(),
                step.stacks.client(client),
                torch.enable_grad(),
            ):
                for param in module.parameters():
                    if is_perturbed and param.requires_grad:
                        param.data.mul_(1 + 2**-6)
                outcome, grads = step.local.by_itself({}, batch)
        return [outcome.loss.detach(), *grads.values()]

    with left_alone(module) as attributes:
        try:
            after = list[Options]()  # an option may be set anew in each step, but not moved
            optimizer = module.trainer.optimizers[0]
            with options_set(optimizer, options_of(optimizer)):
                for _ in range(2):
                    results(first)
                    after.append(options_of(optimizer))
            if after[0] != after[1]:
                return [OPTIONS]
            for alone in ([first, second], [first]):
                with global_step.noted():
                    expected, names = results(*alone), attributes.changed()
                if not (names or global_step.is_read) or not is_equal(expected, results(*alone)):
                    return []
                if names and not is_equal(expected, results(*alone[:-1], between, alone[-1])):
                    return names
                for steps in LATER if global_step.is_read else ():
                    with global_step.moved_by(steps):
                        if not is_equal(expected, results(*alone)):
                            return [GLOBAL_STEP]
        finally:
            step.local.batch_idx = at
    return []


class State(NamedTuple):
    """Hold what clients that train one after another share.

    Args:
        attributes: Plain attributes of the module.
        options: Options of the optimizer.
        trained: Names of the parameters that require a gradient.
    """

    attributes: Attributes
    options: Options
    trained: set[str]


class CarriedState:
    """Warn if the steps of a client depend on what the client before has left behind.

    Clients that train one after another share the module. Its parameters and buffers are loaded
    for each client, but its plain attributes and the Trainer's ``global_step`` go on. At the first
    step of the second client of the fit, the step and the hooks of the module in it are repeated
    with the attributes at the first step of the first client, and with other values of
    ``global_step``, from the same tensors, batch and random numbers. If losses, gradients or what
    hooks set differ, a warning names the attributes. Without hooks in it, a step is repeated only
    if the first client has changed attributes or read ``global_step``. Clients are compared again
    in each round if a step reads ``current_epoch``, and after attributes were set between rounds.

    Args:
        tensors: The tensors of the user's module.
    """

    def __init__(self, tensors: ModuleTensors) -> None:
        self.tensors, self.module = tensors, tensors.module
        #: Hooks of the module in a step, which are a part of it.
        self.hooks = [name for name in HOOKS_AFTER_TRANSFER if name in hooks_of(self.module)]
        self._step = (HookedStep if self.hooks else LocalStep)(self.module, tensors.constants)
        #: Whether the second client has been compared.
        self.is_done = False
        #: The first client.
        self._first: int | None = None
        #: The state at the first step of this client, and after its training.
        self._before: State | None = None
        self._after: State | None = None
        self._global_step = Count(self.module, "global_step")
        self._round = Count(self.module, "current_epoch")
        self._switches, self._has_warned = Switches(self.module), False
        #: Whether hooks of a step may read ``current_epoch``.
        self._is_by_round = bool(self.hooks) and "current_epoch" in names_in(type(self.module))
        #: Whether ``training_step`` sets options.
        self._sets_options = False

    def begin_round(self) -> None:
        """Compare clients once more if a step may do something that it has not done before."""
        has_changed = self._switches.have_changed() or self._round.is_read or self._is_by_round
        if has_changed and self.is_done and not self._has_warned:
            self.is_done, self._first = False, None

    @contextmanager
    def first_step(self, client: int, batch: Any) -> Iterator[None]:
        """Watch the first step of a client, which begins within a ``with`` block.

        Args:
            client: The client.
            batch: Its batch.
        """
        if self._first is None:
            self._first, self._before, self._after = client, self._snapshot(), None
            with self._global_step.noted(), self._round.noted():
                yield
            now = options_of(self.module.trainer.optimizers[0])
            if not self.hooks and now != self._before.options:
                self._sets_options = True
                self._step = HookedStep(self.module, self.tensors.constants)
        elif client == self._first:  # in a later round, or an optimizer repeats the step
            yield
        else:
            self.is_done = True
            if names := self._found(batch):
                self._has_warned, where = True, " or ".join(["training_step", *self.hooks])
                rank_zero_warn(
                    f"{type(self.module).__name__}.{where} depends on"
                    f" {' and '.join(names[:3])}, which carries over from client to client, so that"
                    " results depend on the order of clients. Store such a value in a buffer"
                    " (register_buffer), or set it in on_client_start; instead of global_step, use"
                    " batch_idx (the local step of the client) or current_epoch (the round), and a"
                    " scheduler with interval='step' for learning rates"
                )
            self._before = self._after = None
            yield

    def end_client(self) -> None:
        """Record the state after the training of the first client."""
        if self._before is not None and self._after is None:
            self._after = self._snapshot()

    def _snapshot(self) -> State:
        module = self.module
        options = options_of(module.trainer.optimizers[0])
        return State(Attributes(module), options, trained_by(module))

    def _found(self, batch: Any) -> list[str]:
        """Return the names of values on which the first step of the second client depends."""
        assert self._before is not None
        assert self._after is not None
        before, options, trained = self._before
        after, options_after, trained_after = self._after
        trainer = self.module.trainer
        is_switched = trained_by(self.module) == trained_after != trained
        set_since = {*after.changed(), *OF_LIGHTNING}  # for this client, or in each step
        changed = [name for name in before.changed() if name not in set_since]
        may_count = self._global_step.is_read or bool(self.hooks) or self._sets_options
        if not changed and not may_count and not is_switched:
            return []
        with left_alone(self.module) as now:
            if not now.is_complete:  # a repeated step would change the run
                return []

            def result(*names: str, by: int = 0) -> list[Tensor]:
                """Make the step with some attributes from before, and a later ``global_step``."""
                now.restore()
                before.restore(names)
                with self._global_step.moved_by(by):
                    return outcome_of(self._step, self.tensors, batch)

            if (differs := comparison(result)) is None:
                return []
            found = list[str]()
            if changed and differs(*changed):
                found += [name for name in changed if differs(name)] or changed
            steps = (*LATER, -int(trainer.global_step))  # or the first of the fit
            if may_count and any(differs(by=by) for by in steps):
                found.append(GLOBAL_STEP)
            # Those that a scheduler or a hook has set for this client are not carried over.
            is_carried = options_of(trainer.optimizers[0]) == options_after != options
            if self._sets_options or (self.hooks and is_carried):
                with options_set(trainer.optimizers[0], options):
                    found += [OPTIONS] * differs()
            if is_switched:
                with only_trained(self.module, trained):
                    names = [f"{name}.requires_grad" for name in sorted(trained ^ trained_after)]
                    found += names * differs()
        return found


def comparison(result: Callable[..., list[Tensor]]) -> Callable[..., bool] | None:
    """Return a function that tells whether a step with some arguments has another result.

    Args:
        result: Function that makes the step, and returns what follows from it; empty if it fails.

    Returns:
        The function. None if the step fails, or if its results always differ, as by random numbers
        from elsewhere.
    """
    expected = result()

    def differs(*args: Any, **options: Any) -> bool:
        changed = result(*args, **options)
        return bool(changed) and not is_equal(changed, expected)

    return None if not expected or differs() else differs


def outcome_of(step: LocalStep, own: ModuleTensors, batch: Any) -> list[Tensor]:
    """Return what follows from a step that is made for a comparison; empty if it fails.

    Tensors of the module and whether they are trained are restored, and loggers are silent.

    Args:
        step: The step.
        own: The tensors of the user's module.
        batch: The batch, of which the step gets a copy.
    """
    module = step.module
    before = {name: tensor.detach().clone() for name, tensor in own.by_name.items()}
    try:
        muted = attributes_set(module.trainer, {"_loggers": [DummyLogger()]})
        restored = only_trained(module, trained_by(module))
        with seeded_rng(0, module.device), torch.enable_grad(), muted, restored:
            outcome, seen = step.by_itself({}, copied(batch))
    except Exception:  # if it fails with the current attributes, the step itself will, too
        return []
    finally:
        own.adopt()  # buffers that the step has replaced
        for name, tensor in own.by_name.items():
            tensor.data.copy_(before[name])
    return [outcome.loss, *seen.values()]


def trained_by(module: LightningModule) -> set[str]:
    """Return the names of the parameters that require a gradient."""
    return {name for name, param in module.named_parameters() if param.requires_grad}


@contextmanager
def only_trained(module: LightningModule, names: set[str]) -> Iterator[None]:
    """Let only the given parameters require a gradient within a ``with`` block."""
    before = [(param, param.requires_grad) for param in module.parameters()]
    try:
        for name, param in module.named_parameters():
            param.requires_grad = name in names
        yield
    finally:
        for param, requires_grad in before:
            param.requires_grad = requires_grad
