"""Validation of checkpoints, which may be damaged or untrusted, before they are used."""

from __future__ import annotations

import os
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from packaging.version import InvalidVersion, Version
from torch import Tensor, nn

from lightning_fl.files import archive_size, check_sums, short_repr
from lightning_fl.runners.base import ClientRunner
from lightning_fl.runners.optimizer_state import OPTIMIZER_ROWS
from lightning_fl.runners.optimizer_values import params_of
from lightning_fl.runners.sequential import SequentialRunner
from lightning_fl.transforms import UpdateTransform
from lightning_fl.types import FederationError, describe

COUNT = range(2**63)
_NUMBER = torch.zeros(())
#: Maximum number of objects in a tree (each takes at least one byte), and of nested levels.
MAX_PARTS, MAX_LEVELS = 2**26, 64
#: Types that may replace a number or None.
_SMALL: Any = bool | int | float | str | list | Tensor | None
_KINDS: dict[type, Any] = {int: int | float, float: int | float, NoneType: _SMALL}
#: Entries of a checkpoint that Lightning reads.
_OUTLINE: dict[str, Any] = {
    "pytorch-lightning_version": str,
    "state_dict": {str: object},
    "epoch": COUNT,
    "global_step": COUNT,
    "loops": {str: dict},
    "callbacks": {str: dict},
    "optimizer_states": [dict, ...],
    "lr_schedulers": [dict, ...],
}
#: Entries that Lightning's callbacks read from their states.
_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")
_CALLBACKS: dict[type, dict[str, Any]] = {
    ModelCheckpoint: {
        **dict.fromkeys(_PATHS, str),
        **{"best_model_score": _SMALL, "kth_value": _NUMBER, "best_k_models": {str: _NUMBER}},
    },
    EarlyStopping: {
        **dict.fromkeys(("wait_count", "stopped_epoch", "patience"), COUNT),
        "best_score": _NUMBER,
        "stopping_reason": range(len(EarlyStoppingReason)),
        "stopping_reason_message": str | None,
    },
}
#: State of a ``FederatedLoop``.
STATE: dict[str, Any] = {
    **dict.fromkeys(("seed", "num_clients", "number of parameter tensors"), COUNT),
    **dict.fromkeys(("round", "exchanged"), COUNT),
    **dict.fromkeys(("checksum", "aggregator_class", "policy_class"), str),
    **dict.fromkeys(("buffers", "optimizer_state"), str),
    "aggregator": {str: object},
    "policy": {str: object},
    "rows": [{str: int | float | str}, ...],
    "val_loss": float | None,
    "monitored": {str: float},
    "base_lr": float,
    "runner": {str: bool},
    "trained": [bool, ...],
    "options": {str: int | float | str | list},
    "store": [{"name": str, "clients": Tensor, "rows": Tensor}, ...],
    "unsaved buffers": {str: Tensor},
    "server": dict | None,
}


def compare(saved: Any, like: Any, at: str = "") -> None:
    """Check that a saved value has the structure of an example.

    Args:
        saved: Value from a checkpoint.
        like: The example. Dictionaries and lists are compared entry by entry; the saved dictionary
            may have more names. A tensor stands for tensors of its shape (loading casts them), a
            number for numbers, a text for itself, None for any small value. A type or a union of
            types stands for its instances, a range for integers in it, ``{str: like}`` for a
            dictionary with any names, ``[like, ...]`` for a list of any length. Any dictionary fits
            an empty one, and any list.
        at: Name of the value in error messages.

    Raises:
        FederationError: If the structure differs.

    Example:
        >>> compare({"round": 3, "lr": [0.1, 0.2]}, {"round": range(9), "lr": [float, ...]})
        >>> compare({"round": 3}, {"round": range(2)})
        Traceback (most recent call last):
        lightning_fl.types.FederationError: 'round' must be an integer from 0 to 1, got 3
    """
    match like:
        case dict() | list() | tuple():
            for value, example, there in _entries(saved, like, at):
                compare(value, example, there)
            return
        case range():
            fits = type(saved) is int and saved in like
            allowed = f"an integer from {like[0]} to {like[-1]}"
        case Tensor():
            fits = isinstance(saved, Tensor) and _kind(saved) == _kind(like)
            allowed = _shown(like)
        case str():
            fits, allowed = saved == like, f"{like!r}, as here"
        case _:
            kind = (
                like if isinstance(like, type | UnionType) else _KINDS.get(type(like), type(like))
            )
            fits = _is_a(saved, kind)
            allowed = f"of type {kind.__name__ if isinstance(kind, type) else kind}"
    if not fits:
        raise FederationError(f"{at or 'the state'} must be {allowed}, got {_shown(saved)}")


def _entries(saved: Any, like: Any, at: str) -> Iterator[tuple[Any, Any, str]]:
    """Yield the entries of a container, with the example for each and its name."""
    if isinstance(like, dict):
        compare(saved, type(like), at)
        if like and not isinstance(first := next(iter(like)), str):  # any names of a type
            names = first if isinstance(first, type) else type(first)
            yield from ((name, names, f"each name in {at or 'it'}") for name in saved)
            like = dict.fromkeys(saved, like[first])
        for name, example in like.items():
            there = f"{at}[{short_repr(name)}]" if at else short_repr(name)
            if name not in saved:
                raise FederationError(f"{there} is missing")
            yield saved[name], example, there
        return
    compare(saved, list | tuple, at)
    if not like or like[-1] is ...:
        like = list(like[:1] or [object]) * len(saved)
    if len(saved) != len(like):
        raise FederationError(f"{at} has {len(saved)} entries, here there are {len(like)}")
    pairs = enumerate(zip(saved, like, strict=True))
    yield from ((value, example, f"{at}[{i}]") for i, (value, example) in pairs)


def _is_a(saved: Any, kind: Any) -> bool:
    """Return whether a value has a type. Numbers must fit 64 bits, strings be printable."""
    if isinstance(saved, bool) or kind is object:
        return kind in (bool, object, _SMALL)
    is_usable = not isinstance(saved, str) or saved.isprintable()
    is_usable &= not isinstance(saved, int) or -(2**63) <= saved < 2**63
    is_usable &= not isinstance(saved, Tensor) or kind is not _SMALL or not saved.ndim
    return is_usable and isinstance(saved, kind)


def _shown(value: Any) -> str:
    return f"a tensor of {_shape(value)}" if isinstance(value, Tensor) else short_repr(value)


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _kind(tensor: Tensor) -> tuple[torch.Size, bool]:
    return tensor.shape, tensor.is_floating_point() or tensor.is_complex()


def accept(saved: Any, now: Any, at: str, *, keep: bool = False) -> Any:
    """Adapt a state of Lightning or torch that was saved by another version.

    Args:
        saved: State from a checkpoint.
        now: State of the object that will load it. Names that the saved one lacks are added.
        at: Name of the state in error messages.
        keep: Whether names that only the saved state has are kept; otherwise they are dropped.

    Raises:
        FederationError: If the structure differs otherwise.

    Example:
        >>> accept({"ready": 3, "reset": 0}, {"ready": 0, "completed": 0}, "progress")
        {'ready': 3, 'completed': 0}
    """

    def merge(saved: Any, now: Any) -> Any:
        if isinstance(now, dict) and isinstance(saved, dict) and all(type(k) is str for k in now):
            merged = {name: merge(saved.get(name, own), own) for name, own in now.items()}
            return merged | {k: v for k, v in saved.items() if keep and k not in now}
        if isinstance(now, list) and isinstance(saved, list) and len(saved) == len(now):
            return [merge(value, own) for value, own in zip(saved, now, strict=True)]
        return saved

    merged = merge(saved, now)
    compare(merged, now, at)
    return merged


def check(value: Any, like: Any, what: str) -> None:
    """Check the state of a callback against an example; see :func:`compare`.

    Args:
        value: State from a checkpoint.
        like: The example.
        what: Name of the callback.

    Raises:
        FederationError: If the structure differs.
    """
    with error_context(f"the checkpoint's state of {what} is damaged, or was changed"):
        compare(value, like)


@contextmanager
def error_context(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Re-raise errors as :class:`~lightning_fl.types.FederationError` with a prefix.

    Args:
        what: Prefix of the message.
        kinds: Further exception types to convert.
    """
    try:
        yield
    except FederationError as error:
        raise FederationError(f"{what}: {error}") from error
    except kinds as error:
        raise FederationError(f"{what}: {one_line(error)}") from error


def one_line(error: object) -> str:
    """Return the first 200 characters of a message as one line of printable characters."""
    text = str(error).strip() or type(error).__name__
    return "".join(c if c.isprintable() else " " for c in text)[:200]


# --- the file -------------------------------------------------------------------------------------


def read_checkpoint(
    path: str | os.PathLike[str], load: Callable[[], Any], *, in_full: bool = True
) -> dict[str, Any]:
    """Read and validate a checkpoint.

    Args:
        path: Path of the file, local or remote.
        load: Function that loads the file with ``weights_only=True``.
        in_full: Whether to verify the checksums of the contents.

    Raises:
        FederationError: If the file is damaged, is not a checkpoint of Lightning 2, contains more
            than plain data, or needs more memory than its size.
    """
    size = None
    with error_context(
        f"{path} is damaged, or not a checkpoint", Exception
    ):  # torch.load may raise any exception
        if "://" not in os.fspath(path):
            size = archive_size(path)
        try:
            checkpoint = load()
        except pickle.UnpicklingError as error:
            # Only the cause, as torch's advice is to run the code in the file.
            cause = next((line for line in str(error).splitlines() if "nsupported" in line), error)
            what = str(cause).rpartition("WeightsUnpickler error: ")[2].partition(". ")[0]
            raise FederationError(
                f"it holds more than data: {one_line(what)}. If you trust its source, pass"
                " weights_only=False to Trainer.fit (lightning-fl fit --weights_only=false), which"
                " lets it run code"
            ) from error
        if not isinstance(checkpoint, dict) or "pytorch-lightning_version" not in checkpoint:
            raise FederationError(
                "it is a torch file, but not a checkpoint of Lightning: choose one of a fit"
            )
        check_outline(checkpoint, size)
    if in_full and size is not None:
        check_sums(path)
    return checkpoint


def check_outline(checkpoint: dict[str, Any], size: int | None = None) -> None:
    """Check that a checkpoint contains plain data only and that Lightning can read it.

    Args:
        checkpoint: Contents of the file.
        size: Size of the file in bytes; None if unknown.

    Raises:
        FederationError: If the checkpoint is invalid.
    """
    for name, tree in checkpoint.items():
        for item in _parts(tree, min(size or MAX_PARTS, MAX_PARTS)):
            _check_plain(item)
            # Tensors of the model are checked against the module when they are loaded.
            if isinstance(item, Tensor) and name != "state_dict":
                _check_tensor(item, size)
    names = checkpoint.keys() | {"pytorch-lightning_version", "state_dict"}
    compare(checkpoint, {name: kind for name, kind in _OUTLINE.items() if name in names})
    try:
        version = Version(checkpoint["pytorch-lightning_version"])
    except InvalidVersion as error:
        raise FederationError(one_line(error)) from error
    if version < Version("2.0"):
        raise FederationError(
            f"it is of Lightning {version}: bring it up to date with python -m"
            " lightning.pytorch.utilities.upgrade_checkpoint"
        )


def _parts(tree: Any, most: int = MAX_PARTS) -> Iterator[Any]:
    """Yield all objects of a tree; raise an error if there are too many, as in a cycle."""
    todo, count = [(tree, 0)], 0
    while todo:
        item, level = todo.pop()
        yield item
        if isinstance(item, dict | list | tuple | set):
            count += len(item)
            if count > most or level > MAX_LEVELS:
                raise FederationError(
                    f"it has more parts than bytes, or is nested more than {MAX_LEVELS} levels deep"
                )
            children = item.values() if isinstance(item, dict) else item
            todo += [(child, level + 1) for child in children]


def _check_plain(item: Any) -> None:
    """Check that an object has no attributes, which could override methods."""
    if isinstance(item, dict | list | tuple | set | Tensor):
        attributes = dict(getattr(item, "__dict__", {}))
        if isinstance(item, dict):  # versions in a state_dict
            compare(attributes.pop("_metadata", {}), {str: {str: int}}, "_metadata")
        if attributes:
            name = short_repr(next(iter(attributes)))
            raise FederationError(f"{type(item).__name__} has an attribute {name}")


def _check_tensor(tensor: Tensor, size: int | None) -> None:
    """Check that a tensor is dense and not larger than the file."""
    is_dense = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not is_dense or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        raise FederationError(f"a {type(tensor).__name__} is not simply its numbers")
    if size is not None and tensor.nbytes > size:
        raise FederationError(f"a tensor of {_shape(tensor)} is larger than the file")


# --- what is resumed ------------------------------------------------------------------------------


def check_states(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Compare Lightning's progress and the states of its callbacks with the Trainer's own.

    Args:
        trainer: The Trainer that resumes.
        checkpoint: Contents of the file. Missing entries of the progress are added.

    Raises:
        FederationError: If the structure differs, or if a ``ModelCheckpoint`` would remove a file
            that is not a checkpoint of this run.
    """
    loops = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
    now = {name: getattr(trainer, name).state_dict() for name in loops}
    checkpoint["loops"] = accept(checkpoint.get("loops", {}), now, "loops")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by the connector
        state = checkpoint["callbacks"].get(callback.state_key)
        for kind, like in _CALLBACKS.items():
            if state is not None and isinstance(callback, kind):
                with error_context(kind.__name__):
                    compare(state, like)
                    if isinstance(callback, ModelCheckpoint):
                        _check_paths(callback, state)


def _check_paths(callback: ModelCheckpoint, state: Mapping[str, Any]) -> None:
    """Check that the saved paths, which the callback may remove, are checkpoints of the run."""
    for path in filter(None, [*map(state.get, _PATHS), *state["best_k_models"]]):
        is_remote = "://" in path and not path.startswith(f"{callback.dirpath}/")
        is_other = not path.endswith(callback.FILE_EXTENSION) or ".." in PurePath(path).parts
        if is_other or is_remote:
            raise FederationError(
                f"{short_repr(path)} is not where a checkpoint of this run may be"
            )


def check_state(state: Any) -> None:
    """Check the state of a ``FederatedLoop``.

    Args:
        state: State from a checkpoint.

    Raises:
        FederationError: If a ``FederatedLoop`` cannot have saved this state.
    """
    compare(state, STATE)
    compare(state["server"] or {}, {str: object}, "'server'")
    if any(isinstance(item, Tensor) and item.requires_grad for item in _parts(state)):
        raise FederationError("a tensor requires a gradient")
    if not 0 <= (lr := state["base_lr"]) <= 1e30:
        raise FederationError(f"'base_lr' is {lr}, which is no learning rate")
    rounds = [row.get("round") for row in state["rows"]]
    if len(rounds) != state["round"] or rounds != list(range(1, len(rounds) + 1)):
        raise FederationError(
            f"'rows' are of the rounds {short_repr(rounds)}, and 'round' is {state['round']}"
        )
    seen: dict[str, Counter[int]] = defaultdict(Counter)
    for entry in state["store"]:
        name, clients, rows = entry["name"], entry["clients"], entry["rows"]
        with error_context(f"{short_repr(name)} in 'store'"):
            if not rows.ndim or clients.dtype != torch.int64:
                raise FederationError("it must be a list of clients and a row for each")
            compare(clients, torch.empty(len(rows), dtype=torch.int64, device="meta"), "'clients'")
            seen[name].update(clients.tolist())
            for client, count in seen[name].most_common(1):
                compare(count, range(2), f"the number of rows of client {client}")


def check_round(fit_loop: Mapping[str, Any], round: int) -> None:
    """Check that the progress of Lightning is at the start of a round.

    Args:
        fit_loop: Progress of Lightning's fit loop.
        round: Number of finished rounds of the federation.

    Raises:
        FederationError: If Lightning is inside of a round, or at another number of epochs.
    """
    # Lightning counts an epoch as completed after checkpoints are written.
    ended = {"completed": range(round - 1, round + 1)}
    begun = dict.fromkeys(("ready", "started", "processed"), range(round, round + 1))
    with error_context(f"Lightning's epochs are not the {round} rounds"):
        compare(fit_loop["epoch_progress"], dict.fromkeys(("total", "current"), begun | ended))
    for name in ("epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"):
        if len(set((count := fit_loop[name]["current"]).values())) > 1:
            raise FederationError(f"it is in the middle of a batch: {short_repr(count)}")


def check_progress(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Check the states of optimizers, schedulers and precision against the Trainer's.

    Args:
        trainer: The Trainer that resumes.
        checkpoint: Contents of the file. Missing entries of these states are added.

    Raises:
        FederationError: If the structure differs from the Trainer's.
    """
    for name, owners in (
        ("optimizer_states", trainer.optimizers),
        ("lr_schedulers", [config.scheduler for config in trainer.lr_scheduler_configs]),
    ):
        now = [owner.state_dict() for owner in owners]
        states = accept(checkpoint.get(name), now, name, keep=True) if now else []
        for owner, state in zip(owners, states, strict=True):
            if shadow := next((k for k in state if callable(getattr(owner, str(k), None))), None):
                raise FederationError(f"{name} has {short_repr(shadow)}, which is a method")
        checkpoint[name] = states
    for state in checkpoint["optimizer_states"]:
        state["state"] = {}  # empty between rounds; client state is in the store
    plugin = trainer.precision_plugin
    if (name := type(plugin).__qualname__) in checkpoint:
        checkpoint[name] = accept(checkpoint[name], plugin.state_dict(), name)


def check_buffers(
    state: Mapping[str, Tensor], buffers: Mapping[str, tuple[nn.Module, str]]
) -> None:
    """Check the non-persistent buffers of the module.

    Args:
        state: Saved buffers by name.
        buffers: Owner of each non-persistent buffer of the module, and its name in the owner.

    Raises:
        FederationError: If the module has no such buffer, or its shape differs.
    """
    for name, saved in state.items():
        if name not in buffers:
            raise FederationError(f"the module has no non-persistent buffer {short_repr(name)}")
        owner, key = buffers[name]
        compare(saved, Tensor if (now := owner._buffers[key]) is None else now, name)


def check_rule(rule: nn.Module, state: Mapping[str, Any]) -> None:
    """Check the state of an aggregator or a policy. Sizes of tensors may differ.

    Args:
        rule: The rule that will load the state.
        state: The saved state. Loading checks for missing and unknown names.

    Raises:
        FederationError: If an entry has another type or another number of dimensions.
    """
    for name, now in rule.state_dict().items():
        if name in state:
            saved, like = state[name], now if isinstance(now, Tensor) else type(now)
            if isinstance(saved, Tensor) and isinstance(now, Tensor) and saved.ndim == now.ndim:
                like = torch.empty(saved.shape, dtype=now.dtype, device="meta")  # of any length
            compare(saved, like, name)


def check_rows(
    store: Mapping[int, Mapping[str, Tensor]],
    num_clients: int,
    runner: ClientRunner,
    transforms: Sequence[UpdateTransform],
    of_parts: Mapping[str, Tensor],
) -> None:
    """Check the saved client state: parameters, buffers, optimizer state, memory of transforms.

    Args:
        store: Tensors of each client by name.
        num_clients: Number of clients in the federation.
        runner: Runner of the clients.
        transforms: Update transforms. Their memory is checked in a trial call.
        of_parts: Initial memory of client parts by name.

    Raises:
        FederationError: If a client is unknown, or its state is invalid.
    """
    like = {f"parameter.{name}": row for name, row in runner.private.items()}
    like |= of_parts
    like |= {f"buffer.{name}": buffer for name, buffer in runner.named_buffers.items()}
    like |= runner.optimizer_state.kept
    params = {f"optimizer.{i}": param for i, param in enumerate(params_of(runner.optimizer))}
    checked = set()
    for client, rows in store.items():
        compare(client, range(num_clients), "a client of 'store'")
        kind = tuple((name, row.shape, row.dtype) for name, row in rows.items())
        if kind in checked:  # same structure as a client checked before
            continue
        checked.add(kind)
        with error_context(f"what client {client} keeps"):
            for name, row in rows.items():
                if name in like:
                    compare(row, like[name], name)
                elif (of := ".".join(name.split(".")[:2])) in params:
                    what = f"{name} is {_shape(row)}, its parameter is {_shape(params[of])}"
                    with error_context(what, RuntimeError):
                        row.expand(
                            params[of].shape
                        )  # the shape of the parameter, or broadcastable to it
                elif not name.startswith("transform."):
                    raise FederationError(f"{short_repr(name)} is not known here")
            if learned := {k: row for k, row in rows.items() if k.startswith(OPTIMIZER_ROWS)}:
                with error_context(f"{type(runner.optimizer).__name__} cannot use it", Exception):
                    _try_optimizer(learned, runner)
            for i, transform in enumerate(transforms):
                at = f"transform.{i}."
                if memory := {k.removeprefix(at): v for k, v in rows.items() if k.startswith(at)}:
                    with error_context(f"{describe(transform)} cannot use it", Exception):
                        _try_transform(transform, memory, runner)


def _try_optimizer(rows: Mapping[str, Tensor], runner: ClientRunner) -> None:
    """Run a step with a copy of the optimizer and the saved state of a client."""

    def one(param: Tensor) -> Tensor:
        return (param if isinstance(runner, SequentialRunner) else param[0]).clone()

    trial, state = runner.optimizer_state.replica(one, every=True)
    state.load(rows)
    for param in params_of(trial):
        param.grad = torch.zeros_like(param)
    trial.step(lambda: 0.0)


def _try_transform(
    transform: UpdateTransform, memory: Mapping[str, Tensor], runner: ClientRunner
) -> None:
    """Call a transform with a copy of the saved memory of a client."""
    update = torch.zeros(
        runner.num_parameters, dtype=runner.vector.dtype, device=runner.vector.device
    )
    copies = {name: row.to(update.device, copy=True) for name, row in memory.items()}
    transform(update, copies, torch.Generator()).view_as(update)
