"""The optimizer of local training: fresh for each client, kept per client, or stacked."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from itertools import starmap
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_fl.errors import FederationError

Rows = Mapping[str, Tensor]
#: Options of each parameter group, by name.
Options = list[dict[str, Any]]

#: Prefixes of the names that :meth:`ClientOptimizer.rows` returns: of tensors and of numbers.
OPTIMIZER_ROWS = ("optimizer.", "number.")
#: Attributes of an optimizer that schedulers set, or that are restored elsewhere.
_OTHERS = {"param_groups", "defaults", "step", "zero_grad", "_opt_called", "_step_count"}
#: Types of the options of parameter groups.
_PLAIN = (bool, int, float, str, tuple, Tensor, type(None))

#: Optimizers whose steps are elementwise and proportional to the learning rate.
PROPORTIONAL = {
    *(optim.SGD, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Adam, optim.AdamW),
    *(optim.Adamax, optim.NAdam, optim.RAdam),
}
#: Shapes of the tensors of a client with which an optimizer is tried.
SHAPES = (), (3,), (20, 4), (3, 2, 5)
#: Optimizers whose steps are elementwise: they treat all entries of a parameter alike.
ELEMENTWISE = {*PROPORTIONAL, optim.ASGD, optim.Rprop}


class ClientOptimizer:
    """Give each client a fresh optimizer, by a deep copy that shares the parameters.

    What the optimizers of ``torch.optim`` learn is in ``state``. Others also store counters and
    estimates in parameter groups, in attributes, or in an inner optimizer (Lookahead). A client
    starts from a copy of all of this from before the first step of the round. An entry of a
    parameter group that changes in a step is learned; the other ones are options, which
    :class:`~lightning_fl.federation.schedulers.Schedulers` restores.

    Args:
        optimizer: The optimizer, before its first step.

    Raises:
        FederationError: If the optimizer cannot be copied, or holds a copy of its parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.optimizers = optimizer, with_inner(optimizer)
        #: Whether everything that it learns is in ``state``, which it makes in its first step.
        self.is_simple = type(optimizer).__module__.startswith("torch.optim.")
        self.is_simple &= not optimizer.state
        self._has_stepped, self._before = False, list[dict[str, Any]]()
        #: Names of the learned entries of each parameter group, by its index.
        self.learned = defaultdict[int, set[str]](set)
        #: Attributes of each optimizer, and entries of each parameter group, before the first step.
        self._fresh = ([dict[str, Any]()], [dict[str, Any]()])
        if self.is_simple:
            return
        own = {id(param) for param in params_of(optimizer)}
        for name, value in _entries(self.optimizers):
            if any(id(t) not in own and _varies(t) for t in tensors_in(value)):
                raise FederationError(
                    f"{type(optimizer).__name__} cannot be reset for each client: it holds {name},"
                    " a copy of its parameters, from the start. Choose another optimizer, or create"
                    " this state in optimizer.state in its first step"
                )
        self._fresh = self._copied()

    # --- a fresh optimizer ------------------------------------------------------------------------

    def before_step(self) -> None:
        """Note the entries of the parameter groups."""
        if not self.is_simple:
            self._before = [_marked(group) for group in self.optimizer.param_groups]

    def after_step(self) -> None:
        """Note the entries of the parameter groups that the step has changed."""
        self._has_stepped = True
        if self.is_simple:
            return
        for i, (before, group) in enumerate(
            zip(self._before, self.optimizer.param_groups, strict=True)
        ):
            now = _marked(group)
            self.learned[i] |= {n for n in now if n not in before or before[n] != now[n]}

    def reset(self) -> None:
        """Restore what was there before the first step of the round."""
        if self.is_simple:
            self.optimizer.state.clear()
            return
        if not self._has_stepped:  # what was set since then belongs to all clients
            self._fresh = self._copied()
            return
        self._has_stepped = False
        attributes, groups = copy.deepcopy(self._fresh, self._shared())
        for optimizer, fresh in zip(self.optimizers, attributes, strict=True):
            now = vars(optimizer)
            for name in _own(optimizer).keys() - fresh.keys():
                del now[name]
            now.update(fresh)
        for i, (fresh, group) in enumerate(zip(groups, self.optimizer.param_groups, strict=False)):
            others = (name for name in group if not _is_option(name, group[name]))
            for name in self.learned[i].union(others):
                if name in fresh:
                    group[name] = fresh[name]
                elif name != "params":
                    del group[name]

    def options(self) -> Options:
        """Return a copy of the options of each parameter group."""
        return [
            {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if _is_option(name, value) and name not in self.learned[i]
            }
            for i, group in enumerate(self.optimizer.param_groups)
        ]

    def set_options(self, options: Options) -> None:
        """Restore the options that :meth:`options` returned; groups that came later keep theirs."""
        for group, values in zip(self.optimizer.param_groups, options, strict=False):
            for name, value in values.items():
                group[name] = value.clone() if isinstance(value, Tensor) else value

    def _copied(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        try:
            return copy.deepcopy(([_own(each) for each in self.optimizers], groups), self._shared())
        except Exception as error:  # locks, threads and tensors of a graph raise different kinds
            raise FederationError(
                f"{type(self.optimizer).__name__} cannot be reset for each client, since it cannot"
                f" be copied ({error}): choose another optimizer"
            ) from error

    def _shared(self) -> dict[int, Any]:
        """Return what copies share: parameters, optimizers, their groups, and modules."""
        shared: list[Any] = [*params_of(self.optimizer), *self.optimizers]
        for each in self.optimizers:
            shared += [each.param_groups, *each.param_groups]
            shared += [value for value in vars(each).values() if isinstance(value, nn.Module)]
        return {id(value): value for value in shared}

    # --- state kept per client --------------------------------------------------------------------

    def rows(self) -> dict[str, Tensor]:
        """Return what ``optimizer.state_dict()`` saves as tensors, without options.

        Names are ``optimizer.<parameter>.<name>`` and ``optimizer.group<index>.<name>``; Python
        numbers have the prefix ``number`` instead.

        Raises:
            FederationError: If a value is neither a tensor nor a number.
        """
        saved = self.optimizer.state_dict()
        rows: dict[str, Tensor] = {}
        for index, entries in saved["state"].items():
            if not isinstance(index, int) or not isinstance(entries, dict):
                raise self._not_kept("state without a parameter")
            for name, value in entries.items():
                rows |= self._row(f"{index}.{name}", value)
        for index, group in enumerate(saved["param_groups"]):
            for name in sorted(self.learned[index] & group.keys()):
                rows |= self._row(f"group{index}.{name}", group[name])
        return rows

    def _row(self, name: str, value: Any) -> dict[str, Tensor]:
        if value is None:
            return {}
        if isinstance(value, Tensor):
            return {f"optimizer.{name}": value.detach()}
        if isinstance(value, bool | int | float):
            dtype = torch.float64 if isinstance(value, float) else None
            return {f"number.{name}": torch.tensor(value, dtype=dtype)}
        raise self._not_kept(f"{name.partition('.')[2]}, which is not a tensor")

    def load(self, rows: Rows) -> None:
        """Load the tensors of :meth:`rows` into the fresh optimizer."""
        self._has_stepped = True  # it is not fresh, even if the client makes no step
        saved = self.optimizer.state_dict()
        state = {index: dict(entries) for index, entries in saved["state"].items()}
        for name, row in rows.items():
            kind, where, key = name.split(".", 2)
            value = row.item() if kind == "number" else row.clone()
            if where.startswith("group"):
                index = int(where.removeprefix("group"))
                saved["param_groups"][index][key] = value
                self.learned[index].add(key)
            else:
                state.setdefault(int(where), {})[key] = value
        self.optimizer.load_state_dict({**saved, "state": state})

    def _not_kept(self, what: str) -> FederationError:
        return FederationError(
            f"optimizer_state='keep' does not support {type(self.optimizer).__name__}: it holds"
            f" {what}. Choose optimizer_state='reset' or another optimizer"
        )


def _own(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer that may be a part of what it learns."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OTHERS and not name.startswith("_optimizer_")
    }


def _entries(optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Any]]:
    """Yield all entries of optimizers by name: of attributes, ``state`` and parameter groups."""
    for optimizer in optimizers:
        for name, value in _own(optimizer).items():
            if name == "state":
                for entries in value.values():
                    yield from entries.items() if isinstance(entries, dict) else [(name, entries)]
            else:
                yield name, value
        for group in optimizer.param_groups:
            yield from ((name, value) for name, value in group.items() if name != "params")


def _is_option(name: str, value: Any) -> bool:
    return name != "params" and isinstance(value, _PLAIN)


def _marked(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that compare unequal once an option of a parameter group has changed."""
    return {
        name: (id(value), value._version) if isinstance(value, Tensor) else value
        for name, value in group.items()
        if _is_option(name, value)
    }


def _varies(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and bool((tensor != tensor.flatten()[0]).any())


# --- any optimizer --------------------------------------------------------------------------------


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors in nested mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def optimizers_in(configured: Any) -> Iterator[Optimizer]:
    """Yield the optimizers in the result of ``configure_optimizers``, in any of its forms."""
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, dict):
        yield from optimizers_in(configured.get("optimizer"))
    elif isinstance(configured, list | tuple):
        for part in configured:
            yield from optimizers_in(part)


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and the optimizers in its attributes, also inside lists."""
    optimizers = [optimizer]
    for each in optimizers:
        for value in vars(each).values():
            values = value if isinstance(value, list | tuple) else [value]
            values = list(value.values()) if isinstance(value, dict) else values
            for inner in values:
                is_known = any(inner is other for other in optimizers)
                if isinstance(inner, Optimizer) and not is_known:
                    optimizers.append(inner)
    return optimizers


def step_hooks_of(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks before and after the steps of an optimizer and its inner optimizers."""
    names = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    return [
        hook
        for each in with_inner(optimizer)
        for name in names
        for hook in getattr(each, name, {}).values()
    ]


def around_steps(
    optimizer: Optimizer,
    before: Callable[[Callable[[], Any] | None], Callable[[], Any] | None],
    after: Callable[[], None],
) -> Callable[[], None]:
    """Call functions before and after each step of an optimizer.

    Step hooks would not do: a wrapper that never calls ``Optimizer.__init__`` has none.

    Args:
        optimizer: The optimizer.
        before: Called before each step with its closure; returns the closure to use.
        after: Called after each step.

    Returns:
        A function that ends the calls.
    """
    step, was_set = optimizer.step, "step" in vars(optimizer)

    @wraps(step)
    def stepped(_: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        result = step(closure=before(closure), **options)
        after()
        return result

    vars(optimizer)["step"] = MethodType(stepped, optimizer)  # as schedulers do

    def undo() -> None:
        if was_set:
            vars(optimizer)["step"] = step
        else:
            vars(optimizer).pop("step", None)

    return undo


# --- stacked clients ------------------------------------------------------------------------------


def restack(
    optimizer: Optimizer, stacks: Mapping[int, nn.Parameter], removed: Iterable[Tensor] = ()
) -> None:
    """Replace the parameters of an optimizer by stacked parameters, ``[1, ...]``.

    Args:
        optimizer: The optimizer, which is changed.
        stacks: The stacked parameters, by the ``id`` of the parameters that they replace.
        removed: Parameters that it shall not train.
    """
    unwanted = {id(param) for param in removed}
    for each in with_inner(optimizer):
        for group in each.param_groups:
            kept = (param for param in group["params"] if id(param) not in unwanted)
            group["params"] = [stacks.get(id(param), param) for param in kept]
        for param in [p for p in each.state if id(p) in unwanted or id(p) in stacks]:
            del each.state[param]  # of Adagrad, which makes it anew


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to treat all entries of a parameter alike."""
    return type(optimizer) in ELEMENTWISE or bool(
        getattr(optimizer, "federated_elementwise", False)
    )


def why_not_elementwise(optimizer: Optimizer, keep: bool) -> str | None:
    """Return the reason why an optimizer cannot train stacked clients, or None.

    Args:
        optimizer: The optimizer, before its first step.
        keep: Whether clients keep the state of their optimizers.
    """
    name = type(optimizer).__name__
    if not is_elementwise(optimizer):
        return (
            f"the steps of {name} are not known to be elementwise (set federated_elementwise = True"
            " in the class if they are)"
        )
    if any(each.state for each in with_inner(optimizer)):
        try:
            trial(optimizer)
        except Exception:  # a KeyError, or any error of an optimizer
            return f"{name} has state before its first step, which it does not make anew"
    if keep and not is_kept_per_client(optimizer):
        return f"clients would share a part of the state of {name}, as they keep it"
    return None


def is_kept_per_client(optimizer: Optimizer) -> bool:
    """Return whether each client has a state of its own, of stacked tensors only.

    It has if the optimizer is SGD without dampening, or has a method ``fresh``; see :func:`fresh`.
    """
    is_sgd = type(optimizer) is optim.SGD
    if is_sgd and not any(group["dampening"] for group in optimizer.param_groups):
        return True
    return hasattr(optimizer, "fresh")


def fresh(optimizer: Optimizer, param: Tensor, name: str) -> Tensor:
    """Return the initial state of a parameter: zero, or the result of the optimizer's ``fresh``."""
    made = getattr(optimizer, "fresh", None)
    value: Tensor = torch.zeros_like(param) if made is None else made(param, name)
    return value.detach().clone()


def trial(optimizer: Optimizer) -> tuple[bool, bool]:
    """Return whether steps of stacked clients are those of each, and proportional to the rate.

    Args:
        optimizer: The optimizer, before its first step.
    """
    # Each parameter has each shape once.
    found = [_trial(optimizer, shift) for shift in range(len(SHAPES))]
    return all(is_apart for is_apart, _ in found), all(is_linear for _, is_linear in found)


def _trial(optimizer: Optimizer, shift: int) -> tuple[bool, bool]:
    """Train the tensors of 20 clients by a copy of an optimizer, and those of one client by others.

    Each copy gets the gradients and the sum of losses of its clients.
    """
    params, generator = params_of(optimizer), torch.Generator().manual_seed(0)

    def drawn(i: int, param: Tensor) -> Tensor:
        shape = (20, *SHAPES[(i + shift) % len(SHAPES)])
        dtype = torch.complex128 if param.is_complex() else torch.float64
        return torch.randn(shape, generator=generator, dtype=dtype).to(param.device)

    starts, grads = list(starmap(drawn, enumerate(params))), list(starmap(drawn, enumerate(params)))
    losses = torch.rand(20, generator=generator)

    def moves(rows: slice | int, rate: float, ratio: float = 1.0) -> list[Tensor]:
        """Return the changes of the parameters after four steps, times a ratio each."""
        own = [nn.Parameter(start[rows].clone()) for start in starts]
        copied: Any = _copied_onto(
            {id(p): new for p, new in zip(params, own, strict=True)}, optimizer
        )
        for group in copied.param_groups:
            group["lr"] = rate
        for scale in (1.0, 1e3, 1e-3, 1.0):
            before = [param.detach().clone() for param in own]
            for param, grad in zip(own, grads, strict=True):
                param.grad = scale * grad[rows]
            copied.step(closure=(scale * losses[rows].sum()).clone)
            for param, old in zip(own, before, strict=True):
                param.data = old + ratio * (param.detach() - old)
        return [param.detach() - start[rows] for param, start in zip(own, starts, strict=True)]

    def is_close(one: Tensor, other: Tensor) -> bool:
        return torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(one.abs().max()))

    alone = map(torch.stack, zip(moves(0, 0.1), moves(1, 0.1), strict=True))
    is_apart = all(map(is_close, alone, [move[:2] for move in moves(slice(20), 0.1)]))
    halves = moves(slice(20), 0.1, ratio=0.5), moves(slice(20), 0.05)
    return is_apart, all(map(is_close, *halves))


def _copied_onto(params: Mapping[int, nn.Parameter], optimizer: Optimizer) -> Optimizer:
    """Return a copy of an optimizer with other parameters and without state.

    Args:
        params: The new parameters, by the ``id`` of the originals.
        optimizer: The optimizer, with its inner ones, before its first step.
    """
    memo: dict[int, Any] = dict(params)
    optimizers = with_inner(optimizer)
    for each in optimizers:
        memo[id(each)] = object.__new__(type(each))
    for each in optimizers:
        for name, value in vars(each).items():
            if name.startswith("_optimizer_"):
                vars(memo[id(each)])[name] = OrderedDict()  # hooks
            elif name == "state":
                vars(memo[id(each)])[name] = defaultdict(dict)
            elif name != "step":  # the wrapper of a scheduler, which counts steps
                vars(memo[id(each)])[name] = copy.deepcopy(value, memo)
    copied: Optimizer = memo[id(optimizer)]
    return copied
