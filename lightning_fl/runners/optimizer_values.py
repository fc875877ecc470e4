"""Access to all values that an optimizer holds, and detection of their changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

#: Attributes of an optimizer that are not part of its state, or that are compared elsewhere.
_NOT_LEARNED = {
    *("state", "param_groups", "defaults", "step", "zero_grad"),
    *("_opt_called", "_step_count", "_zero_grad_profile_name"),
    "_warned_capturable_if_run_uncaptured",
}


# --- optimizers and their parameters --------------------------------------------------------------


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


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


def remove(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Remove parameters from an optimizer and its inner optimizers.

    Args:
        optimizer: The optimizer, which is changed.
        parameters: The parameters to remove.
    """
    unwanted = {id(param) for param in parameters}
    for each in with_inner(optimizer):
        for group in each.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in unwanted]
        for param in [p for p in each.state if id(p) in unwanted]:
            del each.state[param]


def restack(optimizer: Optimizer, stacks: Mapping[int, nn.Parameter]) -> None:
    """Replace the parameters of an optimizer by stacked parameters, ``[1, ...]``.

    Args:
        optimizer: The optimizer, which is changed.
        stacks: The stacked parameters, by the ``id`` of the parameters that they replace.
    """
    for each in with_inner(optimizer):
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
    before: Callable[..., tuple[Any, Any] | None],
    after: Callable[..., None],
) -> Callable[[], None]:
    """Call functions before and after each step of an optimizer.

    A wrapper that never calls ``Optimizer.__init__`` (timm's Lookahead) does not call step hooks.
    Its ``step`` is replaced instead.

    Args:
        optimizer: The optimizer.
        before: Called before each step with the optimizer, the arguments of ``step`` (the first is
            the optimizer) and its keyword arguments. It may return replacements of both.
        after: Called after each step with the same arguments.

    Returns:
        A function that ends the calls.
    """
    if getattr(type(optimizer).step, "hooked", False):
        hooks = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)

        def remove() -> None:
            for hook in hooks:
                hook.remove()

        return remove
    step, was_set = optimizer.step, "step" in vars(optimizer)

    @wraps(step)
    def stepped(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        (_, *others), kwargs = before(self, (self, *args), kwargs) or ((self, *args), kwargs)
        result = step(*others, **kwargs)
        after(self, others, kwargs)
        return result

    vars(optimizer)["step"] = MethodType(stepped, optimizer)  # as schedulers do

    def undo() -> None:
        if was_set:
            vars(optimizer)["step"] = step
        else:
            vars(optimizer).pop("step", None)

    return undo


@contextmanager
def rates_scaled(groups: Sequence[dict[str, Any]], factor: float) -> Iterator[None]:
    """Multiply the learning rates of parameter groups within a ``with`` block.

    Args:
        groups: The parameter groups.
        factor: The factor.
    """
    before = [group["lr"] for group in groups]
    try:
        for group in groups:
            group["lr"] = group["lr"] * factor
        yield
    finally:
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr


#: Options of each parameter group, by name.
Options = list[dict[str, Any]]


def options_of(optimizer: Optimizer) -> Options:
    """Return a copy of the options of an optimizer that can be compared."""
    return [
        {n: v.tolist() if isinstance(v, Tensor) else v for n, v in group.items() if n != "params"}
        for group in optimizer.param_groups
    ]


@contextmanager
def options_set(optimizer: Optimizer, options: Options) -> Iterator[None]:
    """Set numbers among the options of an optimizer within a ``with`` block."""
    groups = optimizer.param_groups
    before = [dict(group) for group in groups]
    for group, values in zip(groups, options, strict=False):
        group.update((n, v) for n, v in values.items() if not isinstance(group.get(n), Tensor))
    try:
        yield
    finally:
        for group, values in zip(groups, before, strict=True):
            group.update(values)


# --- values ---------------------------------------------------------------------------------------


def may_learn(key: str, kind: str = "attribute") -> bool:
    """Return whether an entry may be part of the state of an optimizer.

    Args:
        key: Name of the entry.
        kind: ``group`` for an entry of a parameter group, ``attribute`` for an attribute.
    """
    if kind == "group":
        return key != "params"
    return key not in _NOT_LEARNED and not key.startswith("_optimizer_")


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


def parameters_held(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters in attributes of an optimizer, as LBFGS has them."""
    for each in with_inner(optimizer):
        for key, value in vars(each).items():
            tensors = tensors_in(value) if may_learn(key) else ()
            yield from (tensor for tensor in tensors if isinstance(tensor, nn.Parameter))


def holds_other_parameters(optimizer: Optimizer) -> bool:
    """Return whether an attribute holds parameters that are in no parameter group."""
    own = {id(p) for p in params_of(optimizer)}
    return any(id(param) not in own for param in parameters_held(optimizer))


def holds_tensors(optimizers: Sequence[Optimizer]) -> bool:
    """Return whether optimizers hold tensors other than their parameters and ``state``."""
    for optimizer in optimizers:
        values = [value for key, value in vars(optimizer).items() if may_learn(key)]
        for group in optimizer.param_groups:
            values += [value for key, value in group.items() if key not in ("params", "lr")]
        if any(True for value in values for _ in tensors_in(value)):
            return True
    return False


def varies(tensor: Tensor) -> bool:
    """Return whether the entries of a tensor differ."""
    return tensor.numel() > 1 and bool((tensor != tensor.flatten()[0]).any())


def may_depend_on(value: Tensor, param: Tensor) -> bool:
    """Return whether a tensor of the state may have been computed from its parameter."""
    if not value.ndim:
        return False
    return value.shape != param.shape or varies(value) or torch.equal(value, param)


# --- whether a value has changed ------------------------------------------------------------------


class _Identity:
    """Compare objects by identity and version.

    The object is referenced, so that no other object can get its address.
    """

    def __init__(self, value: Any, version: int = 0) -> None:
        self.value, self.version = value, version

    def __eq__(self, other: object) -> bool:
        is_same = isinstance(other, _Identity) and self.value is other.value
        return is_same and self.version == other.version  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


def mark(value: Any, params: set[int], depth: int = 0) -> Any:
    """Return an object that compares unequal once a value has changed.

    Nothing is read from a device: a tensor counts as changed if its version has changed.

    Args:
        value: The value.
        params: The ``id`` of each parameter of the optimizer; their versions are ignored.
        depth: Nesting depth of the value.
    """
    if isinstance(value, Tensor):
        return _Identity(value, 0 if id(value) in params else value._version)
    if isinstance(value, nn.Module | Optimizer | type) or callable(value) or depth > 4:
        return _Identity(value)
    if isinstance(value, Mapping):
        return [(_Identity(k), mark(v, params, depth + 1)) for k, v in value.items()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [mark(v, params, depth + 1) for v in value]
    if hasattr(value, "tobytes"):  # numpy
        return value.tobytes()
    if hasattr(value, "__dict__"):
        return mark(vars(value), params, depth + 1)
    return value
