"""Callback that turns ``Trainer.fit`` into federated training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_fl.aggregators import Aggregator, FedAvg
from lightning_fl.callbacks.checkpoint import AtomicCheckpointIO, RoundCheckpoint
from lightning_fl.callbacks.checks import (
    check_fit,
    check_network,
    check_options,
    check_smallest_batch,
    one_optimizer,
    warn_of_running_statistics,
)
from lightning_fl.callbacks.hyperparameters import (
    RoundLog,
    describe_run,
    log_hyperparameters,
    named,
)
from lightning_fl.callbacks.step_hooks import StepEvents, follow_steps
from lightning_fl.federation.boundary import RoundBoundary
from lightning_fl.federation.context import Federation
from lightning_fl.federation.dropped import DropWarnings
from lightning_fl.federation.measures import Measures, evaluating
from lightning_fl.federation.memory import ClientMemory
from lightning_fl.federation.plan import Planner
from lightning_fl.federation.processes import processes_of
from lightning_fl.federation.resume import (
    NOT_BEGUN,
    Progress,
    Resume,
    check_contents,
    name_checkpoint,
)
from lightning_fl.federation.round import COLUMNS, Fit, Round
from lightning_fl.federation.schedulers import Schedulers, stepping_batches
from lightning_fl.federation.table import RoundTable
from lightning_fl.federation.validation import Validation
from lightning_fl.files import FolderLock
from lightning_fl.functional.randomness import rng_state, run_seed, seeded_rng, set_rng_state
from lightning_fl.hooks import replaced
from lightning_fl.policies import HyperparameterPolicy, Schedule
from lightning_fl.runners import BufferPolicy, VectorizedClients, client_runner
from lightning_fl.samplers import ClientSampler, UniformSampler, how_drawn
from lightning_fl.store import ClientStore
from lightning_fl.transforms import UpdateTransform
from lightning_fl.types import (
    Cohort,
    FederationError,
    RoundPlan,
    Step,
    check_package,
    describe,
)


class FederatedLoop(Callback):
    """Make each training epoch a communication round of federated learning.

    Each round samples clients and their hyperparameters, trains every sampled client from the
    global model (one training batch is one local step), aggregates the client updates, and loads
    the new global model into the module before Lightning validates. Validation, test, checkpoints
    and export therefore use the global model. The callback works with any LightningModule that
    uses automatic optimization, without changes to the module, and requires a
    :class:`~lightning_fl.datamodules.FederatedDataModule`.

    Args:
        aggregator: Aggregation rule of the server. Defaults to
            :class:`~lightning_fl.aggregators.FedAvg`.
        policy: Chooses the hyperparameters of each round and client. By default, clients train for
            one local epoch at the learning rate of the module's optimizer.
        sampler: Samples the clients of each round. By default, clients are sampled uniformly.
        clients_per_round: Number of clients sampled per round.
        client_fraction: Fraction of clients sampled per round, in (0, 1]. If neither this nor
            ``clients_per_round`` is set, all clients train in every round.
        min_clients: Minimum number of usable updates per round. With fewer, the global model stays
            unchanged in that round.
        on_client_error: How to handle a lost or non-finite update: ``skip`` drops and reports it,
            ``raise`` ends the run. An exception in a client's training step always ends the run.
        optimizer_state: ``reset`` creates a new optimizer state for each client in each round;
            ``keep`` stores the state of each client between rounds (memory and checkpoint size
            then grow with the number of clients).
        buffers: How to combine the buffers of the clients. ``average``: floating-point buffers are
            averaged like parameters, integer buffers take the maximum. ``server``: the server
            keeps its buffers. ``local``: each client keeps its buffers and the server takes the
            average. None selects ``average`` and warns if the module has running statistics.
        exchange_frozen: Whether frozen parameters (``requires_grad=False``) are exchanged like
            trained ones. Otherwise all clients share them: they exist once per process, and must
            not change in the fit. None exchanges them unless they are larger than the trained
            parameters and than 16 MiB.
        monitor: Name of the validation loss that policies learn from.
        csv_name: File name of the table of rounds, written to the logger's directory. None writes
            no file.
        seed: Seed of the run. None uses the seed of ``seed_everything``, else the checkpoint's
            seed, else 0.
        update_transforms: Transforms applied in order to each client update before aggregation,
            such as compression.
        client_state_memory_gb: Maximum size in GiB of the client state held in memory between
            rounds. Larger state is stored in a file in the Trainer's ``default_root_dir`` for the
            duration of the run.

    Raises:
        FederationError: If an option is out of range. At the start of a fit, if the Trainer, the
            module, the data or the checkpoint is not compatible with federated training.

    Example:
        >>> loop = FederatedLoop(client_fraction=0.1, policy=Schedule(lr=0.1, local_epochs=5))
        >>> loop.round, loop.rows
        (0, [])
    """

    def __init__(
        self,
        aggregator: Aggregator | None = None,
        policy: HyperparameterPolicy | None = None,
        sampler: ClientSampler | None = None,
        *,
        clients_per_round: int | None = None,
        client_fraction: float | None = None,
        min_clients: int = 1,
        on_client_error: Literal["skip", "raise"] = "skip",
        optimizer_state: Literal["reset", "keep"] = "reset",
        buffers: BufferPolicy | None = None,
        exchange_frozen: bool | None = None,
        monitor: str = "val_loss",
        csv_name: str | None = "rounds.csv",
        seed: int | None = None,
        update_transforms: Sequence[UpdateTransform] = (),
        client_state_memory_gb: float = 1.0,
    ) -> None:
        check_options({k: v for k, v in locals().items() if k not in ("self", "__class__")})
        self.clients_per_round, self.client_fraction = clients_per_round, client_fraction
        self.min_clients = int(min_clients)
        self.aggregator, self.policy = aggregator or FedAvg(), policy or Schedule()
        self.sampler = sampler or UniformSampler()
        self.on_client_error, self.optimizer_state = on_client_error, optimizer_state
        self.buffers, self.exchange_frozen = buffers, exchange_frozen
        self.monitor, self.csv_name, self.seed = monitor, csv_name, seed
        self.update_transforms = list(update_transforms)
        self.progress = Progress()
        self.store = ClientStore(most=client_state_memory_gb * 2**30)
        #: Plan of the last finished round, for other callbacks; None if the round was interrupted.
        self.plan_of_the_round: RoundPlan | None = None
        #: Clean-up functions, called in reverse order when a fit ends or fails.
        self.undo = ExitStack()
        self._resume = Resume(self.progress, self.aggregator, self.policy)
        self._plan: RoundPlan | None = None
        self._round: Round | None = None
        self._fit: Fit | None = None
        #: Folders locked against other runs until the fit ends.
        self._folders: set[Path] = set()
        #: State written to checkpoints; set at the start of a fit.
        self._boundary: RoundBoundary | None = None
        #: True after the loop has ended the round and while other callbacks are still ending it.
        self._is_closing = False
        self._first_round = 0  # of this fit
        self._exchange_frozen = exchange_frozen
        self._warnings = DropWarnings()

    @property
    def state_key(self) -> str:
        """Key in checkpoints. Subclasses use the same key."""
        return FederatedLoop.__qualname__

    # --- before the first round -------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that rounds are supported, and configure the Trainer for them."""
        check_package(trainer, Trainer)
        user = user_module(pl_module)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # not a user's own
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        self.undo.enter_context(name_checkpoint(trainer))
        if stage != "fit":
            self.aggregator.prepare(user)
            return
        vectorized = pl_module if isinstance(pl_module, VectorizedClients) else None
        if vectorized is not None and vectorized.reason is not None:  # it trains sequentially
            vectorized = None
        data = check_fit(trainer, user, vectorized is not None)
        self._trainer, self._data = trainer, data
        self._processes = processes_of(trainer)
        if self._processes.share_samples and vectorized is not None:
            raise FederationError(
                f"{type(trainer.strategy).__name__} splits the samples of one client over"
                " processes, which is not supported with VectorizedClients: set"
                " strategy='client_parallel', or remove VectorizedClients"
            )
        self._planner = Planner(
            trainer,
            data,
            self.policy,
            self.sampler,
            self._cohort_size(data),
            vectorized,
            self._processes,
        )
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by the connector
        #: Callbacks that implement ``on_client_updates``.
        self._watchers = [c for c in callbacks if callable(getattr(c, "on_client_updates", None))]
        self.progress.seed = run_seed(self.seed)
        self._federation = self._describe(user)
        self.sampler.setup(self._federation)
        self.policy.setup(self._federation)
        self._check_cohort()
        check_network(trainer, user, data)
        check_smallest_batch(user, data)
        with evaluating(user), seeded_rng(0, user.device):  # dropout would change the output
            self.aggregator.prepare(user, data.example)
        if self.buffers is None:
            warn_of_running_statistics(user)
        self._describe_to_resume()
        self._plan, self._round, self._fit = None, None, None
        self._take_over(pl_module)

    def _describe(self, user: LightningModule) -> Federation:
        """Describe the run before the module has an optimizer."""
        planner, data = self._planner, self._data
        n = planner.num_clients
        loader = [getattr(data, name, None) for name in ("batch_size", "replacement", "drop_last")]
        rules = [self.aggregator, self.policy, self.sampler, self.update_transforms, self._watchers]
        choices = [planner.cohort_size, self.buffers or "average", self.optimizer_state]
        return Federation(
            n,
            Cohort(planner.cohort_size, n, how_drawn(self.sampler)),
            seed=self.progress.seed,
            shares_samples=self._processes.share_samples,
            num_samples=planner.num_samples,
            module=user,
            trainer=self._trainer,
            data=data,
            aggregator=self.aggregator,
            policy=self.policy,
            min_clients=self.min_clients,
            on_client_error=self.on_client_error,
            buffers=self.buffers or "average",
            optimizer_state=self.optimizer_state,
            configuration=(rules, choices, data.checksum, n, loader),
        )

    def _cohort_size(self, data: Any) -> int:
        """Return the number of clients sampled per round."""
        n = len(data.num_samples)
        if self.clients_per_round is None:
            return max(1, round((self.client_fraction or 1.0) * n))
        if self.clients_per_round > n:
            raise FederationError(
                f"clients_per_round must be at most the number of clients, {n},"
                f" got {self.clients_per_round}"
            )
        return int(self.clients_per_round)

    def _check_cohort(self) -> None:
        """Check that a round can reach ``min_clients``."""
        sampled = self._planner.cohort_size
        if sampled < self.min_clients and not self._trainer.fast_dev_run:  # type: ignore[attr-defined]
            raise FederationError(
                f"min_clients={self.min_clients}, but only {sampled} clients are sampled per"
                " round: decrease min_clients, or increase clients_per_round or client_fraction"
            )

    def _describe_to_resume(self) -> None:
        """Record the configuration that a checkpoint must match to be resumed."""
        identity = {
            "num_clients": self._planner.num_clients,
            # Computed once: the digest reads every index, and every checkpoint stores it.
            "checksum": self._data.checksum,
            "aggregator_class": type(self.aggregator).__name__,
            "policy_class": type(self.policy).__name__,
            "buffers": self.buffers or "average",
            "optimizer_state": self.optimizer_state,
        }
        options = {
            "clients in a round": self._planner.cohort_size,
            "min_clients": self.min_clients,
            "on_client_error": self.on_client_error,
            "sampler": describe(self.sampler),
            "aggregator": describe(self.aggregator),
            "policy": describe(self.policy),
            "update_transforms": [describe(transform) for transform in self.update_transforms],
            "batches in a local epoch": int(self._planner.batches_per_epoch.sum()),
            "faults and attacks": [describe(watcher) for watcher in self._watchers],
        }
        self._resume.describe(identity, options)

    def _take_over(self, pl_module: LightningModule) -> None:
        """Configure the Trainer and the data module for rounds, until the fit ends."""
        trainer, data, planner = self._trainer, self._data, self._planner
        if self._boundary is not None:  # left by a fit that ended with an exception
            self._boundary.close()
        self._boundary, self._is_closing = RoundBoundary(trainer, self.state_key), False
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        # Placed first: other callbacks then see each client loaded at its first batch, and the
        # round ended at its last hook.
        others = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [self, *others]  # type: ignore[attr-defined]
        self._log_every_n_steps = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self.undo.callback(setattr, trainer, "log_every_n_steps", self._log_every_n_steps)
        if "://" not in (folder := str(trainer.default_root_dir)):  # needs a local folder
            self.store.folder = folder
        if "val_loss" in self.policy.learns_from:
            trainer.num_sanity_val_steps = math.inf
        if (path := self.table_path(trainer)) is not None:
            self._hold(trainer, path.parent)
        # These callbacks unfreeze parameters during the fit.
        if any(isinstance(callback, BaseFinetuning) for callback in others):
            self._exchange_frozen = True
        if isinstance(pl_module, VectorizedClients):
            pl_module.exchange_frozen = self._exchange_frozen
        self.undo.enter_context(one_optimizer(pl_module))
        self.undo.enter_context(
            stepping_batches(trainer, lambda: planner.stepping_batches(self.run_seed, self.round))
        )
        data.plan = self.plan
        self.undo.callback(setattr, data, "plan", None)

    def _hold(self, trainer: Trainer, folder: str | Path) -> None:
        """Lock a folder against other runs for the duration of the fit."""
        folder = Path(folder).absolute()
        if trainer.is_global_zero and folder not in self._folders and "://" not in str(folder):
            lock = FolderLock(folder)
            self._folders.add(folder)
            self.undo.callback(self._folders.discard, folder)
            self.undo.callback(lock.release)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set up the client runner and the aggregator; restore the checkpoint if there is one."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by the connector
            is_writing = isinstance(callback, RoundCheckpoint) and not trainer.fast_dev_run  # type: ignore[attr-defined]
            if is_writing and callback.dirpath is not None:
                self._hold(trainer, callback.dirpath)
        self.aggregator.load_client_network()
        keeps = self.optimizer_state == "keep"
        self.runner = client_runner(
            pl_module,
            self.buffers or "average",
            trainer.optimizers[0],
            keeps,
            self._exchange_frozen,
        )
        self._noted.constants = self.runner.constants.parameters.values()
        self.undo.callback(self.runner.close)
        self._fit = fit = self._start_fit(pl_module)
        self._validation = Validation(trainer, self._data, self.policy, self._processes)
        self.undo.callback(self._validation.close)
        is_new = trainer.ckpt_path is None or self._resume.pending == NOT_BEGUN
        if not is_new:
            self._resume.restore(fit)
        boundary = self._noted
        boundary.chosen = lambda: {"runner": c} if (c := self.runner.choices()) else {}
        boundary.call_before_checkpoints(self._note_close)
        if is_new:
            self._note_boundary(is_begun=False)

    def _start_fit(self, pl_module: LightningModule) -> Fit:
        """Set up the aggregator on the module's device, and return the context of the rounds."""
        trainer, runner, rule = self._trainer, self.runner, self.aggregator
        seed = self.run_seed  # may differ from the seed at setup after a checkpoint was loaded
        federation = replace(self._federation, layout=runner.layout, seed=seed)
        server = runner.read().vector
        self.policy.to(server.device)
        rule.setup(federation)
        rule.to(server.device).start(server)
        parts = rule.client_parts()
        return Fit(
            trainer,
            pl_module,
            self._data,
            federation,
            rule,
            self.policy,
            parts,
            self._planner,
            self._processes,
            runner,
            Schedulers(trainer),
            Measures(trainer, self._data, seed, self._processes),
            ClientMemory(self.store, self.update_transforms, parts, federation, server.device),
            self._watchers,
        )

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the validation loss before the first round if the policy needs it."""
        if "val_loss" in self.policy.learns_from and self.round == 0:
            self._note_val_loss(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the boundary before the first round of this fit, and start logging."""
        if trainer.current_epoch != self.round:
            raise FederationError(
                f"FederatedLoop is at round {self.round}, but the Trainer is at epoch"
                f" {trainer.current_epoch}: create a new FederatedLoop for each Trainer, or resume"
                " both from a checkpoint with ckpt_path"
            )
        self._first_round, self._warnings = self.round, DropWarnings()
        self.fit.schedulers.catch_up(self.round, self.progress.monitored)
        self.progress.monitored = {}
        self.runner.constants.note()
        self.aggregator.load_global_network()
        self._note_boundary()
        self.aggregator.load_client_network()
        self.undo.callback(set_rng_state, rng_state(pl_module.device))
        values = describe_run(self.fit, self.loop_options())
        log_hyperparameters(trainer, values, resumed=trainer.ckpt_path is not None)
        self._round_log = RoundLog(trainer)
        connector = trainer._logger_connector
        self.undo.enter_context(replaced(connector, "log_metrics", self._round_log.receive))
        self.undo.push(follow_steps(trainer, pl_module, _Events(self)))

    def loop_options(self) -> dict[str, Any]:
        """Return the loop's own options for loggers, as flat values."""
        return {
            "clients_per_round": self.clients_per_round,
            "client_fraction": self.client_fraction,
            **named("sampler", self.sampler),
            "update_transforms": ", ".join(map(describe, self.update_transforms)),
            "min_clients": self.min_clients,
            "optimizer_state": self.optimizer_state,
            "buffers": self.buffers or "average",
            "exchange_frozen": self.exchange_frozen,
        }

    # --- a round ----------------------------------------------------------------------------------

    def plan(self) -> RoundPlan:
        """Return the plan of the round. It is drawn once and depends on the saved state only."""
        if self._plan is None or self._plan.round != self.round:
            self._planner.advance(self.round)
            self._plan = self._planner.draw(self.run_seed, self.round)
            # Lightning would warn in every round that is shorter than its logging interval.
            steps = len(self._plan.schedule)
            self._trainer.log_every_n_steps = min(self._log_every_n_steps, steps)  # type: ignore[attr-defined]
        return self._plan

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a round.

        An interrupted round is repeated when the run is resumed, and so are the hooks of this name
        that are called after this one.
        """
        self._write_rounds(trainer)
        self.aggregator.load_client_network()
        plan = self.plan()
        if trainer.num_training_batches != len(plan.schedule):
            raise FederationError(
                f"round {self.round + 1} has {len(plan.schedule)} local steps, but the training"
                f" loader has {trainer.num_training_batches} batches: use the training loader of"
                " the FederatedDataModule"
            )
        self.rounds.begin(trainer.callback_metrics)
        self._round = Round(self.fit, plan)
        self._traffic = self._round.traffic

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Load the global model at the first local step of a client."""
        self._current.start_batch(batch_idx)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Scale the loss by this process's share of the samples if processes share a batch."""
        if self._round is not None:
            self._round.scale(loss)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss that clients report for the model at the start of the round."""
        self._current.report(batch_idx, outputs)

    def _end_batch(self, batch_idx: int) -> None:
        """Collect updates after the last hook of a client; aggregate after the last client."""
        round = self._current
        if not round.end_batch(batch_idx):
            return
        round.aggregate()
        sampled, dropped = len(round.plan.cohort), round.results.dropped
        kept_by = None
        if round.is_kept:
            kept_by = f"min_clients={self.fit.min_clients} and {describe(self.aggregator)}"
        self._warnings.note(self.round + 1, sampled, dropped, kept_by)
        self._noted.passed()

    @property
    def fit(self) -> Fit:
        """Context of the rounds; available from the start of a fit."""
        assert self._fit is not None, "a hook of the fit ran before on_fit_start"
        return self._fit

    @property
    def _current(self) -> Round:
        assert self._round is not None, "a training hook ran outside of a round"
        return self._round

    def _abandon(self) -> None:
        """Load the global model after an interrupted round."""
        if self._round is not None:
            self._round.abandon(lambda: self._noted.state()["aggregator"])

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Load the global model and clean up, because Lightning does not call ``teardown``.

        The state for checkpoints still describes the last boundary between rounds, because some
        callbacks save a checkpoint on exceptions. Errors during clean-up are added to the exception
        as notes, so that they do not hide it.
        """
        self._is_closing = False
        where = None if self._round is None else self._round.where()
        if isinstance(exception, Exception) and where:
            exception.add_note(where)
        for clean_up in (self._abandon, self._summarize, self.undo.close):
            try:
                clean_up()
            except Exception as error:  # from an aggregator, a warning or a device
                exception.add_note(
                    f"Clean-up step {clean_up.__name__.strip('_')} failed, so the module may not"
                    f" hold the global model: {type(error).__name__}: {error}"
                )

    # --- after the clients ------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Switch to the random stream of validation."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._validation.begin(pl_module)
        if self._round is not None:
            self._abandon()
            self._round.begin_validation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Return to the random stream of the round."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._validation.end()
        if self._round is not None:
            self._round.end_validation()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the round: update the policy, add a row to the table and log metrics."""
        round = self._current
        if not round.is_aggregated:  # Stopped early; a resumed run repeats the round.
            self._end_early(round)
            return
        self.store.commit()
        round.logs.put_back(trainer, self._processes.share_clients)
        self.aggregator.check_metrics({f"federation/{name}" for name in COLUMNS - {"lr"}})
        before = self.val_loss
        self._note_val_loss(trainer)
        if self.policy.learns:
            # Modules may log without synchronizing, but policies must agree on all processes.
            fresh = trainer.strategy.broadcast(self.rounds.fresh(trainer.callback_metrics))
            self.policy.update(round.feedback(before, self.val_loss, fresh))
        figures = round.metrics()
        learned = self.aggregator.metrics() | self.policy.metrics()
        self.rounds.add(figures | learned)
        self.plan_of_the_round = round.plan
        self._round, self.progress.round = None, self.round + 1
        self._is_closing = True
        figures = {k: v for k, v in figures.items() if k not in ("round", "dropped_clients")}
        self._log(trainer, figures | learned)

    def _end_early(self, round: Round) -> None:
        """Abandon a round that ended before its last client."""
        self._abandon()
        self._round_log.end_round({})
        round.logs.put_back(self._trainer, shared=False)
        self.plan_of_the_round = None
        if not self._trainer.should_stop:
            raise FederationError(
                f"round {self.round + 1} ended after {round.position} of"
                f" {len(round.plan.rows)} clients: on_train_batch_start must not return -1"
            )

    def _log(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """Pass metrics to loggers and callbacks; ``log_dict`` would take 20 times as long."""
        own = {f"federation/{name}": float(value) for name, value in figures.items()}
        trainer.callback_metrics.update({k: torch.tensor(v) for k, v in own.items()})
        self._round_log.end_round({"round": self.round, **own})

    def _note_val_loss(self, trainer: Trainer) -> None:
        """Record the validation loss, but only if it was logged in this round."""
        self.progress.val_loss, metrics = None, trainer.callback_metrics
        if self._round is not None and not self._round.is_validated:
            return
        is_fresh = self.rounds.is_fresh(self.monitor, metrics)
        val_loss = float(metrics[self.monitor]) if is_fresh else None
        # The module may not have synchronized it, but policies must agree on all processes.
        self.progress.val_loss = trainer.strategy.broadcast(val_loss)
        if self.val_loss is None and "val_loss" in self.policy.learns_from:
            raise FederationError(
                f"{type(self.policy).__name__} learns from {self.monitor!r}, which validation does"
                f" not log (logged: {sorted(metrics)}): set monitor, or provide validation samples"
                " (data.init_args.val_size, trainer.limit_val_batches)"
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the table of rounds, also if a resumed run had no rounds left."""
        self._write_rounds(trainer)
        self._summarize()

    def _write_rounds(self, trainer: Trainer) -> None:
        self.rounds.complete(trainer.callback_metrics, close=True)
        if (path := self.table_path(trainer)) is not None and self.rows:
            self.rounds.write(path)

    def _summarize(self) -> None:
        self._warnings.summarize(self.rows[self._first_round :])

    def table_path(self, trainer: Trainer) -> Path | None:
        """Return the path of the table of rounds, or None if it is not written."""
        if self.csv_name is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return None
        return Path(trainer.log_dir or trainer.default_root_dir, self.csv_name)

    # --- progress ---------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Number of finished rounds."""
        return self.progress.round

    @property
    def rounds(self) -> RoundTable:
        """The table of rounds."""
        return self.progress.table

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of the table of rounds, one dictionary per finished round."""
        return self.rounds.rows

    @property
    def val_loss(self) -> float | None:
        """Validation loss after the last round; None if unknown."""
        return self.progress.val_loss

    @property
    def run_seed(self) -> int:
        """Seed of the run; available from the start of a fit."""
        return self.progress.seed

    def bytes_of_a_client(self) -> tuple[int, int]:
        """Return the bytes that a client sends (up) and receives (down) per round."""
        return self._traffic.of_a_client()

    @property
    def clients_done(self) -> tuple[int, int]:
        """Finished clients and all clients of this process's round; (0, 0) between rounds."""
        round = self._round
        return (0, 0) if round is None else (round.position, len(round.plan.rows))

    # --- checkpoints ------------------------------------------------------------------------------

    @property
    def _noted(self) -> RoundBoundary:
        assert self._boundary is not None, "a hook of the fit ran before setup"
        return self._boundary

    def _note_boundary(self, is_begun: bool = True) -> None:
        state, store = self._resume.state(self.fit), self.store.snapshot()
        self._noted.note(state, store, is_begun=is_begun)

    def _note_close(self) -> None:
        """Record the boundary after all other callbacks have ended the round."""
        if self._is_closing:
            metrics = self._trainer.callback_metrics
            self.rounds.complete(metrics)
            self.progress.monitored = self.fit.schedulers.monitored(metrics)
            self._note_boundary()
            self.store.release()
            self._is_closing = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state at the last boundary between two rounds."""
        return {} if self._boundary is None else self._boundary.state()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Check that the checkpoint belongs to this federation. Tests load parameters only."""
        state = checkpoint["callbacks"].get(self.state_key)
        is_fit = trainer.state.fn == TrainerFn.FITTING
        is_begun = "loops" in checkpoint
        check_contents(trainer, checkpoint, state)
        if state == NOT_BEGUN and is_fit:
            checkpoint |= {"optimizer_states": [], "lr_schedulers": []}
            del checkpoint["loops"]
            return
        if not is_fit:
            return
        self._resume.check(trainer, pl_module, checkpoint, state, self.seed is not None)
        if not is_begun:  # Lightning also starts from epoch 0
            del checkpoint["loops"]
        self._noted.adopt(checkpoint)
        self.aggregator.load_client_network()  # runners need the shapes of the client model

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a checkpoint accepted by :meth:`on_load_checkpoint`."""
        self._resume.load(state_dict)
        if state_dict != NOT_BEGUN:
            self.seed = self.run_seed
            self.store.load_state_dict(state_dict["store"])
            self._plan = None

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the progress of rounds to a checkpoint, also before or after a fit."""
        checkpoint |= {} if self._boundary is None else self._boundary.progress()
        is_new = trainer.state.fn == TrainerFn.FITTING and trainer.ckpt_path is None
        if is_new and not checkpoint["callbacks"].get(self.state_key):
            checkpoint["callbacks"][self.state_key] = dict(NOT_BEGUN)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the optimizer, the data and the Trainer."""
        self.undo.close()
        if self._boundary is not None:
            self._boundary.close()


class _Events(StepEvents):
    """Forward training-step events to the loop."""

    def __init__(self, loop: FederatedLoop) -> None:
        self._loop = loop

    def step_of(self, batch_idx: int) -> Step:
        return self._loop._current.plan.schedule[batch_idx]

    def after_epoch_start(self) -> None:
        self._loop._current.begin()

    def after_batch_end(self, batch_idx: int) -> None:
        self._loop._end_batch(batch_idx)


def loop_of(trainer: Trainer) -> FederatedLoop | None:
    """Return the FederatedLoop of a Trainer, or None."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by the connector
    return next((c for c in callbacks if isinstance(c, FederatedLoop)), None)


def user_module(module: LightningModule) -> LightningModule:
    """Return the user's module, unwrapped from :class:`VectorizedClients`."""
    return module.module if isinstance(module, VectorizedClients) else module
