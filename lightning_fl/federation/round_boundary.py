"""Checkpoints of a running fit, which describe the last boundary between two rounds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from lightning_fl.frozen import LEFT_OUT, digest
from lightning_fl.hooks import replaced

#: Returns the client state in the form in which it is saved.
Store = Callable[[], list[dict[str, Any]]]
#: Entries of a checkpoint with Lightning's progress.
PROGRESS = ("epoch", "global_step", "loops", "optimizer_states", "lr_schedulers")
#: Hyperparameters are constant and may contain whole data sets, so they are not copied.
_CONSTANT = (
    LightningModule.CHECKPOINT_HYPER_PARAMS_KEY,
    LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY,
)


class _Boundary:
    """Immutable checkpoint of a boundary.

    Args:
        checkpoint: Checkpoint of Lightning, including the state of the loop.
        store: Returns the client state; None if ``checkpoint`` contains it.
    """

    def __init__(self, checkpoint: dict[str, Any], store: Store | None) -> None:
        self.checkpoint, self.store = checkpoint, store
        #: Whether the module already holds the aggregate of the next round.
        self.is_passed = False


class RoundBoundary:
    """Make every checkpoint during a fit describe the last boundary between two rounds.

    A boundary is recorded at the start of a fit and at the end of each round, after all other
    callbacks and the module. It is replaced by a single assignment, so that a signal handler sees
    either the old or the new boundary. A checkpoint contains no tensor of the running round, with
    two exceptions: the states of callbacks that save files are current, and between aggregation and
    the end of the round, the model is the one that is validated.

    Args:
        trainer: The Trainer of the fit.
        key: Key of the loop's state in the states of callbacks.
    """

    def __init__(self, trainer: Trainer, key: str) -> None:
        self._trainer, self._key = trainer, key
        #: Constant parameters that checkpoints leave out, by name.
        self.left_out: Mapping[str, Tensor] = {}
        self._last: _Boundary | None = None
        self._undo = ExitStack()
        #: Whether a boundary is being recorded, for which the loop adds its state separately.
        self.is_noting = False
        self._lightnings: Callable[[bool | None], dict[str, Any]]
        connector = trainer._checkpoint_connector
        self._lightnings = connector.dump_checkpoint
        # A function, because attributes cannot be set on a bound method.
        dump = replaced(connector, "dump_checkpoint", lambda _: lambda *args: self.dump(*args))
        self._undo.enter_context(dump)

    def close(self) -> None:
        """Restore Lightning's checkpoints. Their progress is still that of the boundary."""
        self._undo.close()
        if self._last is not None:
            kept = {name: self._last.checkpoint[name] for name in PROGRESS if name in self}
            kept["callbacks"] = {self._key: self._last.checkpoint["callbacks"][self._key]}
            self._last = _Boundary(kept, self._last.store)

    def __contains__(self, name: str) -> bool:
        return self._last is not None and name in self._last.checkpoint

    def call_before_checkpoints(self, close: Callable[[], None], undo: ExitStack) -> None:
        """Call ``close`` after all epoch-end hooks except those of ``Checkpoint`` callbacks."""

        def after(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            close()
            return hook(*args, **kwargs)

        # Lightning ends the epoch of its logs next if there are no Checkpoint callbacks.
        hooks: list[tuple[Any, str]] = [(self._trainer._logger_connector, "on_epoch_end")]
        hooks += [(c, "on_train_epoch_end") for c in self._callbacks() if isinstance(c, Checkpoint)]
        for owner, name in hooks:
            undo.enter_context(replaced(owner, name, partial(partial, after)))

    def _callbacks(self) -> list[Any]:
        return self._trainer.callbacks  # type: ignore[attr-defined,no-any-return]

    # --- the boundary -----------------------------------------------------------------------------

    def note(self, state: dict[str, Any], store: Store) -> None:
        """Record a boundary.

        Args:
            state: State of the loop, which must not change afterwards.
            store: Returns the client state at this boundary, whenever it is called.
        """
        checkpoint = self._copy(False)
        for optimizer in checkpoint["optimizer_states"]:
            optimizer["state"] = {}  # empty between rounds; client state is in the store
        checkpoint["callbacks"][self._key] = state
        self._last = _Boundary(checkpoint, store)

    def note_start(self, state: dict[str, Any]) -> None:
        """Record the model before a new run; no callback is asked for a state that is to come."""
        self._last = _Boundary(self._copy(True) | {"callbacks": {self._key: state}}, None)

    def _copy(self, weights_only: bool) -> dict[str, Any]:
        """Return a copy of Lightning's current checkpoint, without the state of the loop."""
        checkpoint = self._now(weights_only)
        constant = {name: checkpoint.pop(name) for name in _CONSTANT if name in checkpoint}
        copied: dict[str, Any] = deep_copy(checkpoint)
        return copied | constant

    def adopt(self, checkpoint: dict[str, Any]) -> None:
        """Use the resumed checkpoint as the boundary until training starts."""
        self._last = _Boundary(_unshared(checkpoint), None)

    def passed(self) -> None:
        """Record that the module holds the new aggregate, which is validated next."""
        assert self._last is not None
        self._last.is_passed = True

    # --- checkpoints ------------------------------------------------------------------------------

    def dump(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint. Replaces Lightning's ``dump_checkpoint``."""
        last = self._last  # read once, as a signal handler may replace it
        if last is None:
            return self._lightnings(weights_only)
        checkpoint: dict[str, Any] = _unshared(last.checkpoint)
        callbacks = checkpoint["callbacks"]
        state = callbacks[self._key] = self._own_state(last)
        for callback in self._callbacks():
            if isinstance(callback, Checkpoint) and (now := callback.state_dict()):
                callbacks[callback.state_key] = deep_copy(now)
        if last.is_passed or weights_only:
            validated = self._now(weights_only)
            if last.is_passed:
                state["server"] = checkpoint["state_dict"]
                checkpoint["state_dict"] = deep_copy(validated["state_dict"])
            if weights_only:
                checkpoint = {k: checkpoint.get(k, value) for k, value in validated.items()}
        if self.left_out:
            checkpoint[LEFT_OUT] = self._of_left_out
        return checkpoint

    @cached_property
    def _of_left_out(self) -> dict[str, Any]:
        dtypes = {name: tensor.dtype for name, tensor in self.left_out.items()}
        return {"digest": digest(self.left_out), "dtypes": dtypes}

    def _now(self, weights_only: bool | None) -> dict[str, Any]:
        """Return Lightning's current checkpoint, without the state of the loop."""
        was, self.is_noting = self.is_noting, True
        try:
            checkpoint = self._lightnings(weights_only)
        finally:
            self.is_noting = was
        for name in self.left_out:
            checkpoint["state_dict"].pop(name, None)
        return checkpoint

    def state(self) -> dict[str, Any]:
        """Return the state of the loop at the boundary."""
        if self._last is None or self.is_noting:
            return {}
        return self._own_state(self._last)

    def _own_state(self, boundary: _Boundary) -> dict[str, Any]:
        state: dict[str, Any] = _unshared(boundary.checkpoint["callbacks"][self._key])
        if boundary.store is not None:
            state["store"] = boundary.store()
        return state

    def progress(self) -> dict[str, Any]:
        """Return the progress for Lightning's checkpoints after a fit."""
        if self._last is None or self.is_noting:
            return {}
        names = (name for name in PROGRESS if name in self)
        found: dict[str, Any] = _unshared({name: self._last.checkpoint[name] for name in names})
        return found


def deep_copy(value: Any) -> Any:
    """Return a deep copy in which tied parameters stay tied.

    Args:
        value: Containers of tensors, numbers and strings. Other objects are copied with
            ``copy.deepcopy``. Objects that cannot be copied are returned unchanged.
    """
    copies: dict[Any, Tensor] = {}  # by memory and shape

    def copied(part: Any) -> Any:
        if isinstance(part, Tensor):
            if part.layout != torch.strided or not part.numel():
                return part.detach().clone()
            place = (part.data_ptr(), part.shape, part.stride(), part.dtype, part.device)
            if place not in copies:
                copies[place] = part.detach().clone()
            return copies[place]
        try:
            return copy.deepcopy(part)
        except Exception:  # deepcopy may raise any exception
            return part

    return _mapped(value, copied)


def _unshared(value: Any) -> Any:
    """Copy containers, but not tensors."""
    return _mapped(value, lambda part: part)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return containers like those of a value, whose other parts are changed by a function."""
    if isinstance(value, dict):
        same = copy.copy(value)  # an OrderedDict with its metadata, a Counter
        for name, item in value.items():
            same[name] = _mapped(item, change)
        return same
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    return change(value)
