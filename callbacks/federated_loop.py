"""One ``Trainer.fit`` as a whole federation."""

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
from lightning_fl.federation.checkpoint_checks import error_context
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
    not_of_a_federation,
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

    A round draws its clients and their hyperparameters, trains client after client from the
    server's parameters (one training batch is one local step), and puts the aggregate into the
    module before Lightning validates: validation, test, checkpoints and export see the server's
    model. It works with any LightningModule that uses automatic optimization, unchanged, and needs
    a :class:`~lightning_fl.datamodules.FederatedDataModule`.

    Args:
        aggregator: The server's rule; None is :class:`~lightning_fl.aggregators.FedAvg`.
        policy: Hyperparameters of rounds and clients; None is one local epoch at the module's own
            learning rate.
        sampler: Draws the cohort; None is uniform.
        clients_per_round: Number of clients that are sampled for a round.
        client_fraction: The same as a fraction of all clients, in (0, 1]. Without either all
            clients train in every round.
        min_clients: With fewer usable updates the server keeps its model for the round.
        on_client_error: What to do with an update that is lost or not finite: ``skip`` drops,
            counts and names it, ``raise`` ends the run. An exception in a client's step always ends
            it.
        optimizer_state: ``reset`` gives a client a fresh optimizer each round; ``keep`` lets each
            client keep its own (memory and checkpoint then grow with the number of clients).
        buffers: What becomes of a module's buffers after a client. ``average``: floating buffers
            are averaged like parameters, integer ones keep their maximum. ``server``: the server
            keeps its own. ``local``: each client keeps its own, the server the average. None is
            ``average``, with a warning where the module has running statistics.
        monitor: The validation loss that policies learn from.
        csv_name: File of the table of rounds, beside the logger's files; None writes none.
        seed: The run's seed; None is that of ``seed_everything``, else the checkpoint's, else 0.
        update_transforms: What happens to each client's update on its way to the server, in order:
            compression, for example.
        client_state_memory_gb: GiB of what clients keep from round to round that stay in memory;
            with more, all of it is in a file in the Trainer's ``default_root_dir`` while the run
            lasts.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if the Trainer, the
            module, the data or the checkpoint do not fit a federation.

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
        self.buffers, self.monitor, self.csv_name, self.seed = buffers, monitor, csv_name, seed
        self.update_transforms = list(update_transforms)
        self.progress = Progress()
        self.store = ClientStore(most=client_state_memory_gb * 2**30)
        #: The plan of the round that ended last, for callbacks; None if it was cut short.
        self.plan_of_the_round: RoundPlan | None = None
        #: What is put back when a fit ends, however it ends, the last first.
        self.undo = ExitStack()
        self._resume = Resume(self.progress, self.aggregator, self.policy)
        self._plan: RoundPlan | None = None
        self._round: Round | None = None
        self._fit: Fit | None = None
        #: Folders that no other run may write to, until the fit ends.
        self._folders: set[Path] = set()
        #: What checkpoints hold; from the start of a fit on.
        self._boundary: RoundBoundary | None = None
        #: Whether the round is over for the loop, but not yet for all other callbacks.
        self._is_closing = False
        self._first_round = 0  # of this fit
        self._warnings = DropWarnings()

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
        vectorized = pl_module if isinstance(pl_module, VectorizedClients) else None
        if vectorized is not None and vectorized.reason is not None:  # it trains sequentially
            vectorized = None
        data = check_fit(trainer, user, vectorized is not None)
        self._trainer, self._data = trainer, data
        self._processes = processes_of(trainer)
        if self._processes.share_samples and vectorized is not None:
            raise FederationError(
                f"{type(trainer.strategy).__name__} shares the samples of a client over processes,"
                " and VectorizedClients trains many clients in each: choose"
                " strategy='client_parallel', or leave VectorizedClients out"
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
        #: Callbacks that see updates on their way to the server.
        self._watchers = [c for c in callbacks if callable(getattr(c, "on_client_updates", None))]
        self.progress.seed = run_seed(self.seed)
        self._federation = self._describe(user)
        self.sampler.setup(self._federation)
        self.policy.setup(self._federation)
        self._check_cohort()
        check_network(trainer, user, data)
        check_smallest_batch(user, data)
        with evaluating(user), seeded_rng(0, user.device):  # dropout would be a difference
            self.aggregator.prepare(user, data.example)
        if self.buffers is None:
            warn_of_running_statistics(user)
        self._describe_to_resume()
        self._plan, self._round, self._fit = None, None, None
        self._take_over(pl_module)

    def _describe(self, user: LightningModule) -> Federation:
        """Return what the run is, as far as it is known before the module has an optimizer."""
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
        """Return the number of clients that are sampled for a round."""
        n = len(data.num_samples)
        if self.clients_per_round is None:
            return max(1, round((self.client_fraction or 1.0) * n))
        if self.clients_per_round > n:
            raise FederationError(
                f"clients_per_round={self.clients_per_round}, and the federation has {n} clients:"
                " lower it"
            )
        return int(self.clients_per_round)

    def _check_cohort(self) -> None:
        """Refuse rounds that could never have enough clients."""
        sampled = self._planner.cohort_size
        if sampled < self.min_clients and not self._trainer.fast_dev_run:  # type: ignore[attr-defined]
            raise FederationError(
                f"min_clients={self.min_clients}, but only {sampled} clients are sampled in a"
                " round: lower min_clients, or raise clients_per_round or client_fraction"
            )

    def _describe_to_resume(self) -> None:
        """Note what makes this run another one than a checkpoint's."""
        identity = {
            "num_clients": self._planner.num_clients,
            # Once: the digest reads every index, and every checkpoint holds it.
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
        """Set what rounds need on the Trainer and the data module, until the fit ends."""
        trainer, data, planner = self._trainer, self._data, self._planner
        if self._boundary is not None:  # of a fit that an exception has ended
            self._boundary.close()
        self._boundary, self._is_closing = RoundBoundary(trainer, self.state_key), False
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        # First, so that the others see each client loaded at its first batch, and the round closed.
        others = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [self, *others]  # type: ignore[attr-defined]
        self._log_every_n_steps = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self.undo.callback(setattr, trainer, "log_every_n_steps", self._log_every_n_steps)
        if "://" not in (folder := str(trainer.default_root_dir)):  # else no place for a file
            self.store.folder = folder
        if "val_loss" in self.policy.learns_from:
            trainer.num_sanity_val_steps = math.inf
        if (path := self.table_path(trainer)) is not None:
            self._hold(trainer, path.parent)
        self.undo.enter_context(one_optimizer(pl_module))
        self.undo.enter_context(
            stepping_batches(trainer, lambda: planner.stepping_batches(self.run_seed, self.round))
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
        """Take hold of the module's tensors and its optimizer; restore a checkpoint."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by the connector
            is_writing = isinstance(callback, RoundCheckpoint) and not trainer.fast_dev_run  # type: ignore[attr-defined]
            if is_writing and callback.dirpath is not None:
                self._hold(trainer, callback.dirpath)
        self.aggregator.load_client_network()
        keeps = self.optimizer_state == "keep"
        self.runner = client_runner(
            pl_module, self.buffers or "average", trainer.optimizers[0], keeps
        )
        self.undo.callback(self.runner.close)
        self._fit = fit = self._start_fit(pl_module)
        self._validation = Validation(trainer, self._data, self.policy, self._processes)
        self.undo.callback(self._validation.close)
        is_new = trainer.ckpt_path is None or self._resume.pending == NOT_BEGUN
        if not is_new:
            if not self._resume.pending:  # Lightning asks nobody where the file has no callbacks
                raise not_of_a_federation(trainer)
            with error_context(f"{trainer.ckpt_path} cannot be resumed"):
                self._resume.restore(fit)
        boundary = self._noted
        boundary.chosen = lambda: {"runner": c} if (c := self.runner.choices()) else {}
        boundary.call_before_checkpoints(self._note_close)
        if is_new:
            self._note_boundary(is_begun=False)

    def _start_fit(self, pl_module: LightningModule) -> Fit:
        """Set up the rule, now that the module has its tensors; return what rounds work with."""
        trainer, runner, rule = self._trainer, self.runner, self.aggregator
        seed = self.run_seed  # a checkpoint may have brought another
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
        """Note the loss before the first round, where a policy asked for it."""
        if "val_loss" in self.policy.learns_from and self.round == 0:
            self._note_val_loss(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where the first round starts."""
        if trainer.current_epoch != self.round:
            raise FederationError(
                f"the loop has done {self.round} rounds and the Trainer {trainer.current_epoch}"
                " epochs: give each Trainer a FederatedLoop of its own, or resume both from a"
                " checkpoint with ckpt_path"
            )
        self._first_round, self._warnings = self.round, DropWarnings()
        self.fit.schedulers.catch_up(self.round, self.progress.monitored)
        self.progress.monitored = {}
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
        }

    # --- a round ----------------------------------------------------------------------------------

    def plan(self) -> RoundPlan:
        """Return the plan of the round: a function of the loop's saved state, drawn once."""
        if self._plan is None or self._plan.round != self.round:
            self._planner.advance(self.round)
            self._plan = self._planner.draw(self.run_seed, self.round)
            # Lightning warns of rounds shorter than its logging interval, every round.
            steps = len(self._plan.schedule)
            self._trainer.log_every_n_steps = min(self._log_every_n_steps, steps)  # type: ignore[attr-defined]
        return self._plan

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the state before the round, which a round that is cut short goes back to.

        Hooks of this name that are called after this one run again when a run is resumed.
        """
        self._write_rounds(trainer)
        self.aggregator.load_client_network()
        plan = self.plan()
        if trainer.num_training_batches != len(plan.schedule):
            raise FederationError(
                f"round {self.round + 1} has {len(plan.schedule)} local steps, but Lightning would"
                f" run {trainer.num_training_batches} batches: the training loader is not the"
                " FederatedDataModule's own"
            )
        self.rounds.begin(trainer.callback_metrics)
        self._round = Round(self.fit, plan)
        self._traffic = self._round.traffic

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Load the global model at the first step of clients."""
        self._current.start_batch(batch_idx)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Weigh each process's mean loss by its samples, where processes share a batch."""
        if self._round is not None:
            self._round.scale(loss)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note what clients report of the model that they started from."""
        self._current.report(batch_idx, outputs)

    def _end_batch(self, batch_idx: int) -> None:
        """Collect clients after every hook of their last step; aggregate after the last client."""
        round = self._current
        if not round.end_batch(batch_idx):
            return
        round.aggregate()
        sampled, dropped = len(round.plan.cohort), round.results.dropped
        limit = f"min_clients={self.fit.min_clients} and {describe(self.aggregator)}"
        kept_by = limit if round.is_kept else None
        self._warnings.note(self.round + 1, sampled, dropped, kept_by)
        self._noted.passed()

    @property
    def fit(self) -> Fit:
        """What rounds work with, from the start of a fit on."""
        assert self._fit is not None, "a hook of the fit ran before on_fit_start"
        return self._fit

    @property
    def _current(self) -> Round:
        assert self._round is not None, "a training hook ran outside of a round"
        return self._round

    def _abandon(self) -> None:
        """After a round that was cut short the global model stays, never half a client."""
        if self._round is not None:
            self._round.abandon(lambda: self._noted.state()["aggregator"])

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the global model behind, and let go: Lightning does not tear down.

        Checkpoints still describe the last boundary: there are callbacks that save one now. Nothing
        that fails here may hide the exception, which gets a note of it.
        """
        self._is_closing = False
        where = None if self._round is None else self._round.where()
        if isinstance(exception, Exception) and where:
            exception.add_note(where)
        for clean_up in (self._abandon, self._summarize, self.undo.close):
            try:
                clean_up()
            except Exception as error:  # of a rule, a warning or a device
                exception.add_note(
                    f"Afterwards {clean_up.__name__.strip('_')} failed, so the module may not hold"
                    f" the global model: {type(error).__name__}: {error}"
                )

    # --- after the clients ------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give validation a stream of its own, whatever was drawn before."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._validation.begin(pl_module)
        if self._round is not None:
            self._abandon()
            self._round.begin_validation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go back to the round's stream."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._validation.end()
        if self._round is not None:
            self._round.end_validation()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the round: the policy learns, the table gets its row."""
        round = self._current
        if not round.is_aggregated:  # Stopped in the middle; a resumed run does this round again.
            self._end_early(round)
            return
        self.store.commit()
        round.logs.put_back(trainer, self._processes.share_clients)
        self.aggregator.check_metrics({f"federation/{name}" for name in COLUMNS - {"lr"}})
        before = self.val_loss
        self._note_val_loss(trainer)
        if self.policy.learns:  # else nobody listens
            # One for all: modules may log without synchronizing, and policies must agree.
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
        """Abandon a round that ends before its last client."""
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
        """Tell loggers and callbacks, as ``log_dict`` would, which takes 20 times as long."""
        own = {f"federation/{name}": float(value) for name, value in figures.items()}
        trainer.callback_metrics.update({k: torch.tensor(v) for k, v in own.items()})
        self._round_log.end_round({"round": self.round, **own})

    def _note_val_loss(self, trainer: Trainer) -> None:
        """Note the validation loss of this round: not one that is left from an earlier round."""
        self.progress.val_loss, metrics = None, trainer.callback_metrics
        if self._round is not None and not self._round.is_validated:
            return
        is_fresh = self.rounds.is_fresh(self.monitor, metrics)
        val_loss = float(metrics[self.monitor]) if is_fresh else None
        # One for all: a module may not have synchronized it, and policies must agree.
        self.progress.val_loss = trainer.strategy.broadcast(val_loss)
        if self.val_loss is None and "val_loss" in self.policy.learns_from:
            raise FederationError(
                f"{type(self.policy).__name__} learns from {self.monitor!r}, which validation does"
                f" not log (it logs {sorted(metrics)}): set monitor, or give it samples to validate"
                " on (data.init_args.val_size, trainer.limit_val_batches)"
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the whole table, also after a resume that found nothing left to do."""
        self._write_rounds(trainer)
        self._summarize()

    def _write_rounds(self, trainer: Trainer) -> None:
        self.rounds.complete(trainer.callback_metrics, close=True)
        if (path := self.table_path(trainer)) is not None and self.rows:
            self.rounds.write(path)

    def _summarize(self) -> None:
        self._warnings.summarize(self.rows[self._first_round :])

    def table_path(self, trainer: Trainer) -> Path | None:
        """Return where the table of rounds is written, None where it is not."""
        if self.csv_name is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return None
        return Path(trainer.log_dir or trainer.default_root_dir, self.csv_name)

    # --- how far the run is -----------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Rounds that ended."""
        return self.progress.round

    @property
    def rounds(self) -> RoundTable:
        """The table of rounds."""
        return self.progress.table

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table of rounds that ended, one dictionary for each."""
        return self.rounds.rows

    @property
    def val_loss(self) -> float | None:
        """The validation loss after the last round, None if it is not known."""
        return self.progress.val_loss

    @property
    def run_seed(self) -> int:
        """The seed that a run is a function of; known from the start of a fit on."""
        return self.progress.seed

    def bytes_of_a_client(self) -> tuple[int, int]:
        """Return the bytes that go up and down between the server and a client in a round."""
        return self._traffic.of_a_client()

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

    def _note_boundary(self, is_begun: bool = True) -> None:
        state, store = self._resume.state(self.fit), self.store.snapshot()
        self._noted.note(state, store, is_begun=is_begun)

    def _note_close(self) -> None:
        """Note the end of the round, when all others have done their work for it."""
        if self._is_closing:
            metrics = self._trainer.callback_metrics
            self.rounds.complete(metrics)
            self.progress.monitored = self.fit.schedulers.monitored(metrics)
            self._note_boundary()
            self.store.release()
            self._is_closing = False

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as of the last boundary between two rounds."""
        return {} if self._boundary is None else self._boundary.state()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse a checkpoint of another federation; a test only wants its parameters."""
        state, is_fit = checkpoint["callbacks"].get(self.state_key), trainer.state.fn == "fit"
        if state == NOT_BEGUN and is_fit:
            checkpoint |= {"optimizer_states": [], "lr_schedulers": []}
            checkpoint.pop("loops", None)
            return
        is_begun = "loops" in checkpoint
        check_contents(trainer, checkpoint, state)
        if not is_fit:
            return
        self._resume.check(trainer, pl_module, checkpoint, state, self.seed is not None)
        if not is_begun:  # Lightning begins, too
            del checkpoint["loops"]
        self._noted.adopt(checkpoint)
        self.aggregator.load_client_network()  # lanes are made of the shapes that clients train

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint's state, after :meth:`on_load_checkpoint` agreed to it."""
        self._resume.load(state_dict)
        if state_dict != NOT_BEGUN:
            self.seed = self.run_seed
            self.store.load_state_dict(state_dict["store"])
            self._plan = None

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Complete a checkpoint that Lightning makes: before the fit has begun, or after it."""
        checkpoint |= {} if self._boundary is None else self._boundary.progress()
        is_new = trainer.state.fn == TrainerFn.FITTING and trainer.ckpt_path is None
        if is_new and not checkpoint["callbacks"].get(self.state_key):
            checkpoint["callbacks"][self.state_key] = dict(NOT_BEGUN)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the optimizer, the data and the Trainer."""
        self.undo.close()
        if self._boundary is not None:
            self._boundary.close()


class _Events(StepEvents):
    """Tell the loop of training steps."""

    def __init__(self, loop: FederatedLoop) -> None:
        self._loop = loop

    def step_of(self, batch_idx: int) -> Step:
        return self._loop._current.plan.schedule[batch_idx]

    def after_epoch_start(self) -> None:
        self._loop._current.begin()

    def after_batch_end(self, batch_idx: int) -> None:
        self._loop._end_batch(batch_idx)


def loop_of(trainer: Trainer) -> FederatedLoop | None:
    """Return the federation of a Trainer; None where there is none."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by the connector
    return next((c for c in callbacks if isinstance(c, FederatedLoop)), None)


def user_module(module: LightningModule) -> LightningModule:
    """Return the user's module, without the lanes that train it."""
    return module.module if isinstance(module, VectorizedClients) else module
