"""Comparison of values from a checkpoint with examples from the running federation."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal

from torch import Tensor

from lightning_fl.files import short_repr
from lightning_fl.types import FederationError

COUNT = range(2**63)
#: Types of small values, which may replace None.
SMALL: Any = bool | int | float | str | list | Tensor | None
_KINDS: dict[type, Any] = {int: int | float, float: int | float, NoneType: SMALL}


def compare(
    saved: Any, like: Any, at: str = "", names: Literal["more", "added", "same"] = "more"
) -> None:
    """Check that a saved value has the structure of an example.

    A state that another version of torch or Lightning saved may have other names. With ``added`` or
    ``same`` it is adapted in place.

    Args:
        saved: Value from a checkpoint.
        like: The example. Dictionaries and lists are compared entry by entry. A tensor stands for
            tensors of its shape (loading casts them), a number for numbers, a text for itself, None
            for any small value. A type or a union of types stands for its instances, a range for
            integers in it, ``{str: like}`` for a dictionary with any names, ``[like, ...]`` for a
            list of any length. Any dictionary fits an empty one, and any list.
        at: Name of the value in error messages.
        names: Names of saved dictionaries. ``more``: they may have more names than the example.
            ``added``: also, missing names are added with the values of the example. ``same``:
            also, other names are removed.

    Raises:
        FederationError: If the structure differs.

    Example:
        >>> compare({"round": 3, "lr": [0.1, 0.2]}, {"round": range(9), "lr": [float, ...]})
        >>> compare({"round": 3}, {"round": range(2)})
        Traceback (most recent call last):
        lightning_fl.types.FederationError: 'round' must be an integer from 0 to 1, got 3
        >>> progress = {"ready": 3, "reset": 0}
        >>> compare(progress, {"ready": 0, "completed": 0}, names="same")
        >>> progress
        {'ready': 3, 'completed': 0}
    """
    match like:
        case dict():
            compare(saved, dict, at)
            if like and not isinstance(first := next(iter(like)), str):  # any names of a type
                for name in saved:
                    kind = first if isinstance(first, type) else type(first)
                    compare(name, kind, f"each name in {at or 'it'}")
                like = dict.fromkeys(saved, like[first])
            if names != "more" and all(isinstance(name, str) for name in like):
                for name in saved.keys() - like.keys() if names == "same" else ():
                    del saved[name]
                saved |= {name: like[name] for name in like.keys() - saved.keys()}
            for name, example in like.items():
                there = f"{at}[{short_repr(name)}]" if at else short_repr(name)
                if name not in saved:
                    raise FederationError(f"{there} is missing")
                compare(saved[name], example, there, names)
            return
        case list() | tuple():
            compare(saved, list | tuple, at)
            if not like or like[-1] is ...:
                like = list(like[:1] or [object]) * len(saved)
            if len(saved) != len(like):
                raise FederationError(f"{at} has {len(saved)} entries, here there are {len(like)}")
            for i, (value, example) in enumerate(zip(saved, like, strict=True)):
                compare(value, example, f"{at}[{i}]", names)
            return
        case range():
            fits = type(saved) is int and saved in like
            allowed = f"an integer from {like[0]} to {like[-1]}"
        case Tensor():
            fits = _is_a(saved, Tensor) and _kind(saved) == _kind(like)
            allowed = _shown(like)
        case str():
            fits, allowed = saved == like, f"{like!r}, as here"
        case _:
            is_type = isinstance(like, type | UnionType)
            kind = like if is_type else _KINDS.get(type(like), type(like))
            fits = _is_a(saved, kind)
            allowed = f"of type {kind.__name__ if isinstance(kind, type) else kind}"
    if not fits:
        raise FederationError(f"{at or 'the state'} must be {allowed}, got {_shown(saved)}")


def _is_a(saved: Any, kind: Any) -> bool:
    """Return whether a value has a type. Numbers must fit 64 bits, strings be printable."""
    match saved:
        case _ if kind is object:
            return True
        case bool():
            return kind in (bool, SMALL)
        case int():
            is_usable = -(2**63) <= saved < 2**63
        case str():
            is_usable = saved.isprintable()
        case Tensor():
            is_usable = not saved.requires_grad and not (kind is SMALL and saved.ndim)
        case _:
            is_usable = True
    return is_usable and isinstance(saved, kind)


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return short_repr(value)
    shape = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a tensor of {shape}{' that requires a gradient' if value.requires_grad else ''}"


def _kind(tensor: Tensor) -> tuple[Any, bool, bool]:
    return tensor.shape, tensor.is_floating_point(), tensor.is_complex()
