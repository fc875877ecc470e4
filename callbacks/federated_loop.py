"""One ``Trainer.fit`` as a whole federation."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

from lightning_fl.aggregators import Aggregator, FedAvg
from lightning_fl.callbacks import privacy
from lightning_fl.callbacks.boundary import RoundBoundary, frozen
from lightning_fl.callbacks.checkpoint import AtomicCheckpointIO, RoundCheckpoint
from lightning_fl.callbacks.checkpoint_checks import (
    blamed,
    check_buffers,
    check_progress,
    check_round,
    check_rows,
    check_rule,
    check_state,
    check_states,
    one_line,
)
from lightning_fl.callbacks.checks import (
    check_module,
    check_network,
    check_smallest_batch,
    check_trainer,
    has_running_statistics,
    one_optimizer,
)
from lightning_fl.callbacks.dropped import (
    check_causes,
    count_causes,
    describe_dropped,
    summarize_dropped,
)
from lightning_fl.callbacks.hyperparameters import RoundLog, log_hyperparameters, named
from lightning_fl.callbacks.schedulers import Schedulers, ScheduleState, stepping_batches
from lightning_fl.callbacks.table import RoundTable
from lightning_fl.federation.measures import Measures, evaluating
from lightning_fl.federation.plan import Planner
from lightning_fl.federation.processes import processes_of
from lightning_fl.files import FolderLock
from lightning_fl.functional.randomness import (
    Purpose,
    derive_seed,
    generator,
    rng_state,
    run_seed,
    seed_rng,
    seeded_rng,
    set_rng_state,
)
from lightning_fl.hooks import Method, replaced
from lightning_fl.lanes import BufferPolicy, Lanes, flat, lane_host
from lightning_fl.policies import HyperParameterPolicy, RandomPolicy, Schedule
from lightning_fl.samplers import ClientSampler, UniformSampler, how_drawn
from lightning_fl.store import ClientStore
from lightning_fl.strategies import ClientLogs, ClientParallelStrategy
from lightning_fl.transforms import Message, UpdateTransform
from lightning_fl.types import (
    ClientUpdate,
    Cohort,
    FederatedData,
    FederationError,
    Feedback,
    RoundPlan,
    ServerState,
    Step,
    check_package,
    describe,
)


class FederatedLoop(Callback):
    """Make each training epoch a communication round of federated learning.

    A round draws its clients and their hyper-parameters, trains client after client from the
    server's parameters (one training batch is one local step), and puts the aggregate into the
    module before Lightning validates: validation, test, checkpoints and export see the server's
    model. It works with any LightningModule that uses automatic optimisation, unchanged, and needs
    a :class:`~lightning_fl.datamodules.FederatedDataModule`.

    Args:
        participation: Who takes part in a round: a fraction in (0, 1] or a whole number of clients.
            ``1.0`` is everyone, ``1`` is one client.
        aggregator: The server's rule; None is :class:`~lightning_fl.aggregators.FedAvg`.
        policy: Hyper-parameters of rounds and clients; None is one local epoch at the module's own
            learning rate.
        sampler: Draws the cohort; None is uniform.
        min_clients: With fewer usable updates the server keeps its model for the round.
        on_client_error: What to do with an update that is lost or not finite: ``skip`` drops,
            counts and names it, ``raise`` ends the run. An exception in a client's step always ends
            it.
        optimizer_state: ``reset`` gives a client a fresh optimiser each round; ``keep`` lets each
            client keep its own (memory and checkpoint then grow with the number of clients).
        buffers: What becomes of a module's buffers after a client. ``average``: floating buffers
            are averaged like parameters, integer ones keep their maximum. ``server``: the server
            keeps its own. ``local``: each client keeps its own, the server the average. None is
            ``average``, with a warning where the module has running statistics.
        monitor: The validation loss that policies learn from.
        table: File of the table of rounds, beside the logger's files; None writes none.
        seed: The run's seed; None is that of ``seed_everything``, else the checkpoint's, else 0.
        transforms: What happens to each client's update on its way to the server, in order:
            compression, for example.
        client_memory: GiB of what clients keep from round to round that stay in memory; with more,
            all of it is in a file in the Trainer's ``default_root_dir`` while the run lasts.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if the Trainer, the
            module, the data or the checkpoint do not fit a federation.

    Example:
        >>> loop = FederatedLoop(participation=0.1, policy=Schedule(lr=0.1, local_epochs=5))
        >>> loop.round, loop.rows
        (0, [])
    """

    def __init__(
        self,
        participation: int | float = 1.0,
        aggregator: Aggregator | None = None,
        policy: HyperParameterPolicy | None = None,
        sampler: ClientSampler | None = None,
        *,
        min_clients: int = 1,
        on_client_error: Literal["skip", "raise"] = "skip",
        optimizer_state: Literal["reset", "keep"] = "reset",
        buffers: BufferPolicy | None = None,
        monitor: str = "val_loss",
        table: str | None = "rounds.csv",
        seed: int | None = None,
        transforms: Sequence[UpdateTransform] = (),
        client_memory: float = 1.0,
    ) -> None:
        is_count = isinstance(participation, int | np.integer) and participation >= 1
        is_fraction = isinstance(participation, float | np.floating) and 0 < participation <= 1
        if isinstance(participation, bool) or not (is_count or is_fraction):
            raise FederationError(
                "participation must be a fraction in (0, 1] or a whole number of clients from 1 up,"
                f" got {participation!r}"
            )
        if not isinstance(min_clients, int | np.integer) or min_clients < 1:
            raise FederationError(
                f"min_clients must be a whole number from 1 up, got {min_clients!r}"
            )
        for name, rule, kind in (
            ("aggregator", aggregator, Aggregator),
            ("policy", policy, HyperParameterPolicy),
            ("sampler", sampler, ClientSampler),
        ):
            if rule is not None and not isinstance(rule, kind):
                hint = f": write {rule.__name__}()" if isinstance(rule, type) else ""
                raise FederationError(f"{name} must be a {kind.__name__}, got {rule!r}{hint}")
        for name, value, allowed in (
            ("on_client_error", on_client_error, ("skip", "raise")),
            ("optimizer_state", optimizer_state, ("reset", "keep")),
            ("buffers", buffers, ("average", "server", "local", None)),
        ):
            if value not in allowed:
                raise FederationError(f"{name} must be one of {allowed}, got {value!r}")
        for transform in transforms:
            if not isinstance(transform, UpdateTransform):
                raise FederationError(f"transforms must be UpdateTransforms, got {transform!r}")
        if not client_memory >= 0:
            raise FederationError(f"client_memory must be at least 0 GiB, got {client_memory!r}")
        self.participation: int | float = int(participation) if is_count else float(participation)
        self.min_clients = int(min_clients)
        self.aggregator, self.policy = aggregator or FedAvg(), policy or Schedule()
        self.sampler = sampler or UniformSampler()
        self.on_client_error, self.optimizer_state = on_client_error, optimizer_state
        self.buffers, self.monitor, self.table, self.seed = buffers, monitor, table, seed
        self.transforms = list(transforms)
        #: Rounds that ended.
        self.round = 0
        self.rounds = RoundTable()
        self.store = ClientStore(most=client_memory * 2**30)
        self.val_loss: float | None = None
        self._plan: RoundPlan | None = None
        self._round: _Round | None = None
        #: What the batch is that is fetched or trained on; None between rounds.
        self._step: Step | None = None
        #: The plan of the round that ended last, for callbacks; None if it was cut short.
        self.plan_of_the_round: RoundPlan | None = None
        self._pending: dict[str, Any] = {}
        #: Folders that no other run may write to, until the fit ends.
        self._folders: set[Path] = set()
        #: What checkpoints hold; from the start of a fit on.
        self._boundary: RoundBoundary | None = None
        #: Whether the round is over for the loop, but not yet for all other callbacks.
        self._is_closing = False
        self._monitored: dict[str, float] = {}
        self._seed = 0
        self._checkpoint: dict[str, Any] = {}
        self._first_round = 0  # of this fit
        #: Whether this fit has warned of dropped updates, and of rounds without enough of them.
        self._warned_of_drops = self._warned_of_few = False
        #: What is put back when a fit ends, however it ends, the last first.
        self.undo = ExitStack()
        #: Metrics that do not wait for other processes, during a validation that each repeats.
        self._alone = ExitStack()
        self._repeats_validation = False

    @property
    def state_key(self) -> str:
        """Its place in checkpoints; a child class finds that of its parent."""
        return FederatedLoop.__qualname__

    # --- before the first round -------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what breaks rounds, and set what rounds need on the Trainer."""
        check_package(trainer, Trainer)
        user = user_module(pl_module)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # not a user's own
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        if stage != "fit":
            self.aggregator.prepare(user)
            return
        is_vectorized = isinstance(pl_module, Lanes) and pl_module.reason is None
        self._lanes = pl_module if isinstance(pl_module, Lanes) and is_vectorized else None
        check_trainer(trainer, is_vectorized)
        check_module(user)
        data = trainer.datamodule  # type: ignore[attr-defined]  # set by the data connector
        if not isinstance(data, FederatedData):
            raise FederationError(
                "FederatedLoop needs to know which samples belong to which client: pass"
                " Trainer.fit(module, datamodule=FederatedDataModule(train, val, test, ...)),"
                f" got {type(data).__name__}"
            )
        # Once: the digest reads every index, and every checkpoint holds it.
        self._checksum = data.checksum
        parallel = trainer.strategy
        self._parallel = parallel if isinstance(parallel, ClientParallelStrategy) else None
        self._processes = processes_of(trainer)
        self._planner = Planner(
            trainer,
            data,
            self.policy,
            self.sampler,
            self.participation,
            self._lanes,
            self._processes,
        )
        n = self._planner.num_clients
        if (told := self.aggregator.num_clients) not in (None, n):
            raise FederationError(
                f"{type(self.aggregator).__name__} is told num_clients={told}, the federation has"
                f" {n}: leave it out"
            )
        self.aggregator.num_clients = n
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        #: Callbacks that see updates on their way to the server.
        self._watchers = [c for c in callbacks if callable(getattr(c, "on_client_updates", None))]
        self._options = self._describe_options()
        takes_part = self._planner.cohort_size
        if takes_part < self.min_clients and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            raise FederationError(
                f"min_clients={self.min_clients}, but only {takes_part} clients take part"
                f" in a round (participation={self.participation}): lower one or raise the other"
            )
        if takes_part < (least := self.aggregator.least_clients):
            raise FederationError(
                f"{describe(self.aggregator)} needs {least} clients in a round, and {takes_part}"
                f" take part (participation={self.participation}): raise it, or choose another rule"
            )
        check_network(trainer, user, data)
        check_smallest_batch(user, data)
        if self.policy.needs_credits and getattr(data, "val", None) is None:
            raise FederationError(
                f"{type(self.policy).__name__} learns from the gradient of the validation loss, and"
                " the server has no validation samples: set val_size"
            )
        wants: list[Any] = [self.aggregator] * self.aggregator.needs_losses
        wants += [self.policy] * self.policy.needs_credits
        if wants and not callable(getattr(user, "federated_losses", None)):
            raise FederationError(
                f"{type(wants[0]).__name__} looks at the losses of samples, and"
                f" {type(user).__name__} has no method federated_losses(batch) that returns each"
                " sample's: write one, or use a ClientModule"
            )
        if self.aggregator.replaces_network:
            if self.policy.needs_credits:
                raise FederationError(
                    f"{type(self.policy).__name__} looks at the gradient of the server's model, and"
                    f" {type(self.aggregator).__name__} replaces its network: choose another policy"
                )
            self.aggregator.class_counts = getattr(data, "class_counts", None)
            with evaluating(user), seeded_rng(0, user.device):  # dropout would be a difference
                self.aggregator.prepare(user, data.example())
        if self.aggregator.is_private:
            privacy.check_options(
                self.aggregator, self.policy, self.min_clients, self.on_client_error
            )
        if self.buffers is None and has_running_statistics(user):
            rank_zero_warn(
                "the module keeps running statistics (BatchNorm) and clients change them:"
                " FederatedLoop averages them. Choose buffers='average', 'server' or 'local' to say"
                " what you want"
            )
        if self._boundary is not None:  # of a fit that an exception has ended
            self._boundary.close()
        self._boundary, self._is_closing = RoundBoundary(trainer, self.state_key), False
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        # First, so that the others see each client loaded at its first batch, and the round closed.
        others = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [self, *others]  # type: ignore[attr-defined]
        self._log_every_n_steps = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self.undo.callback(setattr, trainer, "log_every_n_steps", self._log_every_n_steps)
        self._trainer = trainer
        if "://" not in (folder := str(trainer.default_root_dir)):  # else no place for a file
            self.store.folder = folder
        if self.policy.needs_val_loss:
            trainer.num_sanity_val_steps = math.inf
        self._seed = run_seed(self.seed)
        for each in self.policy.modules():
            if isinstance(each, RandomPolicy):
                each.run_seed = self._seed
        self._plan, self._round = None, None
        if (path := self.table_path(trainer)) is not None:
            self._hold(trainer, path.parent)
        self._data = data
        if self._processes.share_samples and self._lanes is not None:
            raise FederationError(
                f"{type(parallel).__name__} shares the samples of one client over processes, Lanes"
                " trains many clients in each: choose strategy='client_parallel', or leave Lanes"
            )
        if self._processes.share_samples and self.aggregator.replaces_network:
            raise FederationError(
                f"{type(self.aggregator).__name__} replaces the module's network, which"
                f" {type(parallel).__name__} has to know beforehand: choose"
                " strategy='client_parallel'"
            )
        for rule in self.aggregator.modules():  # of a Staged, too
            if isinstance(rule, Aggregator):  # else each process has had the whole sum already
                rule.distributed_available_fn = (
                    _never if self._processes.share_samples else jit_distributed_available
                )
        self.undo.enter_context(one_optimizer(pl_module))
        self.undo.enter_context(
            stepping_batches(
                trainer, lambda: self._planner.stepping_batches(self._seed, self.round)
            )
        )
        data.plan = self.plan
        self.undo.callback(setattr, data, "plan", None)

    def _hold(self, trainer: Trainer, folder: str | Path) -> None:
        """Let no other run write to a folder while the fit lasts."""
        folder = Path(folder).absolute()
        if trainer.is_global_zero and folder not in self._folders and "://" not in str(folder):
            lock = FolderLock(folder)
            self._folders.add(folder)
            self.undo.callback(self._folders.discard, folder)
            self.undo.callback(lock.release)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take hold of the module's tensors and of its optimiser."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by the connector
            is_writing = isinstance(callback, RoundCheckpoint) and not trainer.fast_dev_run  # type: ignore[attr-defined]
            if is_writing and callback.dirpath is not None:
                self._hold(trainer, callback.dirpath)
        self.aggregator.withdraw()
        self.lane = lane_host(
            pl_module,
            self.buffers or "average",
            trainer.optimizers[0],
            self.optimizer_state == "keep",
        )
        self.undo.callback(self.lane.close)
        self._measures = Measures(trainer, self._data, self._seed, self._processes)
        self.schedulers = Schedulers(trainer)
        self._repeat_validation(trainer)
        server = self.lane.read().vector
        self.policy.to(server.device)
        has_buffers = sum(self.lane.vector.sizes) > self.lane.num_parameters
        has_buffers |= len(self.lane.counters.sizes) > 0
        if self.aggregator.is_private and has_buffers and self.buffers != "server":
            raise FederationError(
                f"{type(self.aggregator).__name__} cannot protect buffers that clients change"
                " (BatchNorm's running statistics, counters): set buffers='server', which keeps"
                " the server's, or use a network without them"
            )
        n = self._planner.num_clients
        key = 0
        if self.aggregator.is_private:
            privacy.check_training(self.aggregator, trainer)
            key = privacy.noise_key(trainer, self.lane.module, *self._computed_from())
        drawn = how_drawn(self.sampler)
        self.aggregator.cohort = Cohort(self._planner.cohort_size, n, drawn, self._seed, key)
        self.aggregator.num_parameters = self.lane.num_parameters
        self.aggregator.to(server.device).start(server)
        is_new = trainer.ckpt_path is None or self._pending == NOT_BEGUN
        if not is_new:
            if not self._pending:  # Lightning asks nobody where the file has no callbacks
                raise _not_of_a_federation(trainer)
            with blamed(f"{trainer.ckpt_path} cannot be resumed"):
                self._restore(trainer, pl_module)
        self._pending = {}
        boundary = self._noted
        boundary.chosen = self._chosen
        boundary.call_before_checkpoints(self._note_close)
        if is_new:
            boundary.note(self._state(), self.store.snapshot(), is_begun=False)

    def _repeat_validation(self, trainer: Trainer) -> None:
        """Let each process validate on all samples, where what it finds acts on the run.

        The same batches as in one process, of which nothing is reduced: else the last bits would
        depend on the number of processes, and the run with them.
        """
        acts = type(self.policy).update is not HyperParameterPolicy.update
        acts |= self.policy.needs_val_loss or self.policy.needs_credits
        acts |= any(isinstance(c, EarlyStopping) for c in trainer.callbacks)  # type: ignore[attr-defined]
        acts |= any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
        self._repeats_validation = acts and trainer.world_size > 1
        self._data.shares_validation = not self._repeats_validation
        self.undo.callback(setattr, self._data, "shares_validation", True)
        self.undo.callback(self._alone.close)
        if self._parallel is not None:
            self._parallel.repeats_validation = self._repeats_validation

    def _restore(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load what needed the module's shapes or the Trainer's device first."""
        state = self._pending
        checkpoint, self._checkpoint = self._checkpoint, {}
        module = self.lane.module
        rules = {"aggregator": self.aggregator, "policy": self.policy}
        # All that can be refused is, before the first is taken over.
        if self.policy.needs_val_loss and state["round"] and state["val_loss"] is None:
            raise FederationError(f"{type(self.policy).__name__} needs 'val_loss', which is null")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BaseFinetuning):  # its groups: Lightning asks it later
                callback.on_fit_start(trainer, self.lane.module)
        check_progress(trainer, checkpoint)
        check_rows(self.store.rows, self._planner.num_clients, self.lane, self.transforms)
        buffers = unsaved_buffers(module)
        check_buffers(state["unsaved buffers"], buffers)
        for name, rule in rules.items():
            with blamed(f"{type(rule).__name__} cannot go on"):
                check_rule(rule, state[name])
        if state["server"] is not None:  # Lightning has loaded the model that was validated
            checkpoint = {**checkpoint, "state_dict": state["server"]}
            pl_module.on_load_checkpoint(checkpoint)
        # Again: Lightning loads before a precision plugin has converted the module.
        try:
            module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
        except RuntimeError as error:
            raise FederationError(f"its model is of another network: {one_line(error)}") from error
        for name, saved in state["unsaved buffers"].items():
            owner, key = buffers[name]
            if (buffer := owner._buffers[key]) is None:
                owner._buffers[key] = saved.to(module.device, copy=True)
            else:
                buffer.copy_(saved)
        for name, rule in rules.items():
            try:
                rule.load_state_dict(state[name])
            except RuntimeError as error:
                raise FederationError(
                    f"{type(rule).__name__} cannot go on from the checkpoint's state: its"
                    f" options are others now. Go back to the former, or leave out ckpt_path"
                ) from error
        _train_only(module, state["trained"])
        self.lane.base_lr = state["base_lr"]
        self.lane.choose(state["lanes"])

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the loss before the first round, where a policy asked for it."""
        if self.policy.needs_val_loss and self.round == 0:
            self._note_val_loss(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where the first round starts."""
        if trainer.current_epoch != self.round:
            raise FederationError(
                f"the loop has done {self.round} rounds and the Trainer {trainer.current_epoch}"
                " epochs: give each Trainer a FederatedLoop of its own, or resume both from a"
                " checkpoint with ckpt_path"
            )
        self._first_round = self.round
        self.schedulers.catch_up(self.round, self._monitored)
        self._monitored = {}
        self.aggregator.publish()
        self._noted.note(self._state(), self.store.snapshot())
        self.aggregator.withdraw()
        self.undo.callback(set_rng_state, rng_state(pl_module.device))
        log_hyperparameters(trainer, self.hyperparameters(), resumed=trainer.ckpt_path is not None)
        self._round_log = RoundLog(trainer)
        connector = trainer._logger_connector
        self.undo.enter_context(replaced(connector, "log_metrics", self._round_log.receive))
        self._install_hooks(trainer, pl_module)

    def _install_hooks(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Act after every hook of an epoch's start and of a batch; count each client's own steps.

        Lightning calls a module's hooks after those of all callbacks: what is called after the
        module's comes after every hook. The module sees a client's own local step as
        ``batch_idx``, callbacks see Lightning's count over all clients of the round.
        """

        def step_of(batch_idx: int) -> Step:
            return self._current.plan.schedule[batch_idx]

        def epoch_start(hook: Method) -> Method:
            def started() -> None:
                hook()
                self._begin_round(pl_module)

            return started

        def batch_start(hook: Method) -> Method:
            def started(batch: Any, batch_idx: int) -> Any:
                return hook(batch, step_of(batch_idx).start)

            return started

        def run(optimize: Method) -> Method:
            def counted(optimizer: Any, batch_idx: int, kwargs: dict[str, Any]) -> Any:
                start = step_of(batch_idx).start
                if "batch_idx" in kwargs:
                    kwargs["batch_idx"] = start
                return optimize(optimizer, start, kwargs)

            return counted

        def batch_end(hook: Method) -> Method:
            def ended(outputs: Any, batch: Any, batch_idx: int) -> None:
                if step_of(batch_idx).rows:  # else this process waits for others
                    hook(outputs, batch, step_of(batch_idx).start)
                self._end_batch(pl_module, batch_idx)

            return ended

        epoch_loop: Any = trainer.fit_loop.epoch_loop
        for owner, name, make in (
            (pl_module, "on_train_epoch_start", epoch_start),
            (pl_module, "on_train_batch_start", batch_start),
            (epoch_loop.automatic_optimization, "run", run),
            (pl_module, "on_train_batch_end", batch_end),
        ):
            self.undo.enter_context(replaced(owner, name, make))

    def hyperparameters(self) -> dict[str, Any]:
        """Return what describes the run, as flat values for loggers; known in a fit.

        A name that the module's or the data module's own hyperparameters have gets the prefix
        ``federation/``: some loggers refuse to change a value.
        """
        data: Any = self._data
        user, policy = self.lane.module, named("policy", self.policy)
        lr = policy.get("policy/lr")
        max_epochs = self._trainer.max_epochs or -1
        values = {
            "seed": self._seed,
            "rounds": max_epochs if max_epochs > 0 else None,
            "num_clients": self._planner.num_clients,
            "participation": self.participation,
            "batch_size": getattr(data, "batch_size", None),
            "lr": self.lane.base_lr if lr is None else lr,
            "module": type(user).__name__,
            "network": type(user.net).__name__ if hasattr(user, "net") else None,
            **named("partition", getattr(data, "partition", None)),
            **named("aggregator", self.aggregator),
            **policy,
            **named("sampler", self.sampler),
            "transforms": ", ".join(map(describe, self.transforms)),
            "min_clients": self.min_clients,
            "optimizer_state": self.optimizer_state,
            "buffers": self.buffers or "average",
        }
        taken = {*user.hparams, *data.hparams}
        return {f"federation/{k}" if k in taken else k: value for k, value in values.items()}

    # --- the plan ---------------------------------------------------------------------------------

    def plan(self) -> RoundPlan:
        """Return the plan of the round: a function of the loop's saved state, drawn once."""
        if self._plan is None or self._plan.round != self.round:
            if self._planner.advance(self.round) and self.aggregator.replaces_network:
                self.aggregator.class_counts = getattr(self._data, "class_counts", None)
            self._plan = self._planner.draw(self._seed, self.round)
            # Lightning warns of rounds shorter than its logging interval, every round.
            steps = len(self._plan.schedule)
            self._trainer.log_every_n_steps = min(self._log_every_n_steps, steps)  # type: ignore[attr-defined]
        return self._plan

    # --- a round ----------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the state before the round, which a round that is cut short goes back to.

        Hooks of this name that are called after this one run again when a run is resumed.
        """
        self._write_rounds(trainer)
        self.aggregator.withdraw()
        plan = self.plan()
        if trainer.num_training_batches != len(plan.schedule):
            raise FederationError(
                f"round {self.round + 1} has {len(plan.schedule)} local steps, but Lightning would"
                f" run {trainer.num_training_batches} batches: the training loader is not the"
                " FederatedDataModule's own"
            )
        self.rounds.begin(trainer.callback_metrics)
        self._round = _Round(plan, self.lane.read(), self.schedulers.read())
        # What is drawn besides the clients' own streams depends on the round alone, too.
        seed_rng(derive_seed(plan.seed, Purpose.ROUND, self.round), pl_module.device)
        self._round.rng = rng_state(pl_module.device)  # for an exception in another hook

    def _begin_round(self, pl_module: LightningModule) -> None:
        """Take the snapshot that every client starts from, with what other hooks have written."""
        round = self._current
        round.server = round.start = self.lane.read()
        round.counters = round.server.counters
        round.schedule = round.schedule_after = self.schedulers.read()
        round.rng = rng_state(pl_module.device)
        self._note_trained(round)
        self.aggregator.start(round.server.vector)
        self._step = round.plan.schedule[0]
        self._seed_clients(pl_module, 0)

    def _note_trained(self, round: _Round) -> None:
        """Note which parameters clients train; each round, since a callback may thaw layers."""
        params = list(self.lane.shared.values())
        self._is_trained = [p.requires_grad for p in params]
        self._exchanged = self._num_trained = sum(
            flat(p).numel() for p in params if p.requires_grad
        )
        round.trained = None
        if all(self._is_trained) and not self.aggregator.is_private:
            return
        mask = torch.cat([flat(torch.full_like(p, p.requires_grad)).bool() for p in params])
        if self.aggregator.is_private:
            self.aggregator.trained = mask
        if not all(self._is_trained):
            round.trained = mask.nonzero()[:, 0]

    def _note_moved(self, round: _Round, server: ServerState) -> None:
        """Count frozen parameters that the module writes to by itself: they are exchanged, too."""
        if round.trained is None:
            return
        sizes = self.lane.vector.sizes[: len(self._is_trained)]
        n = self.lane.num_parameters
        before, after = round.server.vector[:n].split(sizes), server.vector[:n].split(sizes)
        frozen = [i for i, size in enumerate(sizes) if size and not self._is_trained[i]]
        # By more than rounding: an average of equal values is no move.
        rounding = 16 * torch.finfo(server.vector.dtype).eps
        has_moved = torch.stack(
            [
                (after[i] - before[i]).abs().amax() > rounding * before[i].abs().amax()
                for i in frozen
            ]
        ).tolist()
        self._exchanged += sum(sizes[i] for i, has in zip(frozen, has_moved, strict=True) if has)

    def _seed_clients(self, pl_module: LightningModule, batch_idx: int) -> None:
        """Seed the clients to come, before their first batch: transforms on the device draw."""
        plan = self._current.plan
        if batch_idx < len(plan.schedule) and (rows := plan.schedule[batch_idx].rows):
            key = (Purpose.CLIENT, self.round, int(plan.clients[rows[0]]))
            seed_rng(derive_seed(plan.seed, *key), pl_module.device)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Load the server's parameters at the first step of clients."""
        plan, step = self._current.plan, self._current.plan.schedule[batch_idx]
        if self._parallel is not None:
            self._parallel.is_idle = not step.rows
            if not step.rows:  # Lightning steps schedulers in idle batches, too: past their end
                self.schedulers.write(self._current.schedule)
        if step.first:
            self._load(self._current, step)
            _call(pl_module, "on_client_start")
            if self.aggregator.needs_losses:
                self._current.losses = self._client_losses(step)
        self._step = step
        if self._lanes is not None:
            rows = list(step.rows)  # none in an idle step
            at = torch.arange(step.start, step.start + step.steps)[:, None]
            self.lane.sizes = self._data.batch_sizes(plan.clients[rows], step.start, step.steps)
            self.lane.active = at < plan.num_steps[rows]

    def _load(self, round: _Round, step: Step) -> None:
        clients = round.plan.clients[list(step.rows)]
        start = self.aggregator.server_for(clients)
        round.start = ServerState(start, round.server.counters)
        kept = [self.kept_by(client) for client in clients.tolist()]
        self.schedulers.write(round.schedule)  # before what a client keeps of its optimizer
        self.lane.load(round.start, kept, [self._lr(round.plan, row) for row in step.rows])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note what clients report of the model that they started from."""
        step = self._current.plan.schedule[batch_idx]
        if step.first:
            self._current.reports = self._reported(step, outputs)

    def _end_batch(self, pl_module: LightningModule, batch_idx: int) -> None:
        """Collect clients after every hook of their last step; aggregate after the last client."""
        round = self._current
        step = round.plan.schedule[batch_idx]
        if step.last:
            _call(pl_module, "on_client_end")
            self._collect(round, step)
            round.logs.take(self._trainer, step.rows[0])
            for row in step.rows:
                mean = self.lane.mean_lr(int(round.plan.num_steps[row]), self._lr(round.plan, row))
                round.rates[int(round.plan.clients[row])] = mean
            if (steps := step.start + step.steps) > round.most_steps:
                round.most_steps, round.schedule_after = steps, self.schedulers.read()
            round.position += len(step.rows)
            self._seed_clients(pl_module, batch_idx + 1)
        if batch_idx + 1 < len(round.plan.schedule):
            self._step = round.plan.schedule[batch_idx + 1]
        else:  # Lightning validates after this.
            self._step = None
            self._aggregate(round)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Weigh each process's mean loss by its samples, where processes share a batch."""
        if self._processes.share_samples and self._step is not None:
            factor = self._processes.scale(self._batch_size(self._step))
            if factor != 1:
                loss.register_hook(lambda gradient: gradient * factor)

    def _batch_size(self, step: Step) -> int:
        """Return the samples of a local step, on all processes that share them."""
        clients = self._current.plan.clients[list(step.rows)]
        return int(self._data.batch_sizes(clients, step.start, 1))

    def _reported(self, step: Step, outputs: Any) -> Tensor:
        """Return what the clients say of the model that they start from, ``[k]``."""
        losses = self.lane.reported(outputs).double()
        if not self._processes.share_samples:
            return losses
        return self._processes.mean(losses, self._batch_size(step))

    def _client_losses(self, step: Step) -> Tensor:
        clients = self._current.plan.clients[list(step.rows)].tolist()
        return self._measures.client_losses(self.lane, clients, self.round)

    def _collect(self, round: _Round, step: Step) -> None:
        if round.plan.nobody:
            return
        clients = round.plan.clients[list(step.rows)]
        self._processes.same_model(self.lane.module)
        after = self._client_losses(step) if self.aggregator.needs_losses else None
        delta, counters = self.lane.collect(round.start, reuse=self.aggregator.forgets)
        reports, before = round.reports, round.reports if after is None else round.losses
        dropped: dict[int, str] = {}
        for callback in self._watchers:
            delta = callback.on_client_updates(round.plan, clients, delta, dropped)
        check_causes(dropped, clients.tolist(), _COLUMNS)
        for client in clients[~self._is_finite(round, delta, after)].tolist():
            dropped.setdefault(client, "non_finite")
        usable = torch.tensor([client not in dropped for client in clients.tolist()])
        if dropped:
            if self.on_client_error == "raise":
                raise FederationError(
                    f"round {self.round + 1} has no usable update of {describe_dropped(dropped)}:"
                    " lower the learning rate or clip gradients if values are non-finite, or choose"
                    " on_client_error: skip"
                )
            round.dropped |= dropped
            if not usable.any():
                return
            clients = clients[usable]
            delta, counters = delta[usable], counters[usable]
            reports, before = reports[usable], before[usable]
            after = None if after is None else after[usable]
        delta, memories = self._sent(round, clients, delta)
        weights = self._planner.num_samples[clients]
        self.aggregator.update(ClientUpdate(clients, delta, weights, before, after))
        if self.policy.needs_credits:
            round.moves.update(zip(clients.tolist(), delta.clone(), strict=True))
        round.client_losses.update(zip(clients.tolist(), reports.tolist(), strict=True))
        rows = [
            row for row, is_good in zip(self.lane.rows(), usable.tolist(), strict=True) if is_good
        ]
        for client, kept, memory in zip(clients.tolist(), rows, memories, strict=True):
            self.store.put(client, {**kept, **memory})
        round.counters = torch.maximum(round.counters, counters.amax(0))
        round.num_samples += int(weights.sum())

    def _is_finite(self, round: _Round, delta: Tensor, after: Tensor | None) -> Tensor:
        """Return which of the clients in training have finite updates and losses, ``[k]``."""
        finite = torch.ones(len(delta), dtype=torch.bool)
        # NaN or infinite if anything is; isfinite() of all would take six times as long.
        lowest, highest = delta.aminmax()
        if not (lowest.isfinite() & highest.isfinite()):
            finite = delta.isfinite().all(1).cpu()
        if after is not None:  # a rule that weighs by losses would remember what is not finite
            finite &= (after.isfinite() & round.losses.isfinite()).cpu()
        return finite

    def kept_by(self, client: int) -> dict[str, Tensor]:
        """Return what a client finds again in its lane."""
        stored = self.store.get(client)
        return {name: row for name, row in stored.items() if not name.startswith(_TRANSFORM)}

    def _sent(
        self, round: _Round, clients: Tensor, delta: Tensor
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Return updates as the server gets them, and what transforms leave with each client.

        Transforms see the parameters that are trained. What they keep of them is stored for all
        parameters: other layers may be trained in later rounds.
        """
        memories: list[dict[str, Tensor]] = [{} for _ in clients]
        if not self.transforms:
            return delta, memories
        delta, n, trained = delta.clone(), self.lane.num_parameters, round.trained
        for row, client in enumerate(clients.tolist()):
            stored = self.store.get(client)
            for i, transform in enumerate(self.transforms):
                prefix = f"{_TRANSFORM}{i}."
                memory = {
                    name.removeprefix(prefix): _of_trained(tensor.to(delta.device), n, trained)
                    for name, tensor in stored.items()
                    if name.startswith(prefix)
                }
                random = generator(self._seed, Purpose.TRANSFORM, self.round, client, i)
                if trained is None:
                    delta[row, :n] = transform(delta[row, :n], memory, random)
                else:
                    delta[row, trained] = transform(delta[row, trained], memory, random)
                memories[row] |= {
                    prefix + name: _of_all(tensor, n, trained) for name, tensor in memory.items()
                }
        return delta, memories

    def bytes_of_a_client(self) -> tuple[int, int]:
        """Return the bytes that go up and down between the server and a client in a round.

        Parameters that clients train, and frozen ones that change all the same, go both ways, with
        the buffers. Other frozen parameters are with the clients from the start. Where a rule
        replaces the network, all of it goes down.
        """
        n, numbers = self.lane.num_parameters, sum(self.lane.vector.sizes)
        each = torch.empty(0, dtype=self.lane.vector.dtype).element_size()
        rest = (numbers - n) * each + 8 * sum(self.lane.counters.sizes)
        message = Message(self._num_trained, 8 * each)
        for transform in self.transforms:
            message = transform.message(self._num_trained, message)
        up = message.bytes + (self._exchanged - self._num_trained) * each
        down = n if self.aggregator.replaces_network else self._exchanged
        return up + rest, down * each + rest

    def _aggregate(self, round: _Round) -> None:
        server, round.is_aggregating = round.server, True
        if self._parallel is not None:
            self._merge(round)
        round.dropped = dict(sorted(round.dropped.items()))  # lanes come in the order of their work
        returned = len(round.plan.cohort) - len(round.dropped)
        if round.dropped and not self._warned_of_drops:
            self._warned_of_drops = True
            rank_zero_warn(
                f"round {self.round + 1}: dropped {len(round.dropped)} of"
                f" {len(round.plan.clients)} client updates: {describe_dropped(round.dropped)}."
                " Later rounds are summed up at the end of the fit",
                stacklevel=2,
            )
        if returned >= self._min_returned:
            vector = self.aggregator.compute().view_as(server.vector)
            server = ServerState(vector, round.counters)
        else:
            if not self._warned_of_few:
                self._warned_of_few = True
                rank_zero_warn(
                    f"round {self.round + 1}: {returned} clients returned, fewer than the"
                    f" {self._min_returned} that min_clients or the rule asks for: the global model"
                    " is kept. Later rounds are summed up at the end of the fit",
                    stacklevel=2,
                )
            self.aggregator.skip()
        self._note_moved(round, server)
        self._leave_clients(server, round.schedule_after)
        clients = round.plan.clients.tolist()
        self.aggregator.publish(
            lambda: self._measures.training_accuracy(self.lane.module, clients, self.round)
        )
        self._noted.passed()
        round.aggregated = True

    @property
    def _min_returned(self) -> int:
        """How many clients have to return for a round to change the global model."""
        if self.aggregator.is_private:
            return 0
        least = 1 if self._trainer.fast_dev_run else self.min_clients  # type: ignore[attr-defined]
        return max(least, self.aggregator.least_clients)

    def _summarize(self) -> None:
        """Sum up what went wrong in this fit, where the first warnings did not say it all."""
        rows = self.rows[self._first_round :]
        if self._warned_of_drops and sum(row["dropped"] > 0 for row in rows) > 1:
            rank_zero_warn(summarize_dropped(rows))
        if self._warned_of_few:
            least = self._min_returned
            if (few := sum(row["clients"] - row["dropped"] < least for row in rows)) > 1:
                rank_zero_warn(
                    f"the global model was kept in {few} of {len(rows)} rounds, in which fewer than"
                    f" {least} clients returned"
                )
        self._warned_of_drops = self._warned_of_few = False

    def _merge(self, round: _Round) -> None:
        """Take in what the other processes know of their clients; the aggregator sums by itself."""
        own = (round.counters.cpu(), round.num_samples, round.dropped, self.store.new)
        after = (round.most_steps, round.schedule_after)
        counters, num_samples, dropped, new, losses, rates, schedules = zip(
            *self._processes.gather((*own, round.client_losses, round.rates, after)), strict=True
        )
        round.counters = torch.stack(counters).amax(0).to(round.counters)
        round.num_samples = sum(num_samples)
        round.dropped = {client: cause for each in dropped for client, cause in each.items()}
        self.store.new = {client: rows for each in new for client, rows in each.items()}
        round.client_losses = {client: loss for each in losses for client, loss in each.items()}
        round.rates = {client: rate for each in rates for client, rate in each.items()}
        round.schedule_after = max(schedules, key=lambda found: found[0])[1]

    def _leave_clients(self, server: ServerState, schedule: ScheduleState) -> None:
        self.schedulers.write(schedule)
        self.lane.write(server)
        set_rng_state(self._current.rng)

    @property
    def _current(self) -> _Round:
        assert self._round is not None, "a training hook ran outside of a round"
        return self._round

    def _abandon(self) -> None:
        """After a round that was cut short the server's model stays, never half a client."""
        round = self._round
        if round is None or round.aggregated or round.abandoned:
            return
        if round.is_aggregating:  # the rule failed halfway
            self.aggregator.load_state_dict(self._noted.state()["aggregator"])
        self.aggregator.reset()
        self.aggregator.withdraw()
        self._leave_clients(round.before, round.schedule_before)
        self.aggregator.publish()
        self.store.discard()
        round.abandoned = True

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the global model behind, and let go: Lightning does not tear down.

        Checkpoints still describe the last boundary: there are callbacks that save one now. Nothing
        that fails here may hide the exception, which gets a note of it.
        """
        self._is_closing = False
        if isinstance(exception, Exception) and (where := self._where()):
            exception.add_note(where)
        for clean_up in (self._abandon, self._summarize, self.undo.close):
            try:
                clean_up()
            except Exception as error:  # of a rule, a warning or a device
                exception.add_note(
                    f"Afterwards {clean_up.__name__.strip('_')} failed, so the module may not hold"
                    f" the global model: {type(error).__name__}: {error}"
                )

    def _where(self) -> str | None:
        """Name the round, and the clients whose local step was under way."""
        if (round := self._round) is None or round.aggregated:
            return None
        where = f"In round {self.round + 1}"
        if (trainer := self._trainer).world_size > 1:
            where += f", process {trainer.global_rank}"
        if round.is_aggregating:
            return f"{where}, when the updates were aggregated"
        if (step := self._step) is None or not step.rows:
            return where
        clients = round.plan.clients[list(step.rows)].tolist()
        first, last = step.start + 1, step.start + step.steps
        where += f", client{'s' * (len(clients) > 1)} {', '.join(map(str, clients))}"
        where += f", local step{'s' * (last > first)} {first}"
        return where + (f" to {last}" if last > first else "")

    # --- after the clients ------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give validation a stream of its own, whatever was drawn before."""
        if trainer.state.fn == TrainerFn.FITTING and self._repeats_validation:
            for metric in (m for m in pl_module.modules() if isinstance(m, Metric)):
                self._alone.callback(
                    setattr, metric, "distributed_available_fn", metric.distributed_available_fn
                )
                metric.distributed_available_fn = _never
        if self._round is not None and trainer.state.fn == TrainerFn.FITTING:
            self._abandon()
            self._round.rng = rng_state(pl_module.device)
            key = (Purpose.VALIDATION, self.round)
            seed_rng(derive_seed(self._round.plan.seed, *key), pl_module.device)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go back to the round's stream."""
        self._alone.close()
        if (round := self._round) is not None and trainer.state.fn == TrainerFn.FITTING:
            set_rng_state(round.rng)
            round.validated = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the round: the policy learns, the table gets its row."""
        round = self._current
        if not round.aggregated:  # Stopped in the middle; a resumed run does this round again.
            self._abandon()
            self._round_log.end_round({})
            round.logs.put_back(trainer, shared=False)
            self.plan_of_the_round = None
            if not trainer.should_stop:
                raise FederationError(
                    f"round {self.round + 1} ended after {round.position} of"
                    f" {len(round.plan.rows)} clients: on_train_batch_start must not return -1"
                )
            return
        self.store.commit()
        round.logs.put_back(trainer, self._parallel is not None)
        if self.aggregator.is_private:
            of_clients = {f"federation/{name}" for name in _COLUMNS - {"lr"}}
            privacy.check_monitors(self.aggregator, trainer, of_clients)
        before = self.val_loss
        self._note_val_loss(trainer)
        if type(self.policy).update is not HyperParameterPolicy.update:  # else nobody listens
            # One for all: modules may log without synchronizing, and policies must agree.
            fresh = trainer.strategy.broadcast(self.rounds.fresh(trainer.callback_metrics))
            self.policy.update(self._feedback(round, before, fresh))
        figures = self._figures(round)
        learnt = self.aggregator.figures() | self.policy.figures()
        self.rounds.add(figures | learnt)
        self.plan_of_the_round = round.plan
        self._round, self.round = None, self.round + 1
        self._is_closing = True
        figures = {k: v for k, v in figures.items() if k not in ("round", "dropped_clients")}
        self._log(trainer, figures | learnt)

    def _log(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """Tell loggers and callbacks, as ``log_dict`` would, which takes 20 times as long."""
        own = {f"federation/{name}": float(value) for name, value in figures.items()}
        trainer.callback_metrics.update({k: torch.tensor(v) for k, v in own.items()})
        self._round_log.end_round({"round": self.round, **own})

    def _feedback(
        self, round: _Round, before: float | None, metrics: Mapping[str, float]
    ) -> Feedback:
        """Return what a policy learns from a round."""
        clients = round.plan.clients
        reported = [round.client_losses.get(c, math.nan) for c in clients.tolist()]
        losses = torch.tensor(reported, dtype=torch.float64)
        if self.aggregator.is_private:
            losses.fill_(math.nan)
        used = torch.tensor([c in round.client_losses for c in clients.tolist()])
        weights = self._planner.num_samples[clients].double() * used
        weights = weights / weights.sum().clamp(min=1)

        def credits() -> Tensor:
            args = (self.lane, round.moves, clients, self.round)
            return weights * self._measures.contributions(*args)

        wanted = credits if self.policy.needs_credits else None
        return Feedback(round.plan, before, self.val_loss, losses, weights, wanted, metrics)

    @property
    def run_seed(self) -> int:
        """The seed that a run is a function of; known from the start of a fit on."""
        return self._seed

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table of rounds that ended, one dictionary each."""
        return self.rounds.rows

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the whole table, also after a resume that found nothing left to do."""
        self._write_rounds(trainer)
        self._summarize()

    def _write_rounds(self, trainer: Trainer) -> None:
        self.rounds.complete(trainer.callback_metrics, close=True)
        if (path := self.table_path(trainer)) is not None and self.rows:
            self.rounds.write(path)

    def _note_val_loss(self, trainer: Trainer) -> None:
        """Note the validation loss of this round: not one that is left from an earlier round."""
        self.val_loss, metrics = None, trainer.callback_metrics
        if self._round is not None and not self._round.validated:
            return
        is_fresh = self.rounds.is_fresh(self.monitor, metrics)
        val_loss = float(metrics[self.monitor]) if is_fresh else None
        # One for all: a module may not have synchronised it, and policies must agree.
        self.val_loss = trainer.strategy.broadcast(val_loss)
        if self.val_loss is None and self.policy.needs_val_loss:
            raise FederationError(
                f"{type(self.policy).__name__} learns from {self.monitor!r}, which validation does"
                f" not log (it logs {sorted(metrics)}): set monitor, or give it samples to validate"
                " on (data.init_args.val_size, trainer.limit_val_batches)"
            )

    def _figures(self, round: _Round) -> dict[str, Any]:
        plan, (up, down) = round.plan, self.bytes_of_a_client()
        rates = [round.rates[client] for client in plan.clients.tolist()]
        lr = rates[0] if len(set(rates)) == 1 else fmean(rates)  # the mean of equal ones is rounded
        return {
            "round": self.round + 1,
            "clients": len(plan.cohort),
            "dropped": len(round.dropped),
            "dropped_clients": " ".join(map(str, round.dropped)),
            **count_causes(round.dropped),
            "num_samples": round.num_samples,
            "num_steps": 0 if plan.nobody else int(plan.num_steps.sum()),
            "lr": lr,
            "bytes_up": up * (len(plan.cohort) - len(round.dropped)),
            "bytes_down": down * len(plan.cohort),
        }

    def _lr(self, plan: RoundPlan, row: int) -> float:
        """Return the learning rate that the policy gives a client, without schedulers."""
        lr = self.lane.base_lr if plan.lr is None else float(plan.lr[row])
        factor = plan.values.get("lr_factor")
        return lr if factor is None else lr * float(factor[row])

    def table_path(self, trainer: Trainer) -> Path | None:
        """Return where the table of rounds is written, None where it is not."""
        if self.table is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return None
        return Path(trainer.log_dir or trainer.default_root_dir, self.table)

    @property
    def clients_done(self) -> tuple[int, int]:
        """How many of this process's clients are done, of how many; (0, 0) between rounds."""
        round = self._round
        return (0, 0) if round is None else (round.position, len(round.plan.rows))

    # --- checkpoints ------------------------------------------------------------------------------

    @property
    def _noted(self) -> RoundBoundary:
        assert self._boundary is not None, "a hook of the fit ran before setup"
        return self._boundary

    def _note_close(self) -> None:
        """Note the end of the round, when all others have done their work for it."""
        if self._is_closing:
            metrics = self._trainer.callback_metrics
            self.rounds.complete(metrics)
            self._monitored = self.schedulers.monitored(metrics)
            self._noted.note(self._state(), self.store.snapshot())
            self.store.release()
            self._is_closing = False

    def _state(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the clients' rows, as of now."""
        module = self.lane.module
        buffers = {
            name: owner._buffers[key] for name, (owner, key) in unsaved_buffers(module).items()
        }
        return {
            **self._identity(module),
            "round": self.round,
            "rows": list(self.rows),
            "val_loss": self.val_loss,
            "monitored": self._monitored,
            "base_lr": self.lane.base_lr,
            "lanes": self.lane.choices(),
            "trained": _trained(module),
            "options": self._options,
            "aggregator": frozen(self.aggregator.state_dict()),
            "policy": frozen(self.policy.state_dict()),
            "unsaved buffers": frozen({n: b for n, b in buffers.items() if b is not None}),
            # Where the model of the checkpoint is one that is validated before the round ends.
            "server": None,
        }

    def _chosen(self) -> dict[str, Any]:
        choices = self.lane.choices()
        return {"lanes": choices} if choices else {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as of the last boundary between two rounds."""
        return {} if self._boundary is None else self._boundary.state()

    def _identity(self, module: nn.Module) -> dict[str, Any]:
        """What a resumed run has to have in common with the checkpoint's."""
        return {
            "number of parameter tensors": len(list(module.parameters())),
            "seed": self._seed,
            "num_clients": self._planner.num_clients,
            "checksum": self._checksum,
            "aggregator_class": type(self.aggregator).__name__,
            "policy_class": type(self.policy).__name__,
            "buffers": self.buffers or "average",
            "optimizer_state": self.optimizer_state,
        }

    def _computed_from(self) -> list[Any]:
        """Return the loop's own part of what a run is a function of, besides the seed."""
        data: Any = self._data
        loader = [getattr(data, name, None) for name in ("batch_size", "replacement", "drop_last")]
        rules = [self.aggregator, self.policy, self.sampler, self.transforms, self._watchers]
        choices = [self.participation, self.buffers or "average", self.optimizer_state]
        return [rules, choices, self._checksum, self._planner.num_clients, loader]

    def _describe_options(self) -> dict[str, Any]:
        """What makes another run of it, and yet can be resumed with another value."""
        return {
            "participation": self.participation,
            "min_clients": self.min_clients,
            "on_client_error": self.on_client_error,
            "sampler": describe(self.sampler),
            "aggregator": describe(self.aggregator),
            "policy": describe(self.policy),
            "transforms": [describe(transform) for transform in self.transforms],
            "batches in a local epoch": int(self._planner.batches_per_epoch.sum()),
            "faults and attacks": [describe(watcher) for watcher in self._watchers],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint's state, after :meth:`on_load_checkpoint` agreed to it."""
        self._pending = state_dict
        if state_dict == NOT_BEGUN:
            return
        self.round, self.rounds = state_dict["round"], RoundTable(state_dict["rows"])
        self.val_loss, self.seed = state_dict["val_loss"], state_dict["seed"]
        self._seed, self._monitored = state_dict["seed"], state_dict["monitored"]
        self.store.load_state_dict(state_dict["store"])
        self._plan = None

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse a checkpoint of another federation; a test only wants its parameters."""
        state = checkpoint["callbacks"].get(self.state_key)
        if state == NOT_BEGUN and trainer.state.fn == TrainerFn.FITTING:
            checkpoint |= {"optimizer_states": [], "lr_schedulers": []}
            checkpoint.pop("loops", None)
            return
        is_begun = "loops" in checkpoint
        with blamed(f"{trainer.ckpt_path} is damaged, or was changed"):
            check_states(trainer, checkpoint)
            if state is not None and state != NOT_BEGUN:
                check_state(state)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if state is None:
            raise _not_of_a_federation(trainer)
        with blamed(f"{trainer.ckpt_path} is damaged, or was changed"):
            check_round(checkpoint["loops"]["fit_loop"], state["round"])
        remedies = {
            "seed": "set seed_everything to the former",
            "checksum": "go back to the former data, split options and seed",
            "aggregator_class": "go back to the former aggregator",
            "policy_class": "go back to the former policy",
            "number of parameter tensors": "go back to the former network and terms",
        }
        for what, now in self._identity(pl_module).items():
            if what == "seed" and self.seed is None and "PL_GLOBAL_SEED" not in os.environ:
                continue
            if (was := state[what]) != now:
                raise FederationError(
                    f"{trainer.ckpt_path} belongs to another federation: its {what} is"
                    f" {was!s:.100}, here it is {now}. To resume,"
                    f" {remedies.get(what, f'set {what} to the former')}; to start anew, leave out"
                    " ckpt_path"
                )
        changed = [
            f"{name} is {value}, was {was}"
            for name, value in self._options.items()
            if (was := state["options"].get(name)) != value
        ]
        if changed:
            rank_zero_warn(
                f"resuming {trainer.ckpt_path} with other options: {'; '.join(changed)}. The run"
                " goes on, but it is not the run that one config describes"
            )
        if not is_begun:  # Lightning begins, too
            del checkpoint["loops"]
        self._checkpoint = checkpoint
        self._noted.adopt(checkpoint)
        self.aggregator.withdraw()  # lanes are made of the shapes that clients train

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Complete a checkpoint that Lightning makes: before the fit has begun, or after it."""
        checkpoint |= {} if self._boundary is None else self._boundary.progress()
        is_new = trainer.state.fn == TrainerFn.FITTING and trainer.ckpt_path is None
        if is_new and not checkpoint["callbacks"].get(self.state_key):
            checkpoint["callbacks"][self.state_key] = dict(NOT_BEGUN)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the optimiser, the data and the Trainer."""
        self.undo.close()
        if self._boundary is not None:
            self._boundary.close()


#: Columns of the table of rounds that are not a cause of dropped clients.
_COLUMNS = {"round", "clients", "dropped", "dropped_clients", "num_samples", "num_steps", "lr"}
_COLUMNS |= {"bytes_up", "bytes_down"}
#: The loop's state in a checkpoint that is written before the fit has begun.
NOT_BEGUN = {"round": 0}
#: How names begin of what transforms leave with a client.
_TRANSFORM = "transform."


class _Round:
    """What lives from the first client of a round to its end."""

    def __init__(
        self, plan: RoundPlan, before: ServerState, schedule_before: ScheduleState
    ) -> None:
        self.plan = plan
        #: The state before any hook of the round, which a round that is cut short goes back to.
        self.before, self.schedule_before = before, schedule_before
        #: What clients start from; what the client in training started from.
        self.server = self.start = before
        self.position = 0  # of the client in training, in the plan
        self.counters: Tensor = before.counters
        self.num_samples = 0
        #: Clients whose updates do not count, and why.
        self.dropped: dict[int, str] = {}
        # Of what clients in training started from: as they report it, and over all their samples.
        self.reports = self.losses = torch.empty(0)
        self.client_losses: dict[int, float] = {}
        self.logs = ClientLogs()
        self.rates: dict[int, float] = {}  # each client's mean learning rate, with schedulers
        self.moves: dict[int, Tensor] = {}  # of this process's clients, where they are wanted
        self.is_aggregating = self.aggregated = self.abandoned = self.validated = False
        #: Positions of the parameters that clients train; None where all are.
        self.trained: Tensor | None = None
        self.rng: Mapping[str, Any] = {}
        self.schedule = schedule_before
        self.schedule_after = schedule_before  # of the client that made most steps
        self.most_steps = 0


def loop_of(trainer: Trainer) -> FederatedLoop | None:
    """Return the federation of a Trainer; None where there is none."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by the connector
    return next((c for c in callbacks if isinstance(c, FederatedLoop)), None)


def user_module(module: LightningModule) -> LightningModule:
    """Return the user's module, without the lanes that train it."""
    return module.module if isinstance(module, Lanes) else module


def _not_of_a_federation(trainer: Trainer) -> FederationError:
    return FederationError(
        f"{trainer.ckpt_path} was not written by a federation, it cannot be resumed as one:"
        " load its weights into the module and start a new fit without ckpt_path"
    )


def _never() -> bool:
    """Say that processes need not talk to each other."""
    return False


def _call(module: nn.Module, name: str) -> None:
    """Call a hook that a module may have (``on_client_start``, ``on_client_end``)."""
    if callable(hook := getattr(module, name, None)):
        hook()


def _flags(module: nn.Module) -> list[tuple[Any, str]]:
    """Where a module says what of it is trained: parameters, and statistics of BatchNorm."""
    flags: list[tuple[Any, str]] = [(param, "requires_grad") for param in module.parameters()]
    name = "track_running_stats"
    return flags + [(part, name) for part in module.modules() if name in vars(part)]


def _trained(module: nn.Module) -> list[bool]:
    return [bool(getattr(part, name)) for part, name in _flags(module)]


def _train_only(module: nn.Module, trained: list[bool]) -> None:
    """Freeze and unfreeze what a checkpoint says: callbacks do so once, in an earlier round."""
    flags = _flags(module)
    if len(flags) != len(trained):
        raise FederationError(f"'trained' has {len(trained)} entries, here there are {len(flags)}")
    for (part, name), is_trained in zip(flags, trained, strict=True):
        setattr(part, name, is_trained)


def _of_trained(tensor: Tensor, count: int, trained: Tensor | None) -> Tensor:
    """Return the part of a tensor of all ``count`` parameters that belongs to trained ones."""
    return tensor if trained is None or tensor.shape != (count,) else tensor[trained]


def _of_all(tensor: Tensor, count: int, trained: Tensor | None) -> Tensor:
    """Undo :func:`_of_trained`, with zeros for the other parameters."""
    if trained is None or tensor.shape != trained.shape:
        return tensor
    return tensor.new_zeros(count).index_copy(0, trained, tensor)


def unsaved_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the owners of a module's non-persistent buffers, and their names there."""
    return {
        f"{path}.{name}" if path else name: (owner, name)
        for path, owner in module.named_modules()
        for name, _ in owner._buffers.items()  # a scripted module's cannot be iterated over
        if name in owner._non_persistent_buffers_set
    }
