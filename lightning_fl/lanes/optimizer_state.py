"""What an optimizer learns, wherever it keeps it: made fresh for each client, or kept."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.types import FederationError

Rows = Mapping[str, Tensor]
Place = tuple[int, str, int]

#: How the names of what :meth:`OptimizerState.rows` returns begin.
OPTIMIZER_ROWS = ("optimizer.", "learned.", "number.")

#: Attributes of an optimizer that are not learned, or that are looked at elsewhere.
_NOT_LEARNED = {
    *("state", "param_groups", "defaults", "step", "zero_grad"),
    *("_opt_called", "_step_count", "_zero_grad_profile_name"),
    "_warned_capturable_if_run_uncaptured",
}
#: What schedulers set in parameter groups.
_SCHEDULED = ("lr", "momentum", "betas")
_NUMBERS = (bool, int, float)
_ABSENT = object()


class OptimizerState:
    """Everything that an optimizer learns in its steps.

    The optimizers of ``torch.optim`` keep it in ``state``. Others also keep counters and estimates
    in parameter groups, in attributes, or in an inner optimizer (Lookahead). An entry that changes
    inside ``step`` is learned: a fresh client starts from the value that was last set outside
    ``step``. Entries that only schedulers, callbacks and modules change are left alone.

    Args:
        optimizer: The optimizer; it has not made a step yet.

    Raises:
        FederationError: If the optimizer copies its parameters before its first step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.optimizers = _with_inner(optimizer)
        #: Whether ``state`` holds everything, so that there is nothing to watch.
        self.is_simple = f"{type(optimizer).__module__}.".startswith("torch.optim.")
        #: Keys that changed inside a step, by place.
        self.learned: dict[Place, set[str]] = {}
        #: Examples of what a client keeps besides ``state``, known where clients keep it.
        self.kept: dict[str, Tensor] = {}
        self._set_outside: dict[Place, dict[str, Any]] = {}
        self._marks: dict[Place, dict[str, Any]] = {}
        self._initial: dict[Place, dict[str, Any]] = {}
        if self.is_simple:
            return
        for place, param, entries in self._states():
            if place[1] != "state":
                raise FederationError(_no_fresh(optimizer, "state that belongs to no parameter"))
            for name, value in entries.items():
                if isinstance(value, Tensor) and _depends_on(value, param):
                    raise FederationError(
                        _no_fresh(optimizer, f"{name}, a copy of its parameters, from the start")
                    )
            self._initial[place] = {name: self._copied(value) for name, value in entries.items()}
        self._observe()

    # --- steps ------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Note what was set since the last step."""
        if not self.is_simple:
            self._observe()

    def after_step(self) -> None:
        """Note what the step changed."""
        if self.is_simple:
            return
        marks = self._current_marks()
        for place, now in marks.items():
            before = self._marks.get(place, {})
            changed = {key for key, mark in now.items() if before.get(key, _ABSENT) != mark}
            changed |= before.keys() - now.keys()
            if changed:
                self.learned.setdefault(place, set()).update(changed)
        self._marks = marks

    def reset(self) -> None:
        """Make the optimizer what it was before its first step."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
        if self.is_simple:
            return
        self._restore_state()
        places = dict(self._places())
        for place, key in self._known(places):
            value = self._set_outside.get(place, {}).get(key, _ABSENT)
            if value is _ABSENT:
                places[place].pop(key, None)
            else:
                places[place][key] = self._copied(value)
        self._marks = self._current_marks()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Go back to what the optimizer holds now, after others reset it."""
        states = [dict(optimizer.state) for optimizer in self.optimizers]
        places = dict(self._places())
        values = [
            (places[at], key, places[at].get(key, _ABSENT)) for at, key in self._known(places)
        ]
        try:
            yield
        finally:
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.state.update(state)
            for entries, key, value in values:
                if value is _ABSENT:
                    entries.pop(key, None)
                else:
                    entries[key] = value
            if not self.is_simple:
                self._marks = self._current_marks()

    # --- what a client keeps ----------------------------------------------------------------------

    def rows(self) -> dict[str, Tensor]:
        """Return what was learned, as tensors.

        ``optimizer.<parameter>.<name>`` is the optimizer's own state of a parameter. Other tensors
        are ``learned.<optimizer>.<kind>.<index>.<name>``, other numbers ``number.`` and the same.

        Raises:
            FederationError: If a value is neither a tensor nor a number.
        """
        rows: dict[str, Tensor] = {}
        for (which, kind, index), _, entries in self._states():
            for name, value in entries.items():
                if kind == "other":
                    raise FederationError(_not_kept(self.optimizer, "state without a parameter"))
                if which == 0 and isinstance(value, Tensor):
                    rows[f"optimizer.{index}.{name}"] = value
                elif value is not None:
                    self._put(rows, (which, kind, index), name, value)
        places = dict(self._places())
        for place, keys in self.learned.items():
            for key in sorted(keys & places.get(place, {}).keys()):
                self._put(rows, place, key, places[place][key])
        return rows

    def _put(self, rows: dict[str, Tensor], place: Place, key: str, value: Any) -> None:
        which, kind, index = place
        if isinstance(value, Tensor):
            rows[f"learned.{which}.{kind}.{index}.{key}"] = value.detach()
        elif isinstance(value, _NUMBERS):
            dtype = torch.float64 if isinstance(value, float) else None
            rows[f"number.{which}.{kind}.{index}.{key}"] = torch.tensor(value, dtype=dtype)
        else:
            raise FederationError(_not_kept(self.optimizer, f"{key}, which is not a tensor"))

    def load(self, rows: Rows) -> None:
        """Put back what :meth:`rows` returned, into an optimizer that was reset."""
        params = [(p, group) for group in self.optimizer.param_groups for p in group["params"]]
        places = dict(self._places())
        for name, row in rows.items():
            room, _, rest = name.partition(".")
            if room == "optimizer":
                index, _, key = rest.partition(".")
                param, group = params[int(index)]
                # As in torch's own load: step counters stay on the CPU, unless the step is fused.
                on_device = any(group.get(flag) is True for flag in ("capturable", "fused"))
                device = param.device if row.ndim or on_device else row.device
                self.optimizer.state[param][key] = row.to(device, copy=True, non_blocking=True)
            elif room in ("learned", "number"):
                which, kind, index, key = rest.split(".", 3)
                place = (int(which), kind, int(index))
                if kind == "state":
                    like: Any = params[int(index)][0]
                    entries: Any = self.optimizers[place[0]].state[like]
                else:
                    entries = places[place]
                    like = entries.get(key, row)
                    self.learned.setdefault(place, set()).add(key)
                if room == "number":
                    entries[key] = row.item()
                else:
                    on_cpu = kind == "state" and not row.ndim
                    entries[key] = row.to(row.device if on_cpu else like.device, copy=True)
        if not self.is_simple:
            self._marks = self._current_marks()

    # --- places -----------------------------------------------------------------------------------

    def _states(self) -> Iterator[tuple[Place, Any, dict[str, Any]]]:
        """The states of parameters, each with its place and its parameter."""
        order = {id(p): i for i, p in enumerate(params_of(self.optimizer))}
        for which, optimizer in enumerate(self.optimizers):
            if any(optimizer.state is other.state for other in self.optimizers[:which]):
                continue
            for i, (param, entries) in enumerate(optimizer.state.items()):
                known = id(param) in order and isinstance(entries, dict)
                kind, index = ("state", order[id(param)]) if known else ("other", i)
                yield (which, kind, index), param, entries if known else {"state": entries}

    def _places(self) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Where an optimizer may keep what it learns, besides its state: groups and attributes."""
        seen = set()
        for which, optimizer in enumerate(self.optimizers):
            yield (which, "attribute", 0), vars(optimizer)
            for i, group in enumerate(optimizer.param_groups):
                if id(group) not in seen:  # an outer optimizer has those of its inner one
                    seen.add(id(group))
                    yield (which, "group", i), group

    def _observe(self) -> None:
        """Keep a copy of every value that was set since the last step."""
        marks = self._current_marks()
        for place, values in self._places():
            before, kept = self._marks.get(place, {}), self._set_outside.setdefault(place, {})
            for key, mark in marks[place].items():
                if before.get(key, _ABSENT) != mark:
                    kept[key] = self._copied(values[key])
            for key in before.keys() - marks[place].keys():
                kept.pop(key, None)
        self._marks = marks

    def _current_marks(self) -> dict[Place, dict[str, Any]]:
        own = {id(p) for p in params_of(self.optimizer)}
        return {
            place: {k: _mark(value, own) for k, value in values.items() if _may_learn(k, place[1])}
            for place, values in self._places()
        }

    def _copied(self, value: Any) -> Any:
        """Return a copy that shares the parameters, modules and optimizers of the original."""
        memo: dict[int, Any] = {id(p): p for p in params_of(self.optimizer)}
        memo |= {id(optimizer): optimizer for optimizer in self.optimizers}
        if isinstance(value, nn.Module):
            return value
        try:
            return copy.deepcopy(value, memo)
        except Exception:  # of many kinds: locks, handles, tensors inside of a graph
            return value

    def _restore_state(self, source: OptimizerState | None = None) -> None:
        """Fill the empty states with what they were before the first step."""
        params = params_of(self.optimizer)
        for (which, _, index), entries in (source or self)._initial.items():
            param = params[index]
            for name, value in entries.items():
                made = self._copied(value)
                if isinstance(value, Tensor) and value.ndim:  # one number: see _depends_on
                    made = torch.full_like(param, value.flatten()[0].item(), dtype=value.dtype)
                self.optimizers[which].state[param][name] = made

    # --- a copy to try ----------------------------------------------------------------------------

    def watch(self) -> Callable[[], None]:
        """Note from now on what steps change; return what ends that."""
        return around_steps(
            self.optimizer, lambda *_: self.before_step(), lambda *_: self.after_step()
        )

    def scalars(self) -> dict[str, Any]:
        """Return single numbers that were learned, each one for all the numbers of a tensor."""
        found = {
            f"{which}.{index}.{name}": value
            for (which, _, index), _, entries in self._states()
            for name, value in entries.items()
        }
        places = dict(self._places())
        for place, key in self.learned_keys():
            found[f"{place}.{key}"] = places[place].get(key)
        return {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in found.items()
            if (isinstance(value, Tensor) and value.numel() == 1) or isinstance(value, _NUMBERS)
        }

    def _known(self, places: Mapping[Place, Any]) -> list[tuple[Place, str]]:
        return [(place, key) for place, key in self.learned_keys() if place in places]

    def holds_other_parameters(self) -> bool:
        """Say whether an attribute holds parameters that are in no group."""
        own = {id(p) for p in params_of(self.optimizer)}
        return any(
            isinstance(tensor, nn.Parameter) and id(tensor) not in own
            for optimizer in self.optimizers
            for key, value in vars(optimizer).items()
            if _may_learn(key)
            for tensor in _tensors(value)
        )

    def learned_keys(self) -> list[tuple[Place, str]]:
        """Return where something was learned besides ``state``."""
        return [(place, key) for place, keys in self.learned.items() for key in sorted(keys)]

    def trial_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a tensor in a trial: of as many dimensions, with few numbers."""
        if _holds_tensors(self.optimizers):  # they fit the parameters as they are
            return tuple(shape)
        long = sorted(range(len(shape)), key=lambda i: -shape[i])[:2]
        return tuple(min(n, _LONG if i in long else _SHORT) for i, n in enumerate(shape))

    def unused_tensor(self, param: Tensor) -> Tensor:
        """Return a tensor for a trial in the place of a parameter."""
        return torch.zeros(self.trial_shape(param.shape), dtype=param.dtype, device=param.device)

    def replica(
        self, convert: Callable[[Tensor], Tensor], every: bool = False
    ) -> tuple[Optimizer, OptimizerState]:
        """Return an unused optimizer of the same kind, groups and options, on other tensors.

        Args:
            convert: From a parameter to the tensor in its place.
            every: Whether to take every parameter. Otherwise two of each kind are enough, unless
                the optimizer holds tensors of its own, one for each.
        """
        memo: dict[int, Any] = {}
        seen: dict[tuple[Any, ...], int] = {}
        chosen: set[int] = set()
        every = every or _holds_tensors(self.optimizers)
        for i, group in enumerate(self.optimizer.param_groups):
            for param in group["params"]:
                if id(param) in memo:
                    continue
                tensor = convert(param.detach())
                kind = (i, tensor.shape, tensor.dtype, param.requires_grad)
                seen[kind] = seen.get(kind, 0) + 1
                if every or seen[kind] <= 2:
                    chosen.add(id(param))
                    memo[id(param)] = nn.Parameter(tensor, param.requires_grad)
        for optimizer in self.optimizers:
            memo[id(optimizer)] = object.__new__(type(optimizer))
            for value in vars(optimizer).values():
                if isinstance(value, nn.Module):
                    memo[id(value)] = value
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if id(group["params"]) not in memo:
                    memo[id(group["params"])] = [
                        memo[id(p)] for p in group["params"] if id(p) in chosen
                    ]
            made = vars(memo[id(optimizer)])
            for name, value in vars(optimizer).items():
                if name.startswith("_optimizer_"):
                    made[name] = OrderedDict()  # hooks
                elif name == "state":
                    made[name] = type(value)(dict) if hasattr(value, "default_factory") else {}
                elif name != "step":  # a scheduler's, which counts
                    made[name] = copy.deepcopy(value, memo)
        copied: Optimizer = memo[id(self.optimizer)]
        _wake(copied)
        state = object.__new__(OptimizerState)
        vars(state).update(vars(self))
        state.optimizer, state.optimizers = copied, _with_inner(copied)
        state.learned, state._set_outside, state._marks = {}, {}, {}
        if not self.is_simple:
            order = [i for i, p in enumerate(params_of(self.optimizer)) if id(p) in chosen]
            places = {old: new for new, old in enumerate(order)}
            state._initial = {
                (which, kind, places[index]): entries
                for (which, kind, index), entries in self._initial.items()
                if index in places
            }
            state._restore_state()
            state._observe()
        return copied, state


def restack(optimizer: Optimizer, stacks: Mapping[int, nn.Parameter]) -> None:
    """Give an optimizer stacked parameters, ``[1, ...]``, for its own, by their ids."""
    for each in _with_inner(optimizer):
        for group in each.param_groups:
            group["params"] = [stacks.get(id(param), param) for param in group["params"]]
        for param, entries in list(each.state.items()):
            if id(param) in stacks:
                del each.state[param]
                each.state[stacks[id(param)]] = {
                    name: value[None]
                    if isinstance(value, Tensor) and value.shape == param.shape
                    else value
                    for name, value in entries.items()
                }


def around_steps(
    optimizer: Optimizer,
    before: Callable[..., tuple[Any, Any] | None],
    after: Callable[..., None],
) -> Callable[[], None]:
    """Call functions before and after each step; return what ends that.

    The first gets the optimizer, the arguments of ``step`` with the optimizer, and the keyword
    arguments, and may return other ones.

    A wrapper that never calls ``Optimizer.__init__`` (timm's Lookahead) does not call step hooks:
    there its ``step`` is replaced.
    """
    if getattr(type(optimizer).step, "hooked", False):
        hooks = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)

        def remove() -> None:
            for hook in hooks:
                hook.remove()

        return remove
    step, had = optimizer.step, "step" in vars(optimizer)

    @wraps(step)
    def stepped(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        (_, *others), kwargs = before(self, (self, *args), kwargs) or ((self, *args), kwargs)
        result = step(*others, **kwargs)
        after(self, others, kwargs)
        return result

    vars(optimizer)["step"] = MethodType(stepped, optimizer)  # as schedulers do

    def undo() -> None:
        if had:
            vars(optimizer)["step"] = step
        else:
            vars(optimizer).pop("step", None)

    return undo


# --- checks at the start of a fit -----------------------------------------------------------------

#: Steps of one client and of the next in a trial; the first is no multiple of usual periods.
FIRST_STEPS, NEXT_STEPS = 13, 23
#: Rows and columns of a tensor in a trial: some optimizers treat matrices from 128 on differently.
_LONG, _SHORT = 130, 3


def check_fresh(state: OptimizerState, keep: bool) -> None:
    """Refuse an optimizer that cannot be made fresh for the next client.

    A small copy of it trains one client, is reset, and trains the next client. The next client's
    steps must be those of an unused copy, bit for bit.

    Args:
        state: Of the optimizer, which is left alone; it is told what steps change.
        keep: Whether clients keep the state of their optimizers.

    Raises:
        FederationError: If they differ, or if the copy cannot make steps at all.
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
    except Exception as error:  # of many kinds
        raise FederationError(
            f"{name} cannot be tried at the start of the fit, to see that a client's optimizer"
            f" starts fresh ({type(error).__name__}: {error}): choose another optimizer"
        ) from error
    if [p._version for p in params] != versions:
        raise FederationError(_no_fresh(state.optimizer, "references to the module's parameters"))
    if not _same(unused[0], used) or not _same(*unused):
        raise FederationError(_no_fresh(state.optimizer, "hidden state that reset does not reach"))
    for place, key in copied.learned_keys():
        value = state._set_outside.get(place, {}).get(key)
        if any(_varies(tensor) for tensor in _tensors(value)):
            raise FederationError(
                _no_fresh(state.optimizer, f"{key}, a copy of its parameters, from the start")
            )
        if has_scheduler and key in _SCHEDULED:
            raise FederationError(
                f"{name} changes {key} of its parameter groups in its steps, and a learning-rate"
                " scheduler does, too: leave the scheduler out, or choose another optimizer"
            )
    state.learned = {place: set(keys) for place, keys in copied.learned.items()}
    if not goes_on:
        raise FederationError(_not_kept(state.optimizer, "hidden state"))


def _trained(state: OptimizerState, used: bool) -> tuple[list[Tensor], OptimizerState]:
    """Return where a client ends, after another client's where the copy was used."""
    random = torch.Generator().manual_seed(0)
    optimizer, copied = state.replica(state.unused_tensor)
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
    """Say whether a copy that is given what another one keeps goes on as that one."""
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
    return _same(take_steps(optimizer, *following), take_steps(other, *following))


def take_steps(
    optimizer: Optimizer,
    starts: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor | None]],
    ratio: float = 1.0,
    with_closure: bool = True,
) -> list[Tensor]:
    """Make steps, or a part of each; return the parameters in the end.

    Gradients depend on the parameters: some optimizers ask for them at several points (SAM).
    Lightning always passes a closure, lanes do not in each step.
    """
    params = params_of(optimizer)
    for param, start in zip(params, starts, strict=True):
        param.data.copy_(start)
    for given in gradients:

        def closure(given: Sequence[Tensor | None] = given) -> Tensor:
            for param, gradient in zip(params, given, strict=True):
                param.grad = None if gradient is None else gradient + 0.1 * param.detach()
            return params[0].detach().abs().sum()

        before = [param.detach().clone() for param in params] if ratio != 1 else []
        closure()
        optimizer.step(closure if with_closure else None)  # type: ignore[arg-type]
        for param, old in zip(params, before, strict=False):
            param.data = old + ratio * (param.detach() - old)
    return [param.detach() for param in params]


def random_problem(
    optimizer: Optimizer, steps: int, random: torch.Generator
) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """Return random starts and gradients: a drift and noise, some steps larger than others."""

    def normal(like: Tensor) -> Tensor:
        dtype = torch.complex128 if like.is_complex() else torch.float64
        return torch.randn(like.shape, generator=random, dtype=dtype).to(like)

    params = params_of(optimizer)
    starts, drifts = ([normal(p.detach()) for p in params] for _ in range(2))
    gradients = [
        [
            (drift + normal(drift)) * 10.0 ** (t % 3 - 1) if p.requires_grad else None
            for p, drift in zip(params, drifts, strict=True)
        ]
        for t in range(steps)
    ]
    return starts, gradients


def stood_still(optimizer: Optimizer, ends: Sequence[Tensor], starts: Sequence[Tensor]) -> bool:
    """Say whether no parameter moved, so that a comparison says nothing."""
    trained = [p.requires_grad and p.numel() > 0 for p in params_of(optimizer)]
    pairs = zip(ends, starts, trained, strict=True)
    return any(trained) and not any(is_on and not torch.equal(a, b) for a, b, is_on in pairs)


def _wake(optimizer: Optimizer) -> None:
    """Let a copy learn: a warm-up starts at 0, and schedulefree has a mode for training."""
    for group in optimizer.param_groups:
        rate = group.get("initial_lr", group.get("lr"))
        if rate is not None and not rate:
            rate = optimizer.defaults.get("lr") or 1e-2
        if rate is not None:
            group["lr"] = rate
    if callable(train := getattr(optimizer, "train", None)):
        train()


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


# --- values ---------------------------------------------------------------------------------------


def _no_fresh(optimizer: Optimizer, what: str) -> str:
    return (
        f"{type(optimizer).__name__} cannot start fresh for each client: it holds {what}. Choose"
        " another optimizer, or let it make this state in its first step, in optimizer.state"
    )


def _not_kept(optimizer: Optimizer, what: str) -> str:
    return (
        f"optimizer_state: keep cannot keep all that {type(optimizer).__name__} learns: it holds"
        f" {what}. Choose reset, or another optimizer"
    )


def _with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer, and those that it holds in attributes, in lists too."""
    found = [optimizer]
    for each in found:
        for value in vars(each).values():
            values = value if isinstance(value, list | tuple) else [value]
            values = list(value.values()) if isinstance(value, dict) else values
            found += [v for v in values if isinstance(v, Optimizer) and not _is_in(v, found)]
    return found


def _is_in(value: Any, values: Sequence[Any]) -> bool:
    return any(value is other for other in values)


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters, in the order of its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _may_learn(key: str, kind: str = "attribute") -> bool:
    if kind == "group":
        return key != "params"
    return key not in _NOT_LEARNED and not key.startswith("_optimizer_")


class _Same:
    """Stands for an object in a comparison: equal if it is the same one, of the same version.

    It holds the object: the next one must not get its place in memory.
    """

    def __init__(self, value: Any, version: int = 0) -> None:
        self.value, self.version = value, version

    def __eq__(self, other: object) -> bool:
        is_same = isinstance(other, _Same) and self.value is other.value
        return is_same and self.version == other.version  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


def _mark(value: Any, own: set[int], depth: int = 0) -> Any:
    """Return what differs when a value has changed; without waiting for a device."""
    if isinstance(value, Tensor):
        return _Same(value, 0 if id(value) in own else value._version)
    if isinstance(value, nn.Module | Optimizer | type) or callable(value) or depth > 4:
        return _Same(value)
    if isinstance(value, Mapping):
        return [(_Same(k), _mark(v, own, depth + 1)) for k, v in value.items()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [_mark(v, own, depth + 1) for v in value]
    if hasattr(value, "tobytes"):  # numpy
        return value.tobytes()
    if hasattr(value, "__dict__"):
        return _mark(vars(value), own, depth + 1)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _varies(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and bool((tensor != tensor.flatten()[0]).any())


def _depends_on(value: Tensor, param: Tensor) -> bool:
    """Say whether a state may have been made from its parameter."""
    if not value.ndim:
        return False
    return value.shape != param.shape or _varies(value) or torch.equal(value, param)


def _holds_tensors(optimizers: Sequence[Optimizer]) -> bool:
    """Say whether tensors are in other places than lists of parameters."""
    for optimizer in optimizers:
        values = [value for key, value in vars(optimizer).items() if _may_learn(key)]
        for group in optimizer.param_groups:
            values += [value for key, value in group.items() if key not in ("params", "lr")]
        if any(True for value in values for _ in _tensors(value)):
            return True
    return False
