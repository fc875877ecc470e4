"""What a checkpoint of a running fit holds: the run as of the last boundary between two rounds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from lightning_fl.hooks import replaced

#: Returns what clients keep, in the form in which it is saved.
Store = Callable[[], list[dict[str, Any]]]
#: What a checkpoint says of Lightning's own progress.
PROGRESS = ("epoch", "global_step", "loops", "optimizer_states", "lr_schedulers")
#: Hyperparameters are constants; they may hold whole data sets, so they are not copied.
_CONSTANT = (
    LightningModule.CHECKPOINT_HYPER_PARAMS_KEY,
    LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY,
)


class _Boundary:
    """A complete checkpoint of a boundary. Nothing in it changes any more.

    Args:
        checkpoint: What Lightning saves, with the loop's state in it.
        store: Adds what clients keep to the loop's state; None if it is in there.
    """

    def __init__(self, checkpoint: dict[str, Any], store: Store | None) -> None:
        self.checkpoint, self.store = checkpoint, store
        #: Whether the module already holds the aggregate of the round that follows.
        self.is_passed = False


class RoundBoundary:
    """Answers every request for a checkpoint during a fit with the last boundary between rounds.

    A boundary is noted at the start of a fit and at the close of each round, after the work of all
    other callbacks and of the module, and replaced by one assignment: a signal handler sees the old
    one or the new one. A request reads no tensor of the running round, so it changes nothing. Only
    two things are of the moment of the request: the states of callbacks that save files, and,
    between a round's aggregation and its close, the model, which is the one that is validated.

    Args:
        trainer: The Trainer of the fit.
        key: Where the loop's state is in the states of callbacks.
    """

    def __init__(self, trainer: Trainer, key: str) -> None:
        self._trainer, self._key = trainer, key
        #: Returns what of the loop's state is chosen once for the whole run, in its first batches.
        self.chosen: Callable[[], dict[str, Any]] = dict
        self._last: _Boundary | None = None
        self._undo = ExitStack()
        #: Whether Lightning is asked for a checkpoint here, and the loop adds its own state.
        self.is_noting = False
        self._lightnings: Callable[[bool | None], dict[str, Any]]
        connector = trainer._checkpoint_connector
        self._lightnings = connector.dump_checkpoint
        # Not the bound method itself, which cannot be given a name.
        dump = replaced(connector, "dump_checkpoint", lambda _: lambda *args: self.dump(*args))
        self._undo.enter_context(dump)

    def close(self) -> None:
        """Let Lightning make its own checkpoints again; their progress remains the boundary's."""
        self._undo.close()
        if self._last is not None:
            kept = {name: self._last.checkpoint[name] for name in PROGRESS if name in self}
            kept["callbacks"] = {self._key: self._last.checkpoint["callbacks"][self._key]}
            self._last = _Boundary(kept, self._last.store)

    def __contains__(self, name: str) -> bool:
        return self._last is not None and name in self._last.checkpoint

    def call_before_checkpoints(self, close: Callable[[], None]) -> None:
        """Call a function at the end of each epoch, after all hooks but those of Checkpoints."""
        after = partial(_after, close)
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Checkpoint):
                self._undo.enter_context(replaced(callback, "on_train_epoch_end", after))
        # Where there are none of them: Lightning calls this next.
        logs = self._trainer._logger_connector
        self._undo.enter_context(replaced(logs, "on_epoch_end", after))

    # --- the boundary -----------------------------------------------------------------------------

    def note(self, state: dict[str, Any], store: Store, *, is_begun: bool = True) -> None:
        """Note that the run is at a boundary.

        Args:
            state: The loop's own state, which nothing changes any more.
            store: Returns what clients keep as of now, whenever it is called.
            is_begun: Whether training has begun. If not, the checkpoint does not hold Lightning's
                progress, so a fit from it begins like a new one, with the sanity check.
        """
        checkpoint = self._now(None)
        constant = {name: checkpoint.pop(name) for name in _CONSTANT if name in checkpoint}
        checkpoint = frozen(checkpoint) | constant
        for optimizer in checkpoint["optimizer_states"]:
            optimizer["state"] = {}  # a round begins without; what clients keep is in the store
        if not is_begun:
            del checkpoint["loops"]
        checkpoint["callbacks"][self._key] = state
        self._last = _Boundary(checkpoint, store)

    def adopt(self, checkpoint: dict[str, Any]) -> None:
        """Take the checkpoint that is being resumed for the boundary, until training begins."""
        self._last = _Boundary(_unshared(checkpoint), None)

    def passed(self) -> None:
        """Note that the module holds the next round's aggregate, which is going to be validated."""
        assert self._last is not None
        self._last.is_passed = True

    # --- checkpoints ------------------------------------------------------------------------------

    def dump(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint; in the place of Lightning's ``dump_checkpoint``."""
        last = self._last  # once: a signal handler may come between
        if last is None:
            return self._lightnings(weights_only)
        checkpoint: dict[str, Any] = _unshared(last.checkpoint)
        callbacks = checkpoint["callbacks"]
        state = callbacks[self._key] = self._own_state(last)
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Checkpoint) and (now := callback.state_dict()):
                callbacks[callback.state_key] = frozen(now)
        if last.is_passed or weights_only:
            validated = self._now(weights_only)
            if last.is_passed:
                state["server"] = checkpoint["state_dict"]
                checkpoint["state_dict"] = frozen(validated["state_dict"])
                for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
                    if getattr(callback, "is_of_the_round", False):
                        callbacks[callback.state_key] = frozen(callback.state_dict())
            if weights_only:
                checkpoint = {k: checkpoint.get(k, value) for k, value in validated.items()}
        return checkpoint

    def _now(self, weights_only: bool | None) -> dict[str, Any]:
        """Return Lightning's own checkpoint of this moment, without the loop's state."""
        was, self.is_noting = self.is_noting, True
        try:
            return self._lightnings(weights_only)
        finally:
            self.is_noting = was

    def state(self) -> dict[str, Any]:
        """Return the loop's state at the boundary."""
        if self._last is None or self.is_noting:
            return {}
        return self._own_state(self._last)

    def _own_state(self, boundary: _Boundary) -> dict[str, Any]:
        state: dict[str, Any] = _unshared(boundary.checkpoint["callbacks"][self._key])
        if boundary.store is not None:
            state["store"] = boundary.store()
        return state | self.chosen()

    def progress(self) -> dict[str, Any]:
        """Return what Lightning's own checkpoint has to say of progress, after a fit."""
        if self._last is None or self.is_noting:
            return {}
        names = (name for name in PROGRESS if name in self)
        found: dict[str, Any] = _unshared({name: self._last.checkpoint[name] for name in names})
        return found


def _after(first: Callable[[], None], hook: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        first()
        return hook(*args, **kwargs)

    return wrapped


def frozen(value: Any, copies: dict[Any, Tensor] | None = None) -> Any:
    """Return a copy that shares nothing with what is saved; parameters that are tied stay so.

    Args:
        value: Containers of tensors, numbers and texts. Of other objects ``copy.deepcopy`` is
            asked; one that cannot be copied stays as it is, and cannot be saved either.
        copies: Of tensors.
    """
    copies = {} if copies is None else copies
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return value.detach().clone()
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        if not value.numel() or key not in copies:
            copies[key] = value.detach().clone()
        return copies[key]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, dict):
        same = copy.copy(value)  # an OrderedDict with its metadata, a Counter
        for name, item in value.items():
            same[name] = frozen(item, copies)
        return same
    if type(value) in (list, tuple):
        return type(value)(frozen(item, copies) for item in value)
    try:
        return copy.deepcopy(value)
    except Exception:  # of many kinds
        return value


def _unshared(value: Any) -> Any:
    """Return new containers of the same tensors."""
    if isinstance(value, dict):
        same = copy.copy(value)
        for name, item in value.items():
            same[name] = _unshared(item)
        return same
    return [_unshared(item) for item in value] if type(value) is list else value
