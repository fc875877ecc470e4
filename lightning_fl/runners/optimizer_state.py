"""The complete state of an optimizer, which is reset for each client or kept per client."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fl.runners.optimizer_values import (
    around_steps,
    holds_tensors,
    mark,
    may_depend_on,
    may_learn,
    params_of,
    with_inner,
)
from lightning_fl.types import FederationError

Rows = Mapping[str, Tensor]
#: Location of values: the index of the optimizer, the kind of the place, and its index.
Place = tuple[int, str, int]

#: Prefixes of the names that :meth:`OptimizerState.rows` returns.
OPTIMIZER_ROWS = ("optimizer.", "learned.", "number.")
NUMBERS = (bool, int, float)
_ABSENT = object()


class OptimizerState:
    """Track, reset, save and restore the complete state of an optimizer.

    The optimizers of ``torch.optim`` store it in ``state``. Others also store counters and
    estimates in parameter groups, in attributes, or in an inner optimizer (Lookahead). An entry
    that changes inside ``step`` belongs to the state and is called learned: a new client starts
    from the value that was last set outside ``step``. Entries that only schedulers, callbacks and
    modules change are not touched.

    Args:
        optimizer: The optimizer, before its first step.

    Raises:
        FederationError: If the optimizer copies its parameters before its first step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.optimizers = with_inner(optimizer)
        #: Whether ``state`` holds everything, so that no other place needs tracking.
        self.is_simple = f"{type(optimizer).__module__}.".startswith("torch.optim.")
        #: Keys that changed inside a step, by place.
        self.learned: dict[Place, set[str]] = {}
        #: Examples of learned values outside ``state``; empty if clients keep no state.
        self.kept: dict[str, Tensor] = {}
        #: Values that were last set outside a step.
        self.set_outside: dict[Place, dict[str, Any]] = {}
        self._marks: dict[Place, dict[str, Any]] = {}
        #: Entries of ``state`` before the first step.
        self._initial: dict[Place, dict[str, Any]] = {}
        if self.is_simple:
            return
        for place, param, entries in self.states():
            if place[1] != "state":
                raise FederationError(not_fresh(optimizer, "state that belongs to no parameter"))
            for name, value in entries.items():
                if isinstance(value, Tensor) and may_depend_on(value, param):
                    raise FederationError(
                        not_fresh(optimizer, f"{name}, a copy of its parameters, from the start")
                    )
            self._initial[place] = {name: self._copied(value) for name, value in entries.items()}
        self.before_step()

    # --- steps ------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Copy all values that were set since the last step."""
        if self.is_simple:
            return
        places = dict(self.places())
        for place, keys in self._changes().items():
            outside = self.set_outside.setdefault(place, {})
            for key in keys:
                if key in places[place]:
                    outside[key] = self._copied(places[place][key])
                else:
                    outside.pop(key, None)

    def after_step(self) -> None:
        """Record the entries that the step changed."""
        if self.is_simple:
            return
        for place, keys in self._changes().items():
            if keys:
                self.learned.setdefault(place, set()).update(keys)

    def watch(self) -> Callable[[], None]:
        """Start to record the changes of steps; return a function that stops it."""
        return around_steps(
            self.optimizer, lambda *_: self.before_step(), lambda *_: self.after_step()
        )

    def reset(self) -> None:
        """Restore the state before the first step."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
        if self.is_simple:
            return
        self._restore_state()
        for place, key, entries in self._learned_entries():
            value = self.set_outside.get(place, {}).get(key, _ABSENT)
            _put(entries, key, value if value is _ABSENT else self._copied(value))
        self._marks = self._current_marks()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Restore the current state at the end of a ``with`` block."""
        states = [dict(optimizer.state) for optimizer in self.optimizers]
        values = [
            (entries, key, entries.get(key, _ABSENT)) for _, key, entries in self._learned_entries()
        ]
        try:
            yield
        finally:
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.state.update(state)
            for entries, key, value in values:
                _put(entries, key, value)
            if not self.is_simple:
                self._marks = self._current_marks()

    def _changes(self) -> dict[Place, list[str]]:
        """Return the keys whose values changed since the last call, by place."""
        before, self._marks = self._marks, self._current_marks()
        changes = {}
        for place, now in self._marks.items():
            then = before.get(place, {})
            keys = [key for key, value in now.items() if then.get(key, _ABSENT) != value]
            changes[place] = [*keys, *(then.keys() - now.keys())]
        return changes

    def _current_marks(self) -> dict[Place, dict[str, Any]]:
        own = {id(p) for p in params_of(self.optimizer)}
        return {
            place: {k: mark(value, own) for k, value in values.items() if may_learn(k, place[1])}
            for place, values in self.places()
        }

    # --- state kept per client --------------------------------------------------------------------

    def rows(self) -> dict[str, Tensor]:
        """Return the state as tensors, by name.

        Names are ``optimizer.<parameter>.<name>`` for the optimizer's ``state`` of a parameter,
        ``learned.<optimizer>.<kind>.<index>.<name>`` for other tensors, and
        ``number.<optimizer>.<kind>.<index>.<name>`` for other numbers.

        Raises:
            FederationError: If a value is neither a tensor nor a number.
        """
        rows: dict[str, Tensor] = {}
        for (which, kind, index), _, entries in self.states():
            for name, value in entries.items():
                if kind == "other":
                    raise FederationError(not_kept(self.optimizer, "state without a parameter"))
                if which == 0 and isinstance(value, Tensor):
                    rows[f"optimizer.{index}.{name}"] = value
                elif value is not None:
                    rows |= self._row((which, kind, index), name, value)
        for place, key, entries in self._learned_entries():
            if key in entries:
                rows |= self._row(place, key, entries[key])
        return rows

    def _row(self, place: Place, key: str, value: Any) -> dict[str, Tensor]:
        name = ".".join((*map(str, place), key))
        if isinstance(value, Tensor):
            return {f"learned.{name}": value.detach()}
        if isinstance(value, NUMBERS):
            dtype = torch.float64 if isinstance(value, float) else None
            return {f"number.{name}": torch.tensor(value, dtype=dtype)}
        raise FederationError(not_kept(self.optimizer, f"{key}, which is not a tensor"))

    def load(self, rows: Rows) -> None:
        """Load the tensors of :meth:`rows` into an optimizer that was reset."""
        params = [(p, group) for group in self.optimizer.param_groups for p in group["params"]]
        places = dict(self.places())
        for name, row in rows.items():
            kind_of_row, _, rest = name.partition(".")
            if kind_of_row == "optimizer":
                index, _, key = rest.partition(".")
                param, group = params[int(index)]
                # As in load_state_dict: step counters stay on the CPU, unless the step is fused.
                on_device = any(group.get(flag) is True for flag in ("capturable", "fused"))
                device = param.device if row.ndim or on_device else row.device
                self.optimizer.state[param][key] = row.to(device, copy=True, non_blocking=True)
            elif kind_of_row in ("learned", "number"):
                which, kind, index, key = rest.split(".", 3)
                place = (int(which), kind, int(index))
                if kind == "state":
                    like: Any = params[int(index)][0]
                    entries: Any = self.optimizers[place[0]].state[like]
                else:
                    entries = places[place]
                    like = entries.get(key, row)
                    self.learned.setdefault(place, set()).add(key)
                if kind_of_row == "number":
                    entries[key] = row.item()
                else:
                    on_cpu = kind == "state" and not row.ndim
                    entries[key] = row.to(row.device if on_cpu else like.device, copy=True)
        if not self.is_simple:
            self._marks = self._current_marks()

    # --- places -----------------------------------------------------------------------------------

    def states(self) -> Iterator[tuple[Place, Any, dict[str, Any]]]:
        """Yield the place, the parameter and the entries of each parameter state."""
        order = {id(p): i for i, p in enumerate(params_of(self.optimizer))}
        for which, optimizer in enumerate(self.optimizers):
            if any(optimizer.state is other.state for other in self.optimizers[:which]):
                continue
            for i, (param, entries) in enumerate(optimizer.state.items()):
                is_known = id(param) in order and isinstance(entries, dict)
                kind, index = ("state", order[id(param)]) if is_known else ("other", i)
                yield (which, kind, index), param, entries if is_known else {"state": entries}

    def places(self) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Yield the other places of learned values: attributes and parameter groups."""
        seen = set()
        for which, optimizer in enumerate(self.optimizers):
            yield (which, "attribute", 0), vars(optimizer)
            for i, group in enumerate(optimizer.param_groups):
                if id(group) not in seen:  # an outer optimizer shares groups with its inner one
                    seen.add(id(group))
                    yield (which, "group", i), group

    def learned_keys(self) -> list[tuple[Place, str]]:
        """Return the place and key of each learned entry outside ``state``."""
        return [(place, key) for place, keys in self.learned.items() for key in sorted(keys)]

    def _learned_entries(self) -> list[tuple[Place, str, dict[str, Any]]]:
        places = dict(self.places())
        return [(at, key, places[at]) for at, key in self.learned_keys() if at in places]

    def _copied(self, value: Any) -> Any:
        """Return a copy that shares the parameters, modules and optimizers of the original."""
        memo: dict[int, Any] = {id(p): p for p in params_of(self.optimizer)}
        memo |= {id(optimizer): optimizer for optimizer in self.optimizers}
        if isinstance(value, nn.Module):
            return value
        try:
            return copy.deepcopy(value, memo)
        except Exception:  # locks, file handles and tensors of a graph raise different kinds
            return value

    def _restore_state(self) -> None:
        """Fill the empty states with their values before the first step."""
        params = params_of(self.optimizer)
        for (which, _, index), entries in self._initial.items():
            param = params[index]
            for name, value in entries.items():
                entry = self._copied(value)
                if isinstance(value, Tensor) and value.ndim:  # all entries equal: may_depend_on
                    entry = torch.full_like(param, value.flatten()[0].item(), dtype=value.dtype)
                self.optimizers[which].state[param][name] = entry

    # --- copies for trials ------------------------------------------------------------------------

    def replica(
        self, convert: Callable[[Tensor], Tensor], every: bool = False
    ) -> tuple[Optimizer, OptimizerState]:
        """Return an unused optimizer of the same class, groups and options, on other tensors.

        Args:
            convert: Function from a parameter to the tensor that replaces it.
            every: Whether to copy all parameters. Otherwise two of each kind are copied, unless the
                optimizer holds tensors per parameter outside ``state``.

        Returns:
            The optimizer and its state.
        """
        params = self._converted(convert, every or holds_tensors(self.optimizers))
        optimizer = _copied_onto(params, self.optimizers)
        _wake(optimizer)
        state = OptimizerState(optimizer)
        order = [i for i, p in enumerate(params_of(self.optimizer)) if id(p) in params]
        indices = {old: new for new, old in enumerate(order)}
        state._initial = {
            (which, kind, indices[index]): entries
            for (which, kind, index), entries in self._initial.items()
            if index in indices
        }
        state._restore_state()
        return optimizer, state

    def _converted(
        self, convert: Callable[[Tensor], Tensor], every: bool
    ) -> dict[int, nn.Parameter]:
        """Return the parameters of a copy, by the ``id`` of the original parameters."""
        params: dict[int, nn.Parameter] = {}
        seen: dict[tuple[Any, ...], int] = {}
        for i, group in enumerate(self.optimizer.param_groups):
            for param in group["params"]:
                if id(param) in params:
                    continue
                tensor = convert(param.detach())
                kind = (i, tensor.shape, tensor.dtype, param.requires_grad)
                seen[kind] = seen.get(kind, 0) + 1
                if every or seen[kind] <= 2:
                    params[id(param)] = nn.Parameter(tensor, param.requires_grad)
        return params


def _put(entries: dict[str, Any], key: str, value: Any) -> None:
    """Set an entry, or remove it if the value is ``_ABSENT``."""
    if value is _ABSENT:
        entries.pop(key, None)
    else:
        entries[key] = value


def _copied_onto(params: Mapping[int, nn.Parameter], optimizers: Sequence[Optimizer]) -> Optimizer:
    """Return a copy of the first optimizer with other parameters and an empty state.

    Args:
        params: The new parameters, by the ``id`` of the originals. Other parameters are left out.
        optimizers: An optimizer and its inner optimizers.
    """
    memo: dict[int, Any] = dict(params)
    for optimizer in optimizers:
        memo[id(optimizer)] = object.__new__(type(optimizer))
        memo |= {id(v): v for v in vars(optimizer).values() if isinstance(v, nn.Module)}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            own = [params[id(p)] for p in group["params"] if id(p) in params]
            memo.setdefault(id(group["params"]), own)
        attributes = vars(memo[id(optimizer)])
        for name, value in vars(optimizer).items():
            if name.startswith("_optimizer_"):
                attributes[name] = OrderedDict()  # hooks
            elif name == "state":
                attributes[name] = type(value)(dict) if hasattr(value, "default_factory") else {}
            elif name != "step":  # the wrapper of a scheduler, which counts steps
                attributes[name] = copy.deepcopy(value, memo)
    copied: Optimizer = memo[id(optimizers[0])]
    return copied


def _wake(optimizer: Optimizer) -> None:
    """Prepare a copy for training: set a positive learning rate, and training mode if it has one.

    A warm-up starts at a learning rate of 0, and optimizers of schedulefree have modes.
    """
    for group in optimizer.param_groups:
        rate = group.get("initial_lr", group.get("lr"))
        if rate is not None and not rate:
            rate = optimizer.defaults.get("lr") or 1e-2
        if rate is not None:
            group["lr"] = rate
    if callable(train := getattr(optimizer, "train", None)):
        train()


def not_fresh(optimizer: Optimizer, what: str) -> str:
    """Return the message for an optimizer that cannot be reset."""
    return (
        f"{type(optimizer).__name__} cannot be reset for each client: it holds {what}. Choose"
        " another optimizer, or create this state in optimizer.state in its first step"
    )


def not_kept(optimizer: Optimizer, what: str) -> str:
    """Return the message for an optimizer whose learned values a client cannot keep."""
    return (
        f"optimizer_state='keep' does not support {type(optimizer).__name__}: it holds {what}."
        " Choose optimizer_state='reset' or another optimizer"
    )
