"""Callback that turns ``Trainer.fit`` into federated training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.aggregators import Aggregator, FedAvg
from lightning_fl.callbacks.checkpoint import AtomicCheckpointIO, lock_folders
from lightning_fl.callbacks.hyperparameters import RoundLog, log_hyperparameters
from lightning_fl.callbacks.lean_steps import lean_steps
from lightning_fl.callbacks.round_events import follow_steps
from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.errors import FederationError, check_package
from lightning_fl.federation.checkpoints import NOT_BEGUN, RunState, load_by_name
from lightning_fl.federation.counts import ClientCounts
from lightning_fl.federation.fit import Fit, PreparedFit
from lightning_fl.federation.progress import Progress
from lightning_fl.federation.round import Round
from lightning_fl.federation.run_options import RunOptions
from lightning_fl.federation.table import TABLE
from lightning_fl.federation.validation import leave_interrupted
from lightning_fl.functional.randomness import rng_state, run_seed, set_rng_state
from lightning_fl.options import check_flag, check_integer
from lightning_fl.policies import HyperparameterPolicy, Schedule
from lightning_fl.runners import BufferPolicy, ClientRunner, user_module
from lightning_fl.runners.samples import check_batch
from lightning_fl.samplers import ClientSampler, UniformSampler
from lightning_fl.store import ClientStore
from lightning_fl.transforms import UpdateTransform


class FederatedLoop(Callback):
    """Make each training epoch a communication round of federated learning.

    Each round samples clients and their hyperparameters, trains every sampled client from the
    global model (one training batch is one local step), aggregates the client updates, and loads
    the new global model into the module before Lightning validates. Validation, test, checkpoints
    and export therefore use the global model. The callback works with any LightningModule, without
    changes to the module, and requires a :class:`~lightning_fl.datamodules.FederatedDataModule`.

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
        optimizer_state: ``reset`` creates a new optimizer state for each client in each round;
            ``keep`` stores the state of each client between rounds (memory and checkpoint size
            then grow with the number of clients). ``local`` keeps the state of the parameters that
            stay with the client, and resets the others.
        buffers: How to combine the buffers of the clients. ``average``: floating-point buffers are
            averaged like parameters, integer buffers take the maximum. ``server``: the server
            keeps its buffers. ``local``: each client keeps its buffers and the server takes the
            average. None selects ``average`` and warns if clients change buffers.
        seed: Seed of the run. None uses the seed of ``seed_everything``, else the checkpoint's
            seed, else 0.
        update_transforms: Transforms applied in order to each client update before aggregation,
            such as compression.
        local_parameters: Patterns of parameters and buffers that stay with each client: they are
            neither sent nor averaged, and each client continues from its own values in its next
            round. A pattern matches names as in ``fnmatch`` (``net.head.*``), or, with the prefix
            ``type:``, the class of a layer or one of its base classes (``type:_BatchNorm``: weight,
            bias, statistics and counter of every BatchNorm layer). The global model keeps their
            initial values; :class:`PersonalizedEvaluation` evaluates the clients' models. They add
            to the tensors that the module names in ``federated_local_parameters``.
        check: Whether to check in the first round, on copies of the module, that the training of
            the first client does not change the first step of the second (a warning then names
            ``lightning-fl check``), and that vectorized steps equal the module's own.

    Raises:
        FederationError: If an option is out of range. At the start of a fit, if the Trainer, the
            module, the data or the checkpoint is not compatible with federated training.

    Example:
        >>> from lightning_fl.policies import Schedule
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
        optimizer_state: Literal["reset", "keep", "local"] = "reset",
        buffers: BufferPolicy | None = None,
        seed: int | None = None,
        update_transforms: Sequence[UpdateTransform] = (),
        local_parameters: Sequence[str] = (),
        check: bool = True,
    ) -> None:
        self.options = RunOptions(
            aggregator=FedAvg() if aggregator is None else aggregator,
            policy=Schedule() if policy is None else policy,
            sampler=UniformSampler() if sampler is None else sampler,
            clients_per_round=clients_per_round,
            client_fraction=client_fraction,
            min_clients=min_clients,
            optimizer_state=optimizer_state,
            buffers=buffers,
            update_transforms=list(update_transforms),
            local_parameters=local_parameters,
        )
        #: Path of the table of rounds, relative to the logger's directory; None writes no file.
        self.table_name: str | None = TABLE
        self.check = check_flag("check", check)
        self.seed = check_integer("seed", seed, min=0, optional=True)
        self.progress = Progress()
        self.store = ClientStore()
        #: Whether a callback evaluates the model of each client; set in its ``setup``.
        self.evaluates_clients = False
        #: Plan of the last finished round, for other callbacks; None if the round was interrupted.
        self.plan_of_the_round: RoundPlan | None = None
        #: Cause of the drop by client id, in the last finished round.
        self.dropped_in_the_round: dict[int, str] = {}
        #: Loss of the model that a client received, in its first local step, by client id, in the
        #: last finished round.
        self.losses_in_the_round: dict[int, float] = {}
        #: Clean-up functions, called in reverse order when a fit ends or fails.
        self.undo = ExitStack()
        self._run_state = RunState(self.options, self.progress, self.store)
        self._prepared: PreparedFit | None = None
        self._fit: Fit | None = None
        self._round: Round | None = None
        #: True after the loop has ended the round and while other callbacks are still ending it.
        self._is_closing = False

    @property
    def state_key(self) -> str:
        """Key in checkpoints. Subclasses use the same key."""
        return FederatedLoop.__qualname__

    # --- before the first round -------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that rounds are supported, and configure the Trainer for them."""
        check_package(trainer, Trainer)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # not a user's own
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        load_by_name(trainer, pl_module, self.undo)
        if stage != "fit":
            self.aggregator.prepare(user_module(pl_module))
            return
        if self._prepared is not None:  # left by a fit that ended with an exception
            self._prepared.boundary.close()
        self.progress.seed = run_seed(self.seed)
        key = self.state_key
        self._prepared = PreparedFit(trainer, pl_module, self.options, self.progress, key)
        self._run_state.describe(self._prepared)
        self._fit, self._round, self._is_closing = None, None, False
        if "://" not in (folder := str(trainer.default_root_dir)):  # needs a local folder
            self.store.folder = folder
        self._prepared.take_over(self, self.undo)
        counts = ClientCounts(pl_module, self._prepared.planner, lambda: self._round)
        self.undo.enter_context(counts.shown(trainer))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set up the client runner and the aggregator; restore the checkpoint if there is one."""
        assert self._prepared is not None
        lock_folders(trainer, self.table_path(trainer), self.undo)
        self._fit = Fit(self._prepared, self.store, self.undo, self.check)
        self._run_state.begin(self._fit)
        if self.options.local_parameters and not self.evaluates_clients:
            rank_zero_warn(
                f"validation and test use the global model, in which"
                f" local_parameters={list(self.options.local_parameters)} keep their initial"
                " values. To evaluate each client's own model, add PersonalizedEvaluation to the"
                " callbacks and set local_test_size of the data module"
            )
        self._fit.boundary.call_before_checkpoints(self._close_round, self.undo)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the validation loss before the first round if the policy needs it."""
        if "val_loss" in self.policy.learns_from and self.round == 0:
            self.progress.val_loss = self.fit.validation.loss(self.progress.table)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the boundary before the first round of this fit, and start logging."""
        self.fit.catch_up()
        self.aggregator.load_global_network()
        self._run_state.note(self.fit)
        trainer.callback_metrics.update(self.progress.metrics)
        self.fit.schedulers.catch_up(self.round, self.progress.metrics)
        self.aggregator.load_client_network()
        self.undo.callback(set_rng_state, rng_state(pl_module.device))
        log_hyperparameters(self.fit)
        self._log = RoundLog(trainer, self.undo)
        follow_steps(self.fit, lambda: self._current, self.undo)
        lean_steps(trainer, pl_module, lambda: self._current, self.undo)

    # --- a round ----------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a round.

        An interrupted round is repeated when the run is resumed, and so are the hooks of this name
        that are called after this one.
        """
        self._write_table(trainer)
        self.aggregator.load_client_network()
        plan, count = self.plan(), trainer.fit_loop.max_batches
        if count != len(plan.schedule):
            raise FederationError(
                f"round {plan.round + 1} has {len(plan.schedule)} local steps, but the training"
                f" loader has {count} batches: use the training loader of the FederatedDataModule"
            )
        self._round = Round(self.fit)

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

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the gradients of parameters that clients do not train in this phase."""
        if self._round is not None:
            self._round.hold_gradients()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss that clients report for the model at the start of the round."""
        check_batch(batch)
        if (accumulated := trainer.accumulate_grad_batches) > 1 and outputs:
            outputs = {**outputs, "loss": outputs["loss"] * accumulated}  # which Lightning divides
        self._current.report(self._current.plan.schedule[batch_idx], outputs)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Switch to the random stream of validation."""
        if trainer.state.fn == TrainerFn.FITTING:
            self.fit.validation.begin(pl_module)
            if self._round is not None:
                self._round.begin_validation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Return to the random stream of the round."""
        if trainer.state.fn == TrainerFn.FITTING:
            self.fit.validation.end()
            if self._round is not None:
                self._round.end_validation()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the round: update the policy, add a row to the table and log metrics."""
        round = self._current
        if not round.is_aggregated:
            self.plan_of_the_round = None
            round.end_early()
            return
        metrics = round.end()
        self.plan_of_the_round, self._round, self._is_closing = round.plan, None, True
        self.dropped_in_the_round = round.results.dropped
        self.losses_in_the_round = round.results.reported
        self._log.end_round(self.round, metrics)

    def _close_round(self) -> None:
        """Record the boundary after all other callbacks have ended the round."""
        if self._is_closing:
            self._run_state.close_round(self.fit)
            self._is_closing = False

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the table of rounds, also if a resumed run had no rounds left."""
        self._write_table(trainer)
        self._summarize()

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

    def _abandon(self) -> None:
        if self._fit is not None:
            leave_interrupted(self._fit.trainer)
        if self._round is not None:
            self._round.abandon()
            if self._round.is_aggregated:  # the module and the rules hold the next global model
                self._run_state.note_run()

    def _summarize(self) -> None:
        if self._fit is not None:
            self._fit.warnings.summarize()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the optimizer, the data and the Trainer."""
        self.undo.close()
        if self._prepared is not None:
            self._prepared.boundary.close()

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state at the last boundary between two rounds."""
        return {} if self._prepared is None else self._prepared.boundary.state()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Check that the checkpoint belongs to this federation. Tests load parameters only."""
        has_seed = self.seed is not None
        if self._run_state.accept(trainer, pl_module, checkpoint, self.state_key, has_seed):
            assert self._prepared is not None
            self._prepared.boundary.adopt(checkpoint)
            self.aggregator.load_client_network()  # runners need the shapes of the client model

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a checkpoint accepted by :meth:`on_load_checkpoint`."""
        self._run_state.load(state_dict)
        self.seed = state_dict.get("seed", self.seed)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the progress of rounds to a checkpoint, also before or after a fit."""
        checkpoint |= {} if self._prepared is None else self._prepared.boundary.progress()
        is_new = trainer.state.fn == TrainerFn.FITTING and trainer.ckpt_path is None
        if is_new and not checkpoint["callbacks"].get(self.state_key):
            checkpoint["callbacks"][self.state_key] = dict(NOT_BEGUN)

    # --- for other callbacks ----------------------------------------------------------------------

    @property
    def aggregator(self) -> Aggregator:
        """The aggregation rule."""
        return self.options.aggregator

    @property
    def policy(self) -> HyperparameterPolicy:
        """The hyperparameter policy."""
        return self.options.policy

    @property
    def fit(self) -> Fit:
        """Objects of the fit; available from its start."""
        assert self._fit is not None, "a hook of the fit ran before on_fit_start"
        return self._fit

    @property
    def runner(self) -> ClientRunner:
        """Runner that trains the clients; available from the start of a fit."""
        return self.fit.runner

    @property
    def _current(self) -> Round:
        assert self._round is not None, "a training hook ran outside of a round"
        return self._round

    def sent_entries(self) -> Tensor | slice:
        """Return the index of the entries of updates that clients send in the current round.

        Frozen parameters, and buffers that the server keeps, are not sent.
        """
        return self._current.sent_entries()

    def plan(self) -> RoundPlan:
        """Return the plan of the round. It is drawn once and depends on the saved state only."""
        assert self._prepared is not None
        return self._prepared.planner.plan()

    @property
    def round(self) -> int:
        """Number of finished rounds."""
        return self.progress.round

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of the table of rounds, one dictionary per finished round."""
        return self.progress.table.rows

    @property
    def run_seed(self) -> int:
        """Seed of the run; available from the start of a fit."""
        return self.progress.seed

    @property
    def clients_done(self) -> tuple[int, int]:
        """Finished clients and all clients of this process's round; (0, 0) between rounds."""
        round = self._round
        return (0, 0) if round is None else (round.position, len(round.plan.rows))

    def table_path(self, trainer: Trainer) -> Path | None:
        """Return the path of the table of rounds, or None if it is not written."""
        if self.table_name is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return None
        return Path(trainer.log_dir or trainer.default_root_dir, self.table_name)

    def _write_table(self, trainer: Trainer) -> None:
        self.progress.table.complete(trainer.callback_metrics, close=True)
        self.progress.table.write(self.table_path(trainer))


def loop_of(trainer: Trainer, owner: str) -> FederatedLoop:
    """Return the FederatedLoop of a Trainer.

    Args:
        trainer: The Trainer.
        owner: Name of the callback that requires it.

    Raises:
        FederationError: If there is none.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by the connector
        if isinstance(callback, FederatedLoop):
            return callback
    raise FederationError(f"{owner} requires a FederatedLoop: add one to the Trainer's callbacks")
