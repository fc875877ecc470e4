"""State of callbacks, through which clients that train one after another affect each other."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import zip_longest
from types import CodeType, FunctionType
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_fl.hooks import Method, overrides, replaced
from lightning_fl.runners.attributes import FRAMEWORKS, MAX_BYTES, Attributes, left_alone
from lightning_fl.runners.carried import (
    GLOBAL_STEP,
    LATER,
    OF_LIGHTNING,
    OPTIONS,
    GlobalStep,
    Options,
    options_of,
    options_set,
    outcome_of,
)
from lightning_fl.runners.hooked_step import HookedStep
from lightning_fl.runners.step_hooks import CALLBACK_HOOKS
from lightning_fl.runners.tensors import ModuleTensors, is_equal
from lightning_fl.runners.watch import Watch
from lightning_fl.types import Step

#: Packages whose callbacks, and hooks of callbacks, are known.
_KNOWN = {"lightning", "lightning_fl"}
#: Hooks in which a callback may put its own parameters into the global model.
WRITING_HOOKS = (
    *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end"),
)
#: Name in messages of the index of the batch that callbacks get.
BATCH_IDX = "batch_idx"
#: Round, index of the batch, copies of the callbacks and the optimizer's options at the first step
#: of a client.
Moment = tuple[int, int, list[Callback], Options]


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
        self._hooks = {c: hooks for c in trainer.callbacks if (hooks := hooks_of_user(c))}
        #: Whether there is nothing to watch or compare any more.
        self.is_done = not self._hooks
        #: Callbacks that change steps; None before the first client has trained.
        self._acting: list[Callback] | None = None
        self._seen: list[Callback] = []
        #: Callbacks that read the parameters of clients in a hook of a step, and this hook.
        self._readers: dict[Callback, str] = {}
        #: Ends the watch over the first client, and that over what these callbacks write later.
        self._watch = ExitStack()
        #: Round, index of the batch and callbacks at the first step of the client before.
        self._before: Moment | None = None

    def begin_client(self, batch: Any, index: int) -> None:
        """Watch or compare a client, before the hooks of callbacks at its first step.

        Args:
            batch: Its first batch.
            index: Lightning's index of the batch.
        """
        if self._acting is None:
            self._watch.close()  # of a client whose round was interrupted
            for callback, hooks in self._hooks.items():
                for name in hooks:
                    make = self._watched(callback, name)
                    self._watch.enter_context(replaced(callback, name, make))
            return
        round = self._trainer.current_epoch
        now = [own for each in self._acting if (own := self._copied(each)) is not None]
        moment = (round, index, now, options_of(self._trainer))
        if self._before is None or self._before[0] != round or len(now) != len(self._before[2]):
            self._before, self.is_done = moment, not now
            return
        self.is_done, before, self._before = True, self._before, None
        if found := self._found(batch, before, moment):
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
        if self._acting is None:
            self._watch.close()
            self._acting, self.is_done = self._seen, not self._seen
            for callback in self._readers.keys() - set(self._seen):
                for name in WRITING_HOOKS:
                    if overrides(callback, name, Callback):
                        self._watch.enter_context(
                            replaced(callback, name, self._noted(callback, name))
                        )

    def close(self) -> None:
        """End the watch over callbacks."""
        self._watch.close()

    def _noted(self, callback: Callback, name: str) -> Callable[[Method], Method]:
        """Return a function that replaces a hook by one that warns if it writes to parameters.

        A callback that only looks at parameters, such as their norm, has no tensor of their shape.
        """
        shapes = {p.shape for p in self._module.parameters() if p.dim()}

        def make(hook: Method) -> Method:
            def noted(*args: Any) -> Any:
                if callback not in self._readers:
                    return hook(*args)
                params = list(self._module.parameters())
                with Watch({str(i): p for i, p in enumerate(params)}) as watch:
                    result = hook(*args)
                held = _tensors(list(vars(callback).values()), set(map(id, [*params, *args])))
                if watch.written and any(t.shape in shapes for t in held):
                    rank_zero_warn(
                        f"{type(callback).__name__} reads the parameters of clients in"
                        f" {self._readers.pop(callback)} and writes to those of the global model in"
                        f" {name}. Clients train one after another, each from the global"
                        " model, so that a moving average over steps mixes their parameters. Update"
                        " it once per round, in on_train_epoch_end, or use FedOpt"
                    )
                return result

            return noted

        return make

    def _watched(self, callback: Callback, name: str) -> Callable[[Method], Method]:
        """Return a function that replaces a hook by one that notes whether it changes a step."""

        def make(hook: Method) -> Method:
            def watched(*args: Any) -> Any:
                if callback in self._seen:
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
                    self._seen.append(callback)
                return result

            return watched

        return make

    def _state(self) -> list[Any]:
        """Return the parameters and what a hook may replace: gradients, and optimizer options."""
        params = list(self._module.parameters())
        groups = self._trainer.optimizers[0].param_groups
        options = [value for group in groups for name, value in group.items() if name != "params"]
        return [*params, *(p.grad for p in params), *(p.requires_grad for p in params), *options]

    def _copied(self, callback: Callback) -> Callback | None:
        """Return a copy of a callback that logs nothing; None if it is too large or has none."""
        trainer, module = self._trainer, self._module
        known = [trainer, trainer.lightning_module, trainer.datamodule, self._planner]
        known += [*module.modules(), *module.parameters(), *module.buffers(), *trainer.loggers]
        known += [*trainer.optimizers, *(c for c in trainer.callbacks if is_known(type(c)))]
        memo = {id(each): each for each in known}
        held = list(vars(callback).values())
        if sum(t.numel() * t.element_size() for t in _tensors(held, set(memo))) > MAX_BYTES:
            return None
        try:
            own: Callback = copy.deepcopy(callback, memo)
        except Exception:  # an open file, for example
            return None
        vars(own).update(log=_nothing, log_dict=_nothing)
        return own

    def _found(self, batch: Any, before: Moment, now: Moment) -> list[str]:
        """Return the names of values on which the first step of a client depends."""
        (_, index_before, olds, options), (_, index, news, options_now) = before, now
        global_step = GlobalStep(self._module)
        plans = [0]

        def noted(plan: Method) -> Method:
            def made() -> Any:
                plans[0] += 1
                return plan()

            return made

        with left_alone(self._module) as attributes, ExitStack() as stack:
            if not attributes.is_complete:  # a repeated step would change the run
                return []
            for owner in (self._planner, self._trainer.datamodule):
                stack.enter_context(replaced(owner, "plan", noted))

            def result(callbacks: Sequence[Callback], at: int = index, by: int = 0) -> Any:
                attributes.restore()
                copies = [self._copied(each) for each in callbacks]
                self._step.callbacks, self._step.index = [c for c in copies if c is not None], at
                with global_step.moved_by(by):
                    return outcome_of(self._step, self._tensors, batch) or []

            def differs(callbacks: Sequence[Callback], at: int = index, by: int = 0) -> bool:
                found = result(callbacks, at, by)
                return bool(found) and not is_equal(found, expected)

            expected = result(news)
            if not expected or differs(news):  # no loss, or random numbers from elsewhere
                return []
            found, knows_client = list[str](), plans[0] > 0
            if differs(olds):
                mixed = {
                    f"{type(new).__name__}.{name}": [
                        *news[:i],
                        _mixed(new, old, name),
                        *news[i:][1:],
                    ]
                    for i, (new, old) in enumerate(zip(news, olds, strict=True))
                    for name in vars(new).keys() & vars(old).keys() - {"log", "log_dict"}
                }
                found += [name for name, callbacks in mixed.items() if differs(callbacks)]
                found = sorted(found) or [type(new).__name__ for new in news]
            steps = (*LATER, -int(self._trainer.global_step))  # or the first of the fit
            if any(differs(news, by=by) for by in steps):
                expected = result([])
                if not any(differs([], by=by) for by in steps):  # the module itself does not
                    found.append(GLOBAL_STEP)
                expected = result(news)
            if not knows_client and any(differs(news, at=at) for at in (0, index_before)):
                found.append(BATCH_IDX)
            if options != options_now:
                with options_set(self._trainer, options):
                    found += [OPTIONS] if differs(news) else []
        return found


class BatchesOfCallbacks:
    """Warn if callbacks change the steps of a batch of clients that train at once.

    A batch has several local steps, and is one of several groups of clients. A callback could
    change the optimizer's options, or attributes of the module that its methods read.

    Args:
        module: The user's module.
    """

    def __init__(self, module: LightningModule) -> None:
        trainer: Any = module.trainer
        self._module, self._trainer = module, trainer
        #: Names of the user's callbacks by hook of a batch.
        self._names = {
            hook: [
                type(each).__name__
                for each in trainer.callbacks
                if overrides(each, hook, Callback) and not is_known(getattr(each, hook))
            ]
            for hook in ("on_train_batch_start", "on_train_batch_end")
        }
        #: Whether there is nothing to compare any more.
        self.is_done = not any(self._names.values())
        self._before: tuple[Options, dict[str, Any]] = [], {}

    @cached_property
    def _read(self) -> set[str]:
        """Names of the attributes that methods of the module's class mention."""
        return names_in(type(self._module))

    def begin(self) -> None:
        """Note options and attributes, before the hooks of callbacks."""
        self._before = options_of(self._trainer), dict(vars(self._module))

    def end(self, hook: str, step: Step, is_first: bool) -> None:
        """Compare options and attributes, after the hooks of callbacks.

        Args:
            hook: Name of the hook.
            step: The local steps of the batch.
            is_first: Whether it is the first batch of the round, in which attributes may be set for
                the round.
        """
        if not self._names[hook] or len(step.rows) * step.steps <= 1:
            return
        options, attributes = self._before
        pairs = zip(options, options_of(self._trainer), strict=False)
        changed = [
            f"the optimizer's {n}" for old, new in pairs for n in new if new[n] != old.get(n)
        ]
        changed += [
            f"{type(self._module).__name__}.{name}"
            for name, value in vars(self._module).items()
            if not is_first and name not in OF_LIGHTNING
            if not _is_same(value, attributes.get(name, self))
            if name in self._read
        ]
        if not changed:
            return
        self.is_done, what = True, " and ".join(dict.fromkeys(changed))
        rank_zero_warn(
            f"{', '.join(self._names[hook])}: {hook} changes {what}. It is called once for"
            f" {len(step.rows)} clients and {step.steps} local steps, since clients train at once."
            " A value of the round belongs in on_train_epoch_start. For a learning rate that"
            " depends on the local step, use a scheduler with interval='step'. Otherwise, train the"
            " module without VectorizedClients"
        )


def names_in(kind: type) -> set[str]:
    """Return the names of attributes in the code of a class and its bases, without frameworks."""
    classes = [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in FRAMEWORKS]
    members = [inspect.unwrap(m) for each in classes for m in vars(each).values() if callable(m)]
    waiting, found = [m.__code__ for m in members if isinstance(m, FunctionType)], set[str]()
    while waiting:
        code = waiting.pop()
        found.update(code.co_names)
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
    return found


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two attributes are the same object, or equal numbers or texts."""
    is_plain = isinstance(one, int | float | str) and isinstance(other, int | float | str)
    return one is other or (is_plain and one == other)


def hooks_of_user(callback: Callback) -> list[str]:
    """Return the names of the hooks of a step that a user's class of callbacks overrides.

    Hooks of an object, such as those of ``LambdaCallback``, are left out: a copy would share what
    they refer to.
    """
    return [
        name
        for name in CALLBACK_HOOKS
        if name not in vars(callback) and not is_known(getattr(type(callback), name))
    ]


def is_known(part: Any) -> bool:
    """Return whether a class or function is one of Lightning or of this library."""
    return getattr(part, "__module__", "").partition(".")[0] in _KNOWN


def _mixed(new: Callback, old: Callback, name: str) -> Callback:
    """Return a callback with one attribute of another."""
    mixed = copy.copy(new)
    vars(mixed)[name] = vars(old)[name]
    return mixed


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


def _nothing(*args: Any, **options: Any) -> None:
    """Log nothing."""
