"""State of a federation in checkpoints, and resuming from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_fl.aggregators import Aggregator
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
from lightning_fl.federation.round import Fit
from lightning_fl.federation.table import RoundTable
from lightning_fl.policies import HyperparameterPolicy
from lightning_fl.types import FederationError

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


@dataclass
class Progress:
    """Progress of a run, except its models.

    Args:
        round: Number of finished rounds.
        table: The table of rounds.
        val_loss: Validation loss after the last round; None if unknown.
        monitored: Metrics monitored by schedulers after the last round.
        seed: Seed of the run.
    """

    round: int = 0
    table: RoundTable = field(default_factory=RoundTable)
    val_loss: float | None = None
    monitored: dict[str, float] = field(default_factory=dict)
    seed: int = 0


class Resume:
    """Save, compare and restore the state of a run.

    Args:
        progress: Progress of the run; a checkpoint is loaded into it.
        aggregator: The aggregation rule.
        policy: The hyperparameter policy.
    """

    def __init__(
        self, progress: Progress, aggregator: Aggregator, policy: HyperparameterPolicy
    ) -> None:
        self.progress = progress
        self._rules: dict[str, Any] = {"aggregator": aggregator, "policy": policy}
        #: Values by name that must be the same in a resumed run.
        self._identity: Mapping[str, Any] = {}
        #: Options by name that may differ in a resumed run, with a warning.
        self._options: Mapping[str, Any] = {}
        #: The checkpoint to resume, and the state of the loop in it.
        self.checkpoint: dict[str, Any] = {}
        self.pending: dict[str, Any] = {}

    def describe(self, identity: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Set the description of the run at the start of a fit.

        Args:
            identity: Values by name that must be the same in a resumed run.
            options: Options by name that may differ in a resumed run, with a warning.
        """
        self._identity, self._options = identity, options

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
            "exchanged": fit.runner.num_parameters,
            "base_lr": fit.runner.base_lr,
            "runner": fit.runner.choices(),
            "trained": [bool(getattr(part, name)) for part, name in _flags(module)],
            "options": self._options,
            **{name: frozen(rule.state_dict()) for name, rule in self._rules.items()},
            "unsaved buffers": frozen({n: b for n, b in buffers.items() if b is not None}),
            # Set if the checkpoint contains the model validated before the end of the round.
            "server": None,
        }

    # --- a checkpoint -----------------------------------------------------------------------------

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

    @property
    def is_new(self) -> bool:
        """Whether there is nothing to restore."""
        return not self.pending or self.pending == NOT_BEGUN

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
        if (was := state["exchanged"]) != (now := fit.runner.num_parameters):
            raise FederationError(
                f"its clients exchange {was} parameter values, here they exchange {now}: restore"
                " the network, exchange_frozen, and the parameters frozen at the start"
            )
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
