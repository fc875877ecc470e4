"""State of a federation in checkpoints, and resuming from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_fl.federation.boundary import frozen
from lightning_fl.federation.checkpoint_checks import (
    check_buffers,
    check_progress,
    check_round,
    check_rows,
    check_rule,
    check_state,
    check_states,
    error_context,
    one_line,
)
from lightning_fl.federation.fit import Fit, PreparedFit
from lightning_fl.federation.progress import Progress
from lightning_fl.federation.run_options import RunOptions
from lightning_fl.federation.table import RoundTable
from lightning_fl.store import ClientStore
from lightning_fl.types import FederationError, describe

#: State of the loop in a checkpoint written before the fit has started.
NOT_BEGUN = {"round": 0}
#: Remedies if a checkpoint belongs to another federation.
REMEDIES = {
    "seed": "set seed_everything to the value in the checkpoint",
    "checksum": "restore the original data, partition options and seed",
    "aggregator_class": "restore the original aggregator",
    "policy_class": "restore the original policy",
    "number of parameter tensors": "restore the original network and objective terms",
}


class Resume:
    """Save, compare and restore the state of a run.

    Args:
        options: Options of the run.
        progress: Progress of the run; a checkpoint is loaded into it.
        store: Client state between rounds; a checkpoint is loaded into it.
    """

    def __init__(self, options: RunOptions, progress: Progress, store: ClientStore) -> None:
        self.progress, self._store = progress, store
        self._rules: dict[str, Any] = {"aggregator": options.aggregator, "policy": options.policy}
        #: Values by name that must be the same in a resumed run.
        self._identity: Mapping[str, Any] = {}
        #: Options by name that may differ in a resumed run, with a warning.
        self._options: Mapping[str, Any] = {}
        #: The checkpoint to resume, and the state of the loop in it.
        self.checkpoint: dict[str, Any] = {}
        self.pending: dict[str, Any] = {}

    def describe(self, prepared: PreparedFit) -> None:
        """Record the configuration that a checkpoint must match to be resumed.

        Args:
            prepared: The fit that starts.
        """
        options, planner, federation = prepared.options, prepared.planner, prepared.federation
        self._identity = {
            "num_clients": planner.num_clients,
            "checksum": prepared.checksum,
            "aggregator_class": type(options.aggregator).__name__,
            "policy_class": type(options.policy).__name__,
            "buffers": options.buffer_policy,
            "optimizer_state": options.optimizer_state,
        }
        self._options = {
            "clients in a round": planner.cohort_size,
            "min_clients": federation.min_clients,
            "on_client_error": options.on_client_error,
            "sampler": describe(options.sampler),
            "aggregator": describe(options.aggregator),
            "policy": describe(options.policy),
            "update_transforms": [describe(transform) for transform in options.update_transforms],
            "batches in a local epoch": int(planner.batches_per_epoch.sum()),
            "faults and attacks": [describe(watcher) for watcher in prepared.watchers],
        }

    def identity(self, module: nn.Module) -> dict[str, Any]:
        """Return the values that must be the same in a resumed run."""
        count = len(list(module.parameters()))
        return {"number of parameter tensors": count, "seed": self.progress.seed, **self._identity}

    def state(self, fit: Fit) -> dict[str, Any]:
        """Return the current state of the loop, without the client state."""
        module, progress = fit.runner.module, self.progress
        buffers = {
            name: owner._buffers[key] for name, (owner, key) in unsaved_buffers(module).items()
        }
        return {
            **self.identity(module),
            "round": progress.round,
            "rows": list(progress.table.rows),
            "val_loss": progress.val_loss,
            "monitored": progress.monitored,
            "base_lr": fit.runner.base_lr,
            "runner": fit.runner.choices(),
            "trained": [bool(getattr(part, name)) for part, name in _flags(module)],
            "options": self._options,
            **{name: frozen(rule.state_dict()) for name, rule in self._rules.items()},
            "unsaved buffers": frozen({n: b for n, b in buffers.items() if b is not None}),
            # Set if the checkpoint contains the model validated before the end of the round.
            "server": None,
        }

    def note(self, fit: Fit, *, is_begun: bool = True) -> None:
        """Record a boundary between two rounds: checkpoints describe it until the next one.

        Args:
            fit: Objects of the fit.
            is_begun: Whether training has started.
        """
        fit.boundary.note(self.state(fit), self._store.snapshot(), is_begun=is_begun)

    def begin(self, fit: Fit) -> None:
        """Restore the checkpoint if there is one; otherwise record the boundary before the fit."""
        if (path := fit.trainer.ckpt_path) is None or self.pending == NOT_BEGUN:
            self.note(fit, is_begun=False)
            return
        if not self.pending:  # Lightning does not call load_state_dict then
            raise not_of_a_federation(fit.trainer)
        with error_context(f"{path} cannot be resumed"):
            self.restore(fit)
        fit.planner.forget()

    def close_round(self, fit: Fit) -> None:
        """Record the boundary after a round, which all other callbacks have ended."""
        metrics = fit.trainer.callback_metrics
        self.progress.table.complete(metrics)
        self.progress.monitored = fit.schedulers.monitored(metrics)
        self.note(fit)
        self._store.release()

    # --- a checkpoint -----------------------------------------------------------------------------

    def accept(
        self, trainer: Trainer, module: nn.Module, checkpoint: dict[str, Any], key: str, seed: Any
    ) -> bool:
        """Check a checkpoint, for any stage; return whether a fit resumes it.

        Args:
            trainer: The Trainer that loads the checkpoint.
            module: The module of the run.
            checkpoint: The checkpoint. Entries that Lightning must not restore are removed.
            key: Key of the loop's state in the states of callbacks.
            seed: Seed of the loop; None if it is not set.
        """
        state, is_fit = checkpoint["callbacks"].get(key), trainer.state.fn == TrainerFn.FITTING
        if state == NOT_BEGUN and is_fit:
            checkpoint |= {"optimizer_states": [], "lr_schedulers": []}
            checkpoint.pop("loops", None)
            return False
        is_begun = "loops" in checkpoint
        check_contents(trainer, checkpoint, state)
        if not is_fit:
            return False
        self.check(trainer, module, checkpoint, state, seed is not None)
        if not is_begun:  # Lightning also starts from epoch 0
            del checkpoint["loops"]
        return True

    def check(
        self,
        trainer: Trainer,
        module: nn.Module,
        checkpoint: dict[str, Any],
        state: Any,
        has_seed: bool,
    ) -> None:
        """Check that a checkpoint belongs to this federation, and warn if options differ.

        Args:
            trainer: The Trainer that resumes.
            module: The module of the run.
            checkpoint: The checkpoint.
            state: State of the loop in it; None if it has none.
            has_seed: Whether the seed of the run is set. It must then be that of the checkpoint.

        Raises:
            FederationError: If the checkpoint is damaged or belongs to another federation.
        """
        if state is None:
            raise not_of_a_federation(trainer)
        with error_context(f"{trainer.ckpt_path} is damaged, or was changed"):
            check_round(checkpoint["loops"]["fit_loop"], state["round"])
        for what, now in self.identity(module).items():
            if what == "seed" and not has_seed and "PL_GLOBAL_SEED" not in os.environ:
                continue
            if (was := state[what]) != now:
                raise FederationError(
                    f"{trainer.ckpt_path} belongs to another federation: its {what} is"
                    f" {was!s:.100}, here it is {now}. To resume,"
                    f" {REMEDIES.get(what, f'restore the original {what}')}; to start a new run,"
                    " remove ckpt_path"
                )
        changed = [
            f"{name} is {value}, was {was}"
            for name, value in self._options.items()
            if (was := state["options"].get(name)) != value
        ]
        if changed:
            rank_zero_warn(
                f"resuming {trainer.ckpt_path} with other options: {'; '.join(changed)}. The run"
                " is resumed, but a single config does not reproduce it"
            )
        self.checkpoint = checkpoint

    def load(self, state: dict[str, Any]) -> None:
        """Load the progress of the run from the state of a checkpoint."""
        self.pending = state
        if state != NOT_BEGUN:
            progress = self.progress
            progress.round, progress.table = state["round"], RoundTable(state["rows"])
            progress.val_loss, progress.monitored = state["val_loss"], state["monitored"]
            progress.seed = state["seed"]
            self._store.load_state_dict(state["store"])

    def restore(self, fit: Fit) -> None:
        """Load the remaining state, which needs the module's shapes or the Trainer's device."""
        state, checkpoint = self.pending, self.checkpoint
        self.pending, self.checkpoint = {}, {}
        module, runner = fit.runner.module, fit.runner
        # Check everything before anything is loaded.
        self._check_restored(fit, state, checkpoint)
        if state["server"] is not None:  # Lightning has loaded the validated model
            checkpoint = {**checkpoint, "state_dict": state["server"]}
            fit.module.on_load_checkpoint(checkpoint)
        # Load again, as Lightning loads before the precision plugin converts the module.
        try:
            module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
        except RuntimeError as error:
            raise FederationError(f"its model is of another network: {one_line(error)}") from error
        buffers = unsaved_buffers(module)
        for name, saved in state["unsaved buffers"].items():
            owner, key = buffers[name]
            if (buffer := owner._buffers[key]) is None:
                owner._buffers[key] = saved.to(module.device, copy=True)
            else:
                buffer.copy_(saved)
        for name, rule in self._rules.items():
            try:
                rule.load_state_dict(state[name])
            except RuntimeError as error:
                raise FederationError(
                    f"{type(rule).__name__} cannot resume from the checkpoint's state, because its"
                    " options have changed: restore them, or remove ckpt_path"
                ) from error
        _train_only(module, state["trained"])
        runner.base_lr = state["base_lr"]
        runner.choose(state["runner"])

    def _check_restored(
        self, fit: Fit, state: Mapping[str, Any], checkpoint: dict[str, Any]
    ) -> None:
        policy = self._rules["policy"]
        if "val_loss" in policy.learns_from and state["round"] and state["val_loss"] is None:
            raise FederationError(f"{type(policy).__name__} needs 'val_loss', which is null")
        for callback in fit.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(
                callback, BaseFinetuning
            ):  # restores parameter groups, which Lightning would do later
                callback.on_fit_start(fit.trainer, fit.runner.module)
        check_progress(fit.trainer, checkpoint)
        memory = fit.memory
        check_rows(
            memory.store.rows,
            fit.planner.num_clients,
            fit.runner,
            memory.transforms,
            memory.like(),
        )
        check_buffers(state["unsaved buffers"], unsaved_buffers(fit.runner.module))
        for name, rule in self._rules.items():
            with error_context(f"{type(rule).__name__} cannot resume"):
                check_rule(rule, state[name])


def check_contents(trainer: Trainer, checkpoint: dict[str, Any], state: Any) -> None:
    """Check the contents of a checkpoint, for any stage.

    Args:
        trainer: The Trainer that loads the checkpoint.
        checkpoint: The checkpoint.
        state: State of the loop in it; None if it has none.

    Raises:
        FederationError: If the checkpoint is damaged.
    """
    with error_context(f"{trainer.ckpt_path} is damaged, or was changed"):
        check_states(trainer, checkpoint)
        if state is not None and state != NOT_BEGUN:
            check_state(state)


def not_of_a_federation(trainer: Trainer) -> FederationError:
    """Return the error for a checkpoint that was not written by a federation."""
    return FederationError(
        f"{trainer.ckpt_path} was not written by a federation, so it cannot be resumed:"
        " load its parameters into the module and start a new fit without ckpt_path"
    )


def unsaved_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the owner of each non-persistent buffer of a module, and its name in the owner."""
    return {
        f"{path}.{name}" if path else name: (owner, name)
        for path, owner in module.named_modules()
        for name, _ in owner._buffers.items()  # scripted modules support items() only
        if name in owner._non_persistent_buffers_set
    }


def _flags(module: nn.Module) -> list[tuple[Any, str]]:
    """Return the flags of what is trained: parameters and BatchNorm statistics."""
    flags: list[tuple[Any, str]] = [(param, "requires_grad") for param in module.parameters()]
    name = "track_running_stats"
    return flags + [(part, name) for part in module.modules() if name in vars(part)]


def _train_only(module: LightningModule, trained: list[bool]) -> None:
    """Restore which parameters are frozen, as callbacks freeze them in earlier rounds only."""
    flags = _flags(module)
    if len(flags) != len(trained):
        raise FederationError(f"'trained' has {len(trained)} entries, here there are {len(flags)}")
    for (part, name), is_trained in zip(flags, trained, strict=True):
        setattr(part, name, is_trained)
