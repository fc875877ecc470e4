"""State of callbacks, through which clients that train one after another affect each other."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_fl.hooks import Method, attributes_set, overrides, replaced
from lightning_fl.runners.attributes import MAX_BYTES, Attributes, left_alone
from lightning_fl.runners.carried import (
    GLOBAL_STEP,
    OPTIONS,
    comparison,
    outcome_of,
)
from lightning_fl.runners.hooked_step import HookedStep
from lightning_fl.runners.later_rounds import LATER, OF_LIGHTNING, Count
from lightning_fl.runners.optimizer_values import Options, options_of, options_set
from lightning_fl.runners.step_hooks import hooks_of_user, is_known
from lightning_fl.runners.tensors import ModuleTensors, is_equal
from lightning_fl.runners.watch import Watch

#: Hooks in which a callback may put its own parameters into the global model.
WRITING_HOOKS = (
    *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end"),
)
#: Name in messages of the index of the batch that callbacks get.
BATCH_IDX = "batch_idx"
#: What callbacks find at the first step of a client: the round, Lightning's index of the batch, the
#: optimizer's options, and copies of the callbacks themselves.
Start = tuple[int, int, Options, list[Callback]]


class CarriedByCallbacks:
    """Warn if callbacks carry something from one client to the next that changes its steps.

    While the first client trains, the hooks of the user's callbacks are watched. Most only look at
    a step, and are left alone. Those that write to parameters, buffers, gradients, the batch, the
    optimizer's options or attributes of the module are compared at the first step of a later
    client: the step is repeated with copies of them, from now and from the client before in the
    same round, and with other values of ``global_step`` and ``batch_idx``. If losses, gradients or
    what hooks set differ, a warning names the attributes.

    Args:
        tensors: The tensors of the user's module.
        planner: Object whose method ``plan`` returns the plan of the round, as that of the data
            module. Callbacks that call it know the client.
    """

    def __init__(self, tensors: ModuleTensors, planner: Any) -> None:
        self._tensors, self._module, self._planner = tensors, tensors.module, planner
        trainer: Any = tensors.module.trainer
        self._trainer = trainer
        self._step = HookedStep(tensors.module, tensors.constants)
        self._callbacks = [each for each in trainer.callbacks if hooks_of_user(each)]
        #: Whether there is nothing to watch or compare any more.
        self.is_done = not self._callbacks
        #: Whether the first client has trained.
        self._has_watched = False
        #: Callbacks that change steps.
        self._acting: list[Callback] = []
        #: Callbacks that read the parameters of clients in a hook of a step, and this hook.
        self._readers: dict[Callback, str] = {}
        #: Ends the watch over the first client, and that over what these callbacks write later.
        self._watch = ExitStack()
        #: The start of the client before.
        self._before: Start | None = None

    def begin_client(self, batch: Any, index: int) -> None:
        """Watch or compare a client, before the hooks of callbacks at its first step.

        Args:
            batch: Its first batch.
            index: Lightning's index of the batch.
        """
        if self.is_done:
            return
        if not self._has_watched:
            self._watch.close()  # of a client whose round was interrupted
            for callback in self._callbacks:
                for name in hooks_of_user(callback):
                    watched = partial(self._watched, callback, name)
                    self._watch.enter_context(replaced(callback, name, watched))
            return
        round, options = self._trainer.current_epoch, options_of(self._trainer.optimizers[0])
        now = (round, index, options, self._copied(self._acting))
        before, self._before = self._before, now
        if before is None or before[0] != round:
            return
        self.is_done, self._before = True, None
        if found := self._found(batch, before, now):
            kinds = dict.fromkeys(type(each).__name__ for each in self._acting)
            rank_zero_warn(
                f"local steps depend on {' and '.join(found[:3])} by hooks of the callbacks"
                f" {', '.join(kinds)}, which carries over from client to client, so that results"
                " depend on the order of clients. Reset such a value at the first step of each"
                " client: FederatedLoop.plan().schedule[batch_idx].first. There, start is the local"
                " step of the client, for use instead of batch_idx and global_step"
            )

    def end_client(self) -> None:
        """End the watch over the first client."""
        if self._has_watched:
            return
        self._has_watched = True
        self._watch.close()
        for callback in self._readers.keys() - set(self._acting):
            for name in WRITING_HOOKS:
                if overrides(callback, name, Callback):
                    checked = partial(self._checked, callback, name)
                    self._watch.enter_context(replaced(callback, name, checked))
        self._acting = [each for each in self._acting if self._copied([each])]
        self.is_done = not self._acting

    def close(self) -> None:
        """End the watch over callbacks."""
        self._watch.close()

    def _watched(self, callback: Callback, name: str, hook: Method) -> Method:
        """Return a hook that notes whether it changes a step, or reads the parameters."""

        def watched(*args: Any) -> Any:
            if callback in self._acting:
                return hook(*args)
            num_params = sum(1 for _ in self._module.parameters())
            state, attributes = self._state(), Attributes(self._module)
            leaves = [*state, *self._module.buffers(), *tree_leaves(args[2:])]
            tensors = {str(i): t for i, t in enumerate(leaves) if isinstance(t, Tensor)}
            with Watch(tensors) as watch:
                result = hook(*args)
            if watch.read & {str(i) for i in range(num_params)}:
                self._readers.setdefault(callback, name)
            is_same = all(a is b for a, b in zip_longest(state, self._state(), fillvalue=self))
            if watch.written or not is_same or set(attributes.changed()) - OF_LIGHTNING:
                self._acting.append(callback)
            return result

        return watched

    def _checked(self, callback: Callback, name: str, hook: Method) -> Method:
        """Return a hook that warns if it writes to parameters.

        A callback that only looks at parameters, such as their norm, has no tensor of their shape.
        """

        def checked(*args: Any) -> Any:
            if callback not in self._readers:  # it has been warned of
                return hook(*args)
            params = list(self._module.parameters())
            with Watch({str(i): p for i, p in enumerate(params)}) as watch:
                result = hook(*args)
            shapes = {p.shape for p in params if p.dim()}
            held = _tensors([callback], set(map(id, [*params, *args])))
            if watch.written and any(t.shape in shapes for t in held):
                rank_zero_warn(
                    f"{type(callback).__name__} reads the parameters of clients in"
                    f" {self._readers.pop(callback)} and writes to those of the global model in"
                    f" {name}. Clients train one after another, each from the global"
                    " model, so that a moving average over steps mixes their parameters. Update"
                    " it once per round, in on_train_epoch_end, or use FedOpt"
                )
            return result

        return checked

    def _state(self) -> list[Any]:
        """Return the parameters and what a hook may replace: gradients, and optimizer options."""
        params = list(self._module.parameters())
        groups = self._trainer.optimizers[0].param_groups
        options = [value for group in groups for name, value in group.items() if name != "params"]
        return [*params, *(p.grad for p in params), *(p.requires_grad for p in params), *options]

    def _copied(self, callbacks: Sequence[Callback]) -> list[Callback]:
        """Return copies of callbacks that log nothing; none if they are too large or have none."""
        shared = shared_by_copies(self._trainer, self._module, self._planner)
        size = sum(t.numel() * t.element_size() for t in _tensors(callbacks, set(shared)))
        return [] if size > MAX_BYTES else silent_copies(callbacks, shared)

    def _found(self, batch: Any, before: Start, now: Start) -> list[str]:
        """Return the names of values on which the first step of a client depends."""
        (_, index_before, options, olds), (_, index_now, options_now, news) = before, now
        global_step, plans = Count(self._module, "global_step"), list[int]()

        def noted(plan: Method) -> Method:
            def made() -> Any:
                plans.append(0)
                return plan()

            return made

        with left_alone(self._module) as attributes, ExitStack() as stack:
            if not attributes.is_complete or not olds or not news:
                return []  # a step cannot be repeated without changing the run
            for owner in (self._planner, self._trainer.datamodule):
                stack.enter_context(replaced(owner, "plan", noted))

            def result(
                callbacks: Sequence[Callback] = news, index: int = index_now, by: int = 0
            ) -> list[Tensor]:
                """Make the step with callbacks, their ``batch_idx`` and a later ``global_step``."""
                attributes.restore()
                self._step.callbacks, self._step.index = self._copied(callbacks), index
                with global_step.moved_by(by):
                    return outcome_of(self._step, self._tensors, batch)

            if (differs := comparison(result)) is None:
                return []
            found, knows_client = list[str](), bool(plans)
            if differs(olds):
                for new, old in zip(news, olds, strict=True):
                    for name, value in vars(old).items():
                        if name in vars(new) and value is not vars(new)[name]:
                            with attributes_set(new, {name: value}):
                                found += [f"{type(new).__name__}.{name}"] * differs()
                found = found or [type(new).__name__ for new in news]
            steps = (*LATER, -int(self._trainer.global_step))  # or the first of the fit
            if any(differs(by=by) for by in steps):
                alone = result([])
                if all(is_equal(alone, result([], by=by)) for by in steps):  # not by the module
                    found.append(GLOBAL_STEP)
            if not knows_client and any(differs(index=at) for at in (0, index_before)):
                found.append(BATCH_IDX)
            if options != options_now:
                with options_set(self._trainer.optimizers[0], options):
                    found += [OPTIONS] * differs()
        return found


def shared_by_copies(trainer: Any, module: LightningModule, *others: Any) -> dict[int, Any]:
    """Return what copies of callbacks share with the originals, by ``id``.

    Args:
        trainer: The Trainer.
        module: The module.
        others: Other objects that are shared.
    """
    shared = [trainer, trainer.lightning_module, trainer.datamodule, *others, *trainer.loggers]
    shared += [*trainer.optimizers, *(c for c in trainer.callbacks if is_known(type(c)))]
    for part in module.modules():
        shared += [part, *part._parameters.values(), *part._buffers.values()]
    return {id(each): each for each in shared}


def silent_copies(callbacks: Sequence[Callback], shared: dict[int, Any]) -> list[Callback]:
    """Return copies of callbacks that log nothing; none if they cannot be copied.

    Args:
        callbacks: The callbacks.
        shared: What the copies share with them, by ``id``.
    """
    try:
        copies = copy.deepcopy(list(callbacks), dict(shared))
    except Exception:  # an open file, for example
        return []
    for each in copies:
        vars(each).update(log=nothing, log_dict=nothing)
    return copies


def _tensors(values: Sequence[Any], seen: set[int]) -> list[Tensor]:
    """Return the tensors in values, containers, modules and objects."""
    waiting, found = list(values), list[Tensor]()
    while waiting:
        if id(value := waiting.pop()) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            waiting += vars(value).values()
    return found


def nothing(*args: Any, **options: Any) -> None:
    """Log nothing."""
