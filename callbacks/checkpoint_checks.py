"""What a checkpoint has to be before anything of it is taken over: it may come from anyone."""

from __future__ import annotations

import copy
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from packaging.version import InvalidVersion, Version
from torch import Tensor, nn

from lightning_fl.files import shown
from lightning_fl.lanes.host import LaneHost
from lightning_fl.lanes.optimizer_state import OPTIMIZER_ROWS
from lightning_fl.lanes.optimizer_values import params_of
from lightning_fl.lanes.plain import ModuleLane
from lightning_fl.transforms import UpdateTransform
from lightning_fl.types import FederationError, describe

WHOLE = range(-(2**63), 2**63)
COUNT = range(2**63)

NUMBER = torch.zeros(())
#: What may have become of None.
UNSET = (None, bool, WHOLE, float, str, [object], NUMBER)
#: Parts of a checkpoint, which has a byte at least for each; and how deep they are nested.
MOST_PARTS, MOST_LEVELS = 2**26, 64

#: What a checkpoint has, and what it may have, for Lightning.
NEEDED: dict[str, Any] = {"pytorch-lightning_version": str, "state_dict": {str: object}}
OPTIONAL: dict[str, Any] = {
    "epoch": COUNT,
    "global_step": COUNT,
    "loops": {str: dict},
    "callbacks": {str: dict},
    "optimizer_states": [dict],
    "lr_schedulers": [dict],
}
#: What Lightning's callbacks look for in theirs.
CALLBACKS: dict[type, dict[str, Any]] = {
    ModelCheckpoint: {
        "best_model_score": (NUMBER, None),
        "best_model_path": str,
        "best_k_models": {str: NUMBER},
        "kth_best_model_path": str,
        "kth_value": NUMBER,
        "last_model_path": str,
    },
    EarlyStopping: {
        "wait_count": COUNT,
        "stopped_epoch": COUNT,
        "best_score": NUMBER,
        "patience": COUNT,
        "stopping_reason": range(len(EarlyStoppingReason)),
        "stopping_reason_message": (str, None),
    },
}
#: What a ``FederatedLoop`` saves.
STATE: dict[str, Any] = {
    "seed": COUNT,
    "num_clients": COUNT,
    "number of parameter tensors": COUNT,
    "checksum": str,
    "aggregator_class": str,
    "policy_class": str,
    "buffers": str,
    "optimizer_state": str,
    "round": COUNT,
    "rows": [{str: (WHOLE, float, str)}],
    "val_loss": (float, None),
    "monitored": {str: float},
    "base_lr": float,
    "lanes": {str: bool},
    "trained": [bool],
    "options": {str: (WHOLE, float, str, [str])},
    "aggregator": {str: object},
    "policy": {str: object},
    "store": [{"name": str, "clients": Tensor, "rows": Tensor}],
    "unsaved buffers": {str: Tensor},
    "server": ({str: object}, None),
}


def fault_of(value: Any, kind: Any, at: str = "it") -> str | None:
    """Say what of a value is not of a kind; None if it is.

    Args:
        value: Of a checkpoint.
        kind: A type; a range, for whole numbers; None; a tensor, for others of its shape; a tuple
            of kinds, for one of them; ``[kind]``, for a list or a tuple; ``{type: kind}``, for a
            dictionary; ``{"name": kind}``, for one that has these names.
        at: What it is called.

    Example:
        >>> fault_of({"round": 3}, {"round": range(2)})
        "'round' must be a whole number from 0 to 1, got 3"
        >>> fault_of([1.0, True], [float])
        'it[1] must be a float, got True'
    """
    match kind:
        case tuple():
            faults = [fault_of(value, each, at) for each in kind]
            return None if None in faults else faults[0]
        case list():
            if not isinstance(value, list | tuple):
                return _must(at, "a list", value)
            each = ((v, kind[0], f"{at}[{i}]") for i, v in enumerate(value))
        case dict():
            if not isinstance(value, dict):
                return _must(at, "a dictionary", value)
            (first, rest), *_ = kind.items()
            if isinstance(first, type):
                if wrong := [k for k in value if type(k) is not first]:
                    return _must(f"each name in {at}", f"of type {first.__name__}", wrong[0])
                each = ((v, rest, f"{at}[{shown(k)}]") for k, v in value.items())
            else:
                if missing := [name for name in kind if name not in value]:
                    return f"{missing[0]!r} is missing"
                each = ((value[name], of, repr(name)) for name, of in kind.items())
        case range():
            if type(value) is int and value in kind:
                return None
            return _must(at, f"a whole number from {kind[0]} to {kind[-1]}", value)
        case Tensor():
            if not isinstance(value, Tensor):
                return _must(at, "a tensor", value)
            # Loading casts: a run may go on in another precision.
            if kind.shape == value.shape and _is_float(kind) == _is_float(value):
                return None
            return f"{at} must be a tensor of {_shape(kind)}, got {_shape(value)}"
        case _:
            is_kind = value is None if kind is None else isinstance(value, kind)
            if is_kind and (kind is bool or type(value) is not bool):
                # What is shown to people must not move their cursor.
                is_shown = not isinstance(value, str) or value.isprintable()
                return None if is_shown else _must(at, "printable", value)
            return _must(at, f"a {kind.__name__}" if kind else "null", value)
    return next((fault for args in each if (fault := fault_of(*args))), None)


def _must(at: str, be: str, value: Any) -> str:
    return f"{at} must be {be}, got {_shown(value)}"


def _shown(value: Any) -> str:
    return f"a tensor of {_shape(value)}" if isinstance(value, Tensor) else shown(value)


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _rough(tensor: Tensor) -> tuple[int, bool]:
    return tensor.ndim, _is_float(tensor)


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def known(value: Any, now: Any, at: str, *, keep: bool = False) -> Any:
    """Return what a saved state says of what there is now; what it does not name stays as it is.

    Args:
        value: Saved by this version of a library, or by another one.
        now: The state of what is going to load it.
        at: What it is called.
        keep: Whether names that are not known stay, too.

    Raises:
        FederationError: If something is of another type.

    Example:
        >>> known({"ready": 3, "reset": 0}, {"ready": 0, "completed": 0}, "progress")
        {'ready': 3, 'completed': 0}
    """
    if isinstance(now, dict):
        _refuse(fault_of(value, dict, at))
        found = copy.copy(now)  # a Counter remains one
        found.clear()
        found.update(value if keep else {})
        for name, own in now.items():
            found[name] = known(value.get(name, own), own, f"{at}[{name!r}]", keep=keep)
        return found
    if type(now) in (list, tuple) and now:
        _refuse(fault_of(value, type(now), at))
        if len(value) != len(now):
            raise FederationError(f"{at} has {len(value)} entries, here there are {len(now)}")
        pairs = enumerate(zip(value, now, strict=True))
        return type(now)(known(v, n, f"{at}[{i}]", keep=keep) for i, (v, n) in pairs)
    is_number = isinstance(now, int | float) and not isinstance(now, bool)
    kind = (WHOLE, float) if is_number else UNSET if now is None else type(now)
    _refuse(fault_of(value, kind, at))
    if isinstance(now, str) and value != now:  # a scheduler's mode, say
        raise FederationError(f"{at} is {shown(value)}, here it is {now!r}")
    return value


def check(value: Any, kind: Any, what: str) -> None:
    """Refuse a state that is not of a kind; see :func:`fault_of`.

    Raises:
        FederationError: Says what is not.
    """
    with blamed(f"the checkpoint's state of {what} is damaged, or was changed"):
        _refuse(fault_of(value, kind))


def _refuse(fault: str | None) -> None:
    if fault:
        raise FederationError(fault)


# --- the file -------------------------------------------------------------------------------------


def read_checkpoint(
    path: str | os.PathLike[str], load: Callable[[], Any], *, in_full: bool = True
) -> dict[str, Any]:
    """Read a checkpoint that is safe to hand to Lightning.

    Args:
        path: Of its file, which may be anywhere that Lightning can read.
        load: Reads it, with ``weights_only=True``.
        in_full: Whether to compare all of its content with its checksums.

    Raises:
        FederationError: If it is damaged, no checkpoint of Lightning 2, holds more than data, or
            would take more memory than its file has bytes.
    """
    size = None
    with blamed(f"{path} is damaged, or not a checkpoint"):
        if "://" not in os.fspath(path):
            size = _size(path)
        try:
            checkpoint = load()
        except pickle.UnpicklingError as error:
            # Of torch's advice the cause alone: the rest is how to run the code after all.
            cause = next((line for line in str(error).splitlines() if "nsupported" in line), error)
            what = str(cause).rpartition("WeightsUnpickler error: ")[2].partition(". ")[0]
            raise FederationError(
                f"it holds more than data: {one_line(what)}. If you trust whoever wrote it, pass"
                " weights_only=False to Trainer.fit (lightning-fl fit --weights_only=false), which"
                " lets it run code"
            ) from error
        except Exception as error:  # of many kinds, where a file is damaged
            raise FederationError(one_line(error)) from error
        if not isinstance(checkpoint, dict) or "pytorch-lightning_version" not in checkpoint:
            raise FederationError(
                "it is a file of torch, but no checkpoint of Lightning: give what a fit has written"
            )
        check_outline(checkpoint, size)
    if in_full and size is not None:
        check_sums(path)
    return checkpoint


def check_sums(path: str | os.PathLike[str]) -> None:
    """Compare the content of a file of ``torch.save`` with the checksums in it.

    ``torch.load`` does not. It takes about a second for each GB.

    Raises:
        FederationError: If they differ: the file is damaged.
    """
    with ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise FederationError(
            f"{path} is damaged: {shown(damaged)} in it does not have the checksum that it was"
            " written with. Go on from another checkpoint"
        )


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Say whose fault an error is."""
    try:
        yield
    except FederationError as error:
        raise FederationError(f"{what}: {error}") from error


def _size(path: str | os.PathLike[str]) -> int:
    """Return the size of a file that ``torch.save`` may have written.

    It does not compress, and stores nothing in two places: a file of some kilobytes could else
    become as many gigabytes.
    """
    try:
        size = os.path.getsize(path)
        with ZipFile(path) as archive:
            entries = archive.infolist()
    except OSError as error:
        raise FederationError(f"it cannot be read ({error.strerror})") from error
    except Exception as error:  # of many kinds, where a file is damaged
        raise FederationError(one_line(error)) from error
    content = sum(entry.file_size for entry in entries)
    if content > size or any(entry.compress_type != ZIP_STORED for entry in entries):
        raise FederationError(
            f"it is compressed, which torch.save does not do: {size} bytes become {content}"
        )
    return size


def one_line(error: object) -> str:
    """Return the beginning of a message, as one line that does not move a cursor."""
    text = str(error).strip() or type(error).__name__
    return "".join(c if c.isprintable() else " " for c in text)[:200]


def check_outline(checkpoint: dict[str, Any], size: int | None = None) -> None:
    """Refuse what Lightning would stumble over, and what is not as plain as it looks.

    Args:
        checkpoint: As it was read.
        size: Of the file, where it is known: no tensor is larger. Those of the module are compared
            with its own.

    Raises:
        FederationError: Says what it is.
    """
    _weigh(checkpoint, size or MOST_PARTS, {})
    outline = NEEDED | {name: kind for name, kind in OPTIONAL.items() if name in checkpoint}
    _refuse(fault_of(checkpoint, outline))
    _refuse(_hidden(checkpoint))
    others = {name: value for name, value in checkpoint.items() if name != "state_dict"}
    _refuse(_not_plain(others, size))
    try:
        version = Version(checkpoint["pytorch-lightning_version"])
    except InvalidVersion as error:
        raise FederationError(one_line(error)) from error
    if version < Version("2.0"):
        raise FederationError(
            f"it is of Lightning {version}: bring it up to date with python -m"
            " lightning.pytorch.utilities.upgrade_checkpoint"
        )


def _weigh(
    item: Any, most: int, seen: dict[int, tuple[int, int]], level: int = 0
) -> tuple[int, int]:
    """Return how many parts a tree has if it is written out, and how deep it is.

    A part can be in many places: thirty lists of ten times the next make 10^30 parts.
    """
    if not isinstance(item, dict | list | tuple | set):
        return 1, 0
    if level > MOST_LEVELS:
        raise FederationError(f"it is nested more than {MOST_LEVELS} levels deep")
    if id(item) not in seen:
        seen[id(item)] = most, 0  # should it be in itself
        parts, depth = 1, 0
        for each in item.values() if isinstance(item, dict) else item:
            weight, below = _weigh(each, most, seen, level + 1)
            parts, depth = parts + weight, max(depth, below + 1)
            if parts > most or level + depth > MOST_LEVELS:
                raise FederationError("it holds parts that hold each other, over and over")
        seen[id(item)] = parts, depth
    return seen[id(item)]


def _hidden(tree: Any) -> str | None:
    """Say what has attributes of its own, which could hide methods."""
    for item in _parts(tree):
        # Not of a class that a user has told torch to trust.
        is_plain = isinstance(item, dict | list | tuple | set | Tensor)
        own = dict(getattr(item, "__dict__", {})) if is_plain else {}
        metadata = own.pop("_metadata", {}) if isinstance(item, dict) else {}  # of a state_dict
        if fault := fault_of(metadata, {str: {str: WHOLE}}, "_metadata"):
            return fault
        if own:
            return f"{type(item).__name__} has an attribute {shown(next(iter(own)))}"
    return None


def _not_plain(tree: Any, size: int | None) -> str | None:
    """Say what tensor is not simply its numbers."""
    for item in _parts(tree):
        if isinstance(item, Tensor):
            is_plain = type(item) in (Tensor, nn.Parameter) and item.layout == torch.strided
            if not is_plain or item.is_meta or item.is_quantized or item.is_nested:
                return f"a {type(item).__name__} is not simply its numbers"
            if size is not None and item.nbytes > size:
                return f"a tensor of {_shape(item)} is larger than the file"
    return None


def _parts(tree: Any) -> Iterator[Any]:
    """Return all that a tree holds, once each: a part may be in many places, or in itself."""
    todo, seen = [tree], set[int]()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, list | tuple | set):
            todo += item


# --- what is resumed ------------------------------------------------------------------------------


def check_states(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Leave of Lightning's own state what it looks for, and see that it can use it.

    Raises:
        FederationError: If something is of another kind, or a path is not of a checkpoint:
            Lightning removes the best ones of before.
    """
    loops = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
    now = {name: getattr(trainer, name).state_dict() for name in loops}
    checkpoint["loops"] = known(checkpoint.get("loops", {}), now, "loops")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by the connector
        state = checkpoint["callbacks"].get(callback.state_key)
        for kind, kinds in CALLBACKS.items():
            if state is not None and isinstance(callback, kind):
                with blamed(kind.__name__):
                    _refuse(fault_of(state, kinds))
                    if isinstance(callback, ModelCheckpoint):
                        _refuse(_not_its_own(callback, state))


def _not_its_own(callback: ModelCheckpoint, state: Mapping[str, Any]) -> str | None:
    """Say which path leads away from where this callback writes."""
    paths = [state[f"{which}_model_path"] for which in ("best", "kth_best", "last")]
    for path in filter(None, [*paths, *state["best_k_models"]]):
        is_remote = "://" in path and not path.startswith(f"{callback.dirpath}/")
        is_other = not path.endswith(callback.FILE_EXTENSION) or ".." in PurePath(path).parts
        if is_other or is_remote:
            return f"{shown(path)} is not where a checkpoint of this run may be"
    return None


def check_state(state: Any) -> None:
    """Refuse what no ``FederatedLoop`` has saved.

    Raises:
        FederationError: Says what is of another kind.
    """
    _refuse(fault_of(state, STATE))
    if any(isinstance(item, Tensor) and item.requires_grad for item in _parts(state)):
        raise FederationError("a tensor is waiting for a gradient")
    check_packed(state["store"])
    if not 0 <= (lr := state["base_lr"]) <= 1e30:
        raise FederationError(f"'base_lr' is {lr}, which is no learning rate")
    rounds = [row.get("round") for row in state["rows"]]
    if len(rounds) != state["round"] or rounds != list(range(1, len(rounds) + 1)):
        raise FederationError(
            f"'rows' are of the rounds {shown(rounds)}, and 'round' is {state['round']}"
        )


def check_packed(store: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what is not a row of one name for each of a list of clients.

    Raises:
        FederationError: Says what is not.
    """
    seen: dict[str, list[Tensor]] = defaultdict(list)
    for each in store:
        name, clients, rows = each["name"], each["clients"], each["rows"]
        with blamed(f"{shown(name)} in 'store'"):
            if clients.dtype != torch.int64 or clients.ndim != 1 or not rows.ndim:
                raise FederationError(
                    f"it needs a list of clients and a row for each, got {_shape(clients)} and"
                    f" {_shape(rows)}"
                )
            if len(clients) != len(rows):
                raise FederationError(f"{len(clients)} clients have {len(rows)} rows")
            seen[name].append(clients)
            counts = torch.cat(seen[name]).unique(return_counts=True)
            if (twice := counts[0][counts[1] > 1]).numel():
                raise FederationError(f"client {int(twice[0])} has it twice")


def check_round(fit_loop: Mapping[str, Any], round: int) -> None:
    """Refuse progress that is not of a round's start: a resumed run begins with one.

    Raises:
        FederationError: If rounds are in the middle, or others have been.
    """
    for count in fit_loop["epoch_progress"].values():
        ended = count["completed"]  # which Lightning counts after checkpoints are written
        if {**count, "completed": max(ended, round)} != dict.fromkeys(count, round):
            raise FederationError(f"{round} rounds are {shown(count)} epochs of Lightning")
        if ended < round - 1:
            raise FederationError(f"{round} rounds are {ended} epochs of Lightning")
    for name in ("epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"):
        if len(set((count := fit_loop[name]["current"]).values())) > 1:
            raise FederationError(f"it is in the middle of a batch: {shown(count)}")


def check_buffers(
    state: Mapping[str, Tensor], buffers: Mapping[str, tuple[nn.Module, str]]
) -> None:
    """Refuse buffers that the module does not leave out of its own state, or of another shape.

    Raises:
        FederationError: Says which.
    """
    for name, saved in state.items():
        if name not in buffers:
            raise FederationError(f"the module has no non-persistent buffer {shown(name)}")
        owner, key = buffers[name]
        _refuse(fault_of(saved, Tensor if (now := owner._buffers[key]) is None else now, name))


def check_progress(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Do the same for optimisers, schedulers and the scaling of losses, once they are there.

    Raises:
        FederationError: If something is of another kind.
    """
    for name, owners in (
        ("optimizer_states", trainer.optimizers),
        ("lr_schedulers", [config.scheduler for config in trainer.lr_scheduler_configs]),
    ):
        now = [owner.state_dict() for owner in owners]
        found = checkpoint[name] = known(checkpoint.get(name), now, name, keep=True) if now else []
        for owner, state in zip(owners, found, strict=True):
            if shadow := next((k for k in state if callable(getattr(owner, str(k), None))), None):
                raise FederationError(f"{name} has {shown(shadow)}, which is a method")
    for state in checkpoint["optimizer_states"]:
        state["state"] = {}  # a round begins without; what clients keep is in the store
    plugin = trainer.precision_plugin
    if (name := type(plugin).__qualname__) in checkpoint:
        checkpoint[name] = known(checkpoint[name], plugin.state_dict(), name)


def check_rule(rule: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse a state that is of another kind than a rule's; some tables grow with clients.

    Raises:
        FederationError: Says what is of another kind.
    """
    for name, now in rule.state_dict().items():
        if name in state:  # else loading complains
            saved = state[name]
            _refuse(fault_of(saved, Tensor if isinstance(now, Tensor) else type(now), name))
            if isinstance(now, Tensor) and _rough(now) != _rough(saved):
                raise FederationError(f"{name} is {_shape(saved)}, here it is {_shape(now)}")


def check_rows(
    store: Mapping[int, Mapping[str, Tensor]],
    num_clients: int,
    lane: LaneHost,
    transforms: Sequence[UpdateTransform],
) -> None:
    """Refuse what clients could not have kept.

    Raises:
        FederationError: Says whose and what is of another kind.
    """
    like = {f"parameter.{name}": row for name, row in lane.private.items()}
    like |= {f"buffer.{name}": buffer for name, buffer in lane.named_buffers.items()}
    params = [p for group in lane.optimizer.param_groups for p in group["params"]]
    kinds, tried = set(), set()
    for client, rows in store.items():
        _refuse(fault_of(client, range(num_clients), "a client of 'store'"))
        if (all_of_it := _kind(rows)) in kinds:  # as one that has been looked at
            continue
        kinds.add(all_of_it)
        with blamed(f"what client {client} keeps"):
            for name, row in rows.items():
                room, _, rest = name.partition(".")
                at = rest.partition(".")[0]
                if name in like:
                    _refuse(fault_of(row, like[name], name))
                elif room == "optimizer" and at in map(str, range(len(params))):
                    _fits(row, params[int(at)], name)
                elif name in lane.optimizer_state.kept:
                    _refuse(fault_of(row, lane.optimizer_state.kept[name], name))
                elif room != "transform":
                    raise FederationError(f"{shown(name)} is not known here")
            states = {n: row for n, row in rows.items() if n.startswith(OPTIMIZER_ROWS)}
            if states and (kind := _kind(states)) not in tried:
                tried.add(kind)
                _try_optimizer(states, lane)
            for i, transform in enumerate(transforms):
                memory = {
                    name.removeprefix(f"transform.{i}."): row
                    for name, row in rows.items()
                    if name.startswith(f"transform.{i}.")
                }
                # What is in there only the transform knows: it is tried, once for all of a kind.
                kind = (i, *_kind(memory))
                if memory and kind not in tried:
                    tried.add(kind)
                    _try(transform, memory, lane)


def _kind(rows: Mapping[str, Tensor]) -> tuple[Any, ...]:
    return tuple((name, row.shape, row.dtype) for name, row in rows.items())


def _try_optimizer(rows: Mapping[str, Tensor], lane: LaneHost) -> None:
    """Let a copy of the optimizer make a step from what a client keeps of it."""

    def one(param: Tensor) -> Tensor:
        return (param if isinstance(lane, ModuleLane) else param[0]).clone()

    trial, state = lane.optimizer_state.replica(one, every=True)
    try:
        state.load(rows)
        for param in params_of(trial):
            param.grad = torch.zeros_like(param)
        trial.step(lambda: 0.0)
    except Exception as error:  # of many kinds
        name = type(lane.optimizer).__name__
        raise FederationError(f"{name} cannot use it: {one_line(error)}") from error


def _fits(row: Tensor, param: Tensor, name: str) -> None:
    """Refuse a state of an optimiser that is not of a parameter's shape, or less of it."""
    dims = zip(row.shape[::-1], param.shape[::-1], strict=False)
    if row.ndim > param.ndim or any(size not in (1, of) for size, of in dims):
        raise FederationError(f"{name} is {_shape(row)}, its parameter is {_shape(param)}")


def _try(transform: UpdateTransform, memory: Mapping[str, Tensor], lane: LaneHost) -> None:
    update = torch.zeros(lane.num_parameters, dtype=lane.vector.dtype, device=lane.vector.device)
    copies = {name: row.to(update.device, copy=True) for name, row in memory.items()}
    try:
        transform(update, copies, torch.Generator()).view_as(update)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise FederationError(f"{describe(transform)} cannot use it: {one_line(error)}") from error
