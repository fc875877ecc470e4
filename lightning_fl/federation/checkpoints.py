"""State of a federation in checkpoints, and resuming from it.

A file from a stranger is data: it is loaded with ``weights_only=True``. Its state dictionaries are
loaded strictly, and any error of loading becomes one ``FederationError`` that names the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_fl.errors import FederationError
from lightning_fl.federation.fit import Fit, PreparedFit
from lightning_fl.federation.progress import Progress
from lightning_fl.federation.round_boundary import deep_copy
from lightning_fl.federation.run_options import RunOptions
from lightning_fl.federation.table import RoundTable
from lightning_fl.files import error_context, short_repr
from lightning_fl.frozen import complete
from lightning_fl.hooks import overrides, replaced
from lightning_fl.runners import user_module
from lightning_fl.runners.local_tensors import local_tensors
from lightning_fl.store import ClientStore

#: State of the loop in a checkpoint written before the fit has started.
NOT_BEGUN = {"round": 0}
NOT_OF_A_FEDERATION = (
    "it was not written by a federation, so it cannot be resumed: load its parameters into the"
    " module and start a new fit without ckpt_path"
)
#: Attribute of loops and rules that have aggregated a round.
HAS_RUN = "_has_run"
#: What is compared, in words.
IN_WORDS = {
    "checksum": "split of the data over clients, as a checksum,",
    "exchanged": "number of exchanged parameter values",
}


class RunState:
    """Save, compare and restore the state of a run.

    Args:
        options: Options of the run.
        progress: Progress of the run; a checkpoint is loaded into it.
        store: Client state between rounds; a checkpoint is loaded into it.
    """

    def __init__(self, options: RunOptions, progress: Progress, store: ClientStore) -> None:
        self.progress, self._store = progress, store
        self._local_patterns = options.local_parameters
        self._rules: dict[str, Any] = {"aggregator": options.aggregator, "policy": options.policy}
        #: Values by name that must be the same in a resumed run.
        self._identity: Mapping[str, Any] = {}
        #: Options by name that may differ in a resumed run, with a warning.
        self._options: Mapping[str, Any] = {}
        #: Shapes of the policy's buffers at the start of the fit.
        self._shapes: Mapping[str, torch.Size] = {}
        #: The checkpoint to resume, and the state of the loop in it.
        self.checkpoint: dict[str, Any] = {}
        self.pending: dict[str, Any] = {}

    def describe(self, prepared: PreparedFit) -> None:
        """Record the configuration that a checkpoint must match to be resumed.

        Args:
            prepared: The fit that starts.
        """
        self._identity, self._options = prepared.identity(), prepared.described()
        self._shapes = _shapes(self._rules["policy"])

    def identity(self, module: LightningModule) -> dict[str, Any]:
        """Return the values that must be the same in a resumed run."""
        return {
            "number of parameter tensors": len(list(module.parameters())),
            "local parameters": local_tensors(module, self._local_patterns),
            "seed": self.progress.seed,
            **self._identity,
        }

    def state(self, fit: Fit) -> dict[str, Any]:
        """Return the current state of the loop, without the client state."""
        module, progress, policy = fit.runner.module, self.progress, self._rules["policy"]
        if changed := _shapes(policy).items() ^ self._shapes.items():
            raise FederationError(
                f"the buffer {min(changed)[0]} of {type(policy).__name__} has another shape than at"
                " the start of the fit, so that no checkpoint could be resumed: keep what grows in"
                " get_extra_state"
            )
        return {
            **self.identity(module),
            "round": progress.round,
            "steps": progress.steps,
            "rows": list(progress.table.rows),
            "val_loss": progress.val_loss,
            "metrics": progress.metrics,
            "exchanged": fit.runner.num_parameters,
            "base_lr": fit.runner.base_lr,
            "trained": [bool(getattr(part, name)) for part, name in _flags(module)],
            "options": self._options,
            **{name: deep_copy(rule.state_dict()) for name, rule in self._rules.items()},
            "unsaved buffers": deep_copy(unsaved_values(module)),
            # RoundBoundary.dump sets it to the global model if the file has a newer, validated one.
            "server": None,
        }

    def note(self, fit: Fit) -> None:
        """Record a boundary between two rounds: checkpoints describe it until the next one."""
        fit.boundary.note(self.state(fit), self._store.snapshot())

    def begin(self, fit: Fit) -> None:
        """Restore the checkpoint if there is one; otherwise record the start of a new run.

        Raises:
            FederationError: If there is none, and the loop or a rule has been used.
        """
        if fit.trainer.ckpt_path is not None and self.pending != NOT_BEGUN:
            self.restore(fit)
            fit.planner.forget()
            return
        for name, used in {"FederatedLoop": self, **self._rules}.items():
            if vars(used).get(HAS_RUN) and (used is self or used.state_dict()):
                raise FederationError(
                    f"the {name} has the state of an earlier run: to continue, set ckpt_path to its"
                    f" checkpoint; to start a new run, create a new {name}"
                )
        fit.boundary.note_start(dict(NOT_BEGUN))

    def note_run(self) -> None:
        """Record that the loop and the rules have aggregated a round."""
        for used in (self, *self._rules.values()):
            vars(used)[HAS_RUN] = True

    def close_round(self, fit: Fit) -> None:
        """Record the boundary after a round, which all other callbacks have ended."""
        self.note_run()
        metrics = fit.trainer.callback_metrics
        self.progress.table.complete(metrics)
        self.progress.metrics = deep_copy(dict(metrics))
        self.note(fit)

    # --- a checkpoint -----------------------------------------------------------------------------

    def accept(
        self,
        trainer: Trainer,
        module: LightningModule,
        checkpoint: dict[str, Any],
        key: str,
        has_seed: bool,
    ) -> bool:
        """Check a checkpoint, for any stage; return whether a fit resumes it.

        Args:
            trainer: The Trainer that loads the checkpoint.
            module: The module of the run.
            checkpoint: The checkpoint. Entries that Lightning must not restore are removed.
            key: Key of the loop's state in the states of callbacks.
            has_seed: Whether the loop has a seed, which must then be that of the checkpoint.
        """
        states = checkpoint.get("callbacks", {})
        _check_paths(trainer, states)
        if trainer.state.fn != TrainerFn.FITTING:
            if self.progress.round:  # the loop keeps the rounds that it has made
                states.pop(key, None)
            return False
        if (state := states.get(key)) is None:
            raise FederationError(NOT_OF_A_FEDERATION)
        if state == NOT_BEGUN:
            checkpoint |= {"optimizer_states": [], "lr_schedulers": [], "loops": None}
            return False
        self._check_identity(self.identity(user_module(module)), state, has_seed)
        if changed := changes(self._options, state["options"]):
            rank_zero_warn(
                f"resuming {trainer.ckpt_path} with other options: {changed}. The run is resumed,"
                " but a single config does not reproduce it"
            )
        self.checkpoint = checkpoint
        return True

    def _check_identity(
        self, identity: Mapping[str, Any], state: Mapping[str, Any], has_seed: bool = True
    ) -> None:
        """Check that a checkpoint belongs to this federation."""
        for what, now in identity.items():
            if what == "seed" and not has_seed and "PL_GLOBAL_SEED" not in os.environ:
                continue
            if (was := state[what]) != now:
                raise FederationError(
                    f"it belongs to another federation: its {IN_WORDS.get(what, what)} is"
                    f" {was!s:.100}, here it is {now}. To resume, restore it; to start a new run,"
                    " remove ckpt_path"
                )

    def load(self, state: dict[str, Any]) -> None:
        """Load the progress of the run from the state of a checkpoint."""
        self.pending = state
        if state != NOT_BEGUN:
            progress = self.progress
            progress.round, progress.table = state["round"], RoundTable(state["rows"])
            progress.val_loss, progress.metrics = state["val_loss"], state["metrics"]
            progress.seed, progress.steps = state["seed"], state["steps"]
            self._store.load_state_dict(state["store"])

    def restore(self, fit: Fit) -> None:
        """Load the remaining state, which needs the module's shapes or the Trainer's device.

        Args:
            fit: Context of the rounds.

        Raises:
            FederationError: If the state does not fit this run.
        """
        state, checkpoint = self.pending, self.checkpoint
        self.pending, self.checkpoint = {}, {}
        # Loading may raise any exception
        with error_context(f"{fit.trainer.ckpt_path} cannot be resumed", Exception):
            if not state:  # Lightning does not call load_state_dict then
                raise FederationError(NOT_OF_A_FEDERATION)
            self._load(fit, state, checkpoint)

    def _load(self, fit: Fit, state: Mapping[str, Any], checkpoint: dict[str, Any]) -> None:
        module, runner = fit.runner.module, fit.runner
        for callback in fit.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BaseFinetuning):
                # restores parameter groups, which Lightning would do later
                callback.on_fit_start(fit.trainer, module)
        self._check_identity({"exchanged": runner.num_parameters}, state)
        fit.memory.check_stored(runner)
        for optimizer, saved in zip(
            fit.trainer.optimizers, checkpoint["optimizer_states"], strict=True
        ):
            for now, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
                group |= {name: value for name, value in now.items() if name not in group}
        if state["server"] is not None:  # Lightning has loaded the validated model
            completed = {name: checkpoint["state_dict"][name] for name in fit.boundary.left_out}
            checkpoint = {**checkpoint, "state_dict": {**state["server"], **completed}}
            fit.module.on_load_checkpoint(checkpoint)
        named = zip(module.named_parameters(), state["trained"], strict=False)
        frozen = {name for (name, _), is_trained in named if not is_trained}
        exchanged = {*runner.shared, *runner.shared_buffers, *runner.named_counters} - frozen
        if missing := exchanged - {*checkpoint["state_dict"], *unsaved_values(module)}:
            raise FederationError(
                f"it leaves out {min(missing)}, which clients exchange: save the whole state_dict"
                f" of {type(module).__name__}"
            )
        # Load again, as Lightning loads before the precision plugin converts the module.
        with error_context("its model is of another network", RuntimeError):
            module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
        load_unsaved(module, state["unsaved buffers"])
        runner.note_private()
        for name, rule in self._rules.items():
            what = f"{type(rule).__name__} cannot resume from the checkpoint's state"
            with error_context(f"{what}: restore its options, or remove ckpt_path", RuntimeError):
                rule.load_state_dict(state[name])
        # Callbacks freeze parameters in earlier rounds only.
        for (part, name), is_trained in zip(_flags(module), state["trained"], strict=True):
            setattr(part, name, is_trained)
        runner.base_lr = state["base_lr"]


def changes(now: Mapping[str, Any], was: Mapping[str, Any]) -> str:
    """Return a text that names the options that have changed; empty if none has.

    Args:
        now: Options of the run by name.
        was: Options in its checkpoint.

    Example:
        >>> changes({"min_clients": 2, "buffers": "local"}, {"min_clients": 1, "buffers": "local"})
        'min_clients is 2, was 1'
    """
    return "; ".join(
        f"{name} is {value}, was {before}"
        for name, value in now.items()
        if (before := was.get(name)) != value
    )


def load_by_name(trainer: Trainer, module: LightningModule, undo: ExitStack) -> None:
    """Complete checkpoints that the Trainer loads, and name the file in any error of loading.

    Args:
        trainer: The Trainer that may load a checkpoint.
        module: Its module, which has the frozen parameters that checkpoints leave out.
        undo: Clean-up functions, to which those of the replaced methods are added.
    """

    def named(why: str, load: Callable[[], None]) -> Callable[[], None]:
        def wrapped() -> None:
            with error_context(f"{trainer.ckpt_path} cannot be loaded{why}", Exception):
                load()

        return wrapped

    def completed(hook: Callable[[Any], None]) -> Callable[[Any], None]:
        def wrapped(checkpoint: dict[str, Any]) -> None:
            complete(checkpoint, user_module(module))
            hook(checkpoint)

        return wrapped

    connector = trainer._checkpoint_connector
    undo.enter_context(replaced(module, "on_load_checkpoint", completed))
    other = ": the model does not match the checkpoint: configure the model that was saved"
    parts = {"model": other, "datamodule": "", "callbacks": "", "training_state": ""}
    for part, why in parts.items():
        undo.enter_context(replaced(connector, f"restore_{part}", partial(named, why)))


def _check_paths(trainer: Trainer, states: Mapping[str, Any]) -> None:
    """Check that the saved paths, which a callback may remove, are checkpoints of the run."""
    names = ("best_model_path", "kth_best_model_path", "last_model_path")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by the connector
        if not (state := states.get(callback.state_key)) or not isinstance(
            callback, ModelCheckpoint
        ):
            continue
        for path in filter(None, [*map(state.get, names), *state["best_k_models"]]):
            is_remote = "://" in path and not path.startswith(f"{callback.dirpath}/")
            is_other = not path.endswith(callback.FILE_EXTENSION) or ".." in PurePath(path).parts
            if is_other or is_remote:
                raise FederationError(
                    f"{short_repr(path)} is not where a checkpoint of this run may be"
                )


def unsaved_values(module: nn.Module) -> dict[str, Tensor]:
    """Return the non-persistent buffers of a module that are not None, by name."""
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, owner in module.named_modules()
        for name, buffer in owner._buffers.items()  # scripted modules support items() only
        if buffer is not None and name in owner._non_persistent_buffers_set
    }


def load_unsaved(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Load what :func:`unsaved_values` has returned into a module.

    Raises:
        FederationError: If the module has other non-persistent buffers.
    """
    now = unsaved_values(module)
    names = now.keys() | values.keys()
    wrong = [n for n in names if n not in now or n not in values or now[n].shape != values[n].shape]
    if wrong:
        raise FederationError(f"non-persistent buffers are missing or differ: {sorted(wrong)}")
    for name, value in values.items():
        now[name].copy_(value)


def _shapes(policy: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of the saved buffers of a policy; none of one that resizes its own."""
    if any(overrides(part, "_load_from_state_dict", nn.Module) for part in policy.modules()):
        return {}
    saved = policy.state_dict().items()
    return {name: value.shape for name, value in saved if isinstance(value, Tensor)}


def _flags(module: nn.Module) -> list[tuple[Any, str]]:
    """Return the flags of what is trained: parameters and BatchNorm statistics."""
    flags: list[tuple[Any, str]] = [(param, "requires_grad") for param in module.parameters()]
    name = "track_running_stats"
    return flags + [(part, name) for part in module.modules() if name in vars(part)]
