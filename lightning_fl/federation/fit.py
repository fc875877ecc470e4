"""The objects of a fit: before the module has an optimizer, and after."""

from __future__ import annotations

import math
import os
import re
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.hyperparameters import CLASS_COUNTS, HYPERPARAMETERS, Declared
from lightning_fl.contracts.plan import Cohort, RoundPlan
from lightning_fl.errors import FederationError
from lightning_fl.federation.checks import (
    check_clock,
    check_evaluations,
    check_fit,
    check_network,
    check_phases_of_terms,
    check_policy,
    check_private_steps,
    check_terms,
    checked_optimizers,
    terms_of,
)
from lightning_fl.federation.client_memory import ClientMemory
from lightning_fl.federation.dropped import DropWarnings
from lightning_fl.federation.measures import Measures, evaluating
from lightning_fl.federation.planner import Planner
from lightning_fl.federation.processes import Processes
from lightning_fl.federation.progress import Progress
from lightning_fl.federation.round_boundary import RoundBoundary
from lightning_fl.federation.run_options import RunOptions
from lightning_fl.federation.schedulers import Schedulers
from lightning_fl.federation.traffic import Traffic
from lightning_fl.federation.validation import Validation
from lightning_fl.federation.vectorize import decide, largest_batches
from lightning_fl.frozen import with_all_names
from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.hooks import attributes_set
from lightning_fl.options import check_integer, describe
from lightning_fl.policies import HyperparameterPolicy
from lightning_fl.runners import ClientRunner, SequentialRunner, VectorizedClients, user_module
from lightning_fl.runners.base import KeepOptimizer
from lightning_fl.runners.local_tensors import split_tensors
from lightning_fl.runners.samples import Collated
from lightning_fl.runners.tensors import ModuleTensors
from lightning_fl.runners.vectorized_runner import VectorizedRunner
from lightning_fl.samplers import how_drawn
from lightning_fl.store import ClientStore


def describe_optimizers(trainer: Trainer) -> list[str]:
    """Return the optimizers and schedulers of a Trainer, with their plain options."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    options = [(each, group) for each in trainer.optimizers for group in each.param_groups]
    return [
        f"{type(each).__name__} {name}={value}"
        for each, values in [*options, *((each, vars(each)) for each in schedulers)]
        for name, value in sorted(values.items())
        if isinstance(value, bool | int | float | str | tuple) and name[0] != "_"
    ]


class PreparedFit:
    """Checked fit, before the module has an optimizer.

    Args:
        trainer: The Trainer.
        module: The module passed to the Trainer.
        options: Options of the run.
        progress: Progress of the run, with its seed.
        key: Key of the loop in checkpoints.

    Raises:
        FederationError: If the Trainer, the module, the data or the options do not fit together.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        options: RunOptions,
        progress: Progress,
        key: str,
    ) -> None:
        self.trainer, self.module, self.options, self.progress = trainer, module, options, progress
        user = user_module(module)
        vectorized = module if isinstance(module, VectorizedClients) else None
        if trainer.accumulate_grad_batches != 1:
            if options.phases:
                raise FederationError(
                    "phases cannot be combined with accumulate_grad_batches, since a phase may end"
                    " between two optimizer steps: increase batch_size instead"
                )
            if vectorized is not None and vectorized.reason is None:
                vectorized.train_one_by_one("it accumulates gradients (accumulate_grad_batches)")
        is_vectorized = vectorized is not None and vectorized.reason is None
        self.data = check_fit(trainer, user, is_vectorized)
        #: Digest of the partition. It is computed once, because the digest reads every index.
        self.checksum = self.data.checksum
        self.samples_checksum = self.data.samples_checksum
        self.processes = Processes(trainer)
        self.planner = Planner(
            trainer, self.data, options, progress, vectorized, self.processes, Declared(user)
        )
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by the connector
        #: Callbacks that implement ``on_client_updates``.
        self.watchers = [c for c in callbacks if isinstance(c, Watcher)]
        # These callbacks unfreeze parameters during the fit.
        self.exchange_frozen = any(isinstance(callback, BaseFinetuning) for callback in callbacks)
        self.federation = self._describe(user)
        check_policy(options)
        options.sampler.setup(self.federation)
        options.policy.setup(self.federation)
        sampled = self.planner.cohort_size
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            hint = "increase clients_per_round or client_fraction"
            check_integer("min_clients", options.min_clients, min=1, max=sampled, hint=hint)
        check_network(trainer, user, self.data)
        with evaluating(user), seeded_rng(0, user.device):  # dropout would change the output
            options.aggregator.prepare(user, self.data.example)
        #: What trains clients one after another, and the client-side work of the aggregator that is
        #: done on this machine; a server of clients elsewhere sets others.
        self.runner_class: type[ClientRunner] = SequentialRunner
        self.client_parts = options.aggregator.client_parts
        #: State written to checkpoints.
        self.boundary = RoundBoundary(trainer, key)

    def identity(self) -> dict[str, Any]:
        """Return the values by name that must be the same in a resumed run."""
        options = self.options
        return {
            "num_clients": self.planner.num_clients,
            "checksum": self.checksum,
            "aggregator_class": type(options.aggregator).__name__,
            "policy_class": type(options.policy).__name__,
            "buffers": options.buffer_policy,
            "optimizer_state": options.optimizer_state,
        }

    def described(self) -> dict[str, Any]:
        """Return the options by name that may differ in a resumed run, with a warning."""
        options, user = self.options, user_module(self.module)
        policies = [p for p in options.policy.modules() if isinstance(p, HyperparameterPolicy)]
        terms = terms_of(user)
        return {
            "clients in a round": self.planner.cohort_size,
            "min_clients": int(options.min_clients),
            "sampler": describe(options.sampler),
            "aggregator": describe(options.aggregator),
            "policy": ", ".join(map(describe, policies)),
            "phases": [repr(phase) for phase in options.phases],
            "update_transforms": [describe(transform) for transform in options.update_transforms],
            "batches in a local epoch": int(self.planner.batches_per_epoch.sum()),
            self.data.samples_are: self.samples_checksum,
            "faults and attacks": [describe(watcher) for watcher in self.watchers],
            "terms": [describe(term) for term in terms],
        }

    def configuration(self) -> str:
        """Return a text that differs between runs with other options, and not between processes."""
        trainer = self.trainer
        loader = [self.data.batch_size, self.data.replacement, self.data.drop_last]
        training = [trainer.precision, trainer.gradient_clip_val, trainer.gradient_clip_algorithm]
        optimizers, rules = describe_optimizers(trainer), [self.identity(), self.described()]
        text = repr([rules, optimizers, training, loader])
        return re.sub(r" at 0x[0-9a-fA-F]+", "", text)  # addresses of objects

    def _describe(self, user: LightningModule) -> Federation:
        options, planner = self.options, self.planner
        n, size = planner.num_clients, planner.cohort_size
        return Federation(
            n,
            Cohort(size, n, how_drawn(options.sampler)),
            seed=self.progress.seed,
            shares_samples=self.processes.share_samples,
            num_samples=planner.num_samples,
            module=user,
            trainer=self.trainer,
            data=self.data,
            aggregator=options.aggregator,
            policy=options.policy,
            sampler=options.sampler,
            min_clients=int(options.min_clients),
            buffers=options.buffer_policy,
            optimizer_state=options.optimizer_state,
            phases=options.phases,
            update_transforms=options.update_transforms,
        )

    def take_over(self, loop: Callback, undo: ExitStack) -> None:
        """Configure the Trainer and the data module for rounds.

        Args:
            loop: The callback of the rounds.
            undo: Clean-up functions of the fit, to which those of the configuration are added.
        """
        trainer: Any = self.trainer  # its connectors set attributes that it does not declare
        data, planner = self.data, self.planner
        # The planner changes the interval of logging.
        own: dict[str, Any] = {
            "reload_dataloaders_every_n_epochs": 1,
            "log_every_n_steps": trainer.log_every_n_steps,
        }
        if "val_loss" in self.options.policy.learns_from:
            own["num_sanity_val_steps"] = math.inf
        undo.enter_context(attributes_set(trainer, own))
        # Placed first: other callbacks then see each client loaded at its first batch, and the
        # round ended at its last hook.
        trainer.callbacks = [loop, *(c for c in trainer.callbacks if c is not loop)]
        if isinstance(self.module, VectorizedClients):
            self.module.exchange_frozen = self.exchange_frozen
            self.module.local_patterns = self.options.local_parameters
            self.module.keeps_optimizer = self.options.optimizer_state != "reset"
        undo.enter_context(checked_optimizers(user_module(self.module)))
        data.plan = planner.plan
        undo.callback(setattr, data, "plan", None)


@runtime_checkable
class Watcher(Protocol):
    """Callback that sees, changes or drops the updates of clients before they are aggregated."""

    def on_client_updates(
        self, plan: RoundPlan, clients: Tensor, delta: Tensor, dropped: dict[int, str]
    ) -> Tensor:
        """Return the updates; see ``lightning_fl.callbacks.faults.OnUpdates``."""


class Fit:
    """Objects shared by the rounds of a fit. The aggregator is set up for them.

    Args:
        prepared: The checked fit, after the optimizer was created.
        store: Client state between rounds.
        undo: Clean-up functions of the fit, to which those of the objects are added.
        check: Whether to check steps in the first round.
    """

    def __init__(
        self, prepared: PreparedFit, store: ClientStore, undo: ExitStack, check: bool
    ) -> None:
        self.check = check
        self.trainer, self.module, self.data = prepared.trainer, prepared.module, prepared.data
        self.options, self.progress = prepared.options, prepared.progress
        self.planner, self.processes = prepared.planner, prepared.processes
        self.watchers, self.boundary = prepared.watchers, prepared.boundary
        self.processes.check_same(
            "training samples, or another split of them: make what the data module loads"
            " reproducible, for example with a generator in random_split",
            prepared.checksum + prepared.samples_checksum,
        )
        self.aggregator, self.policy = self.options.aggregator, self.options.policy
        self.aggregator.load_client_network()
        self.exchange_frozen = prepared.exchange_frozen
        self._runner_class = prepared.runner_class
        self.runner = self._make_runner()
        undo.callback(self._close)
        check_phases_of_terms(self.runner.module, self.runner.phases.is_trained)
        seed = self.progress.seed  # may differ from the seed at setup after a checkpoint was loaded
        bits = self.options.aggregator.sent_bits
        traffic = Traffic(self.runner.layout, self.options.update_transforms, bits)
        traffic.begin(self.runner.trained_mask())
        self.federation = replace(
            prepared.federation,
            layout=self.runner.layout,
            seed=seed,
            local_parameters=list(self.runner.private),
            traffic=traffic.of_a_client(),
            configuration=prepared.configuration(),
        )
        check_clock(self.options, self.planner.is_drawn)
        self.options.sampler.begin(self.federation)
        server = self.runner.read().vector
        self.policy.to(server.device)
        self.aggregator.setup(self.federation)
        self.aggregator.to(server.device).start(server)
        #: Client-side work of the aggregator in addition to training.
        self.parts = prepared.client_parts()
        check_private_steps(self.runner.module, self.options, self.parts)
        check_evaluations(self.trainer, self.runner.module)
        check_terms(self.runner.module, self.federation)
        self.schedulers = Schedulers(self.trainer, self.runner.optimizer_state)
        self.measures = Measures(self.trainer, self.data, seed, self.processes)
        self.memory = ClientMemory(
            store, self.options.update_transforms, self.parts, self.federation, server.device
        )
        #: Whether the first round of the fit has begun.
        self.has_begun = False
        #: Whether there has been a new global model in the fit.
        self.has_aggregated = False
        #: Traffic of the current or last round, which sets it.
        self.traffic: Traffic
        self.warnings = DropWarnings(self.data.client_names)
        self.validation = Validation(self.trainer, self.data, self.options, self.processes)
        undo.callback(self.validation.close)

    def _make_runner(self) -> ClientRunner:
        keeps: dict[str, KeepOptimizer] = {"reset": False, "keep": True, "local": "local"}
        module, user, buffers = self.module, user_module(self.module), self.options.buffer_policy
        keep, optimizers = keeps[self.options.optimizer_state], self.trainer.optimizers
        constants, local = split_tensors(user, self.exchange_frozen, self.options.local_parameters)
        runner: ClientRunner
        if isinstance(module, VectorizedClients) and module.reason is None:
            tensors = ModuleTensors(user, module.constants, local)
            module.runner = VectorizedRunner(tensors, buffers, optimizers[0], keep, module.stack)
            runner = module.runner
        else:
            tensors = ModuleTensors(user, constants, local)
            runner = self._runner_class(tensors, buffers, optimizers, keep)
        runner.set_phases(self.options.phases)
        self.boundary.left_out = with_all_names(user, runner.constants.parameters.values())
        return runner

    def _close(self) -> None:
        self.runner.close()
        if isinstance(self.module, VectorizedClients):
            self.module.end_fit()

    def _steps_of_run(self) -> float:
        """Return the number of local steps of all groups of clients in the run."""
        plan = self.planner.plan()
        groups = -(-self.planner.cohort_size // plan.group_size)
        try:
            return self.planner.stepping_batches() * groups
        except FederationError:  # a policy learns the number of steps
            return int(plan.num_steps.max()) * (self.trainer.max_epochs or 0) * groups

    def class_counts(self) -> dict[str, Tensor]:
        """Count the present samples of all clients, ``[clients, classes]``, if the module asks.

        It reads the labels of all clients, so call it once per round.
        """
        if CLASS_COUNTS not in self.runner.declared.values:
            return {}
        counts = self.federation.class_counts
        return {} if counts is None else {CLASS_COUNTS: counts}

    def _decide(self, module: VectorizedClients) -> None:
        """Decide whether clients are vectorized, by a check of the steps of two clients."""
        trainer, data, plan = self.trainer, self.data, self.planner.plan()
        clients, batches = largest_batches(trainer, data, self.planner.num_clients)
        self.runner.phases.start(self.planner.phase_ends(plan.clients, plan.num_steps))
        counts = {name: rows[clients[0]] for name, rows in self.class_counts().items()}
        own = {HYPERPARAMETERS: self.runner.declared.values | counts}
        if not data.has_samples_in_front and (why := Collated(batches).why_not_stacked()):
            module.train_one_by_one(why)
        else:
            with attributes_set(module.module, own if counts else {}):
                decide(module, [batches[0], batches[-1]], self.check, self._steps_of_run)
        if module.reason is not None:
            base_lr, self.runner = self.runner.base_lr, self._make_runner()
            self.runner.base_lr = base_lr
            self.runner.constants.note()
            self.schedulers = Schedulers(trainer, self.runner.optimizer_state)
            self.planner.forget()
            trainer.fit_loop._combined_loader = None  # made for the plan of groups
            trainer.fit_loop.setup_data()

    @property
    def min_clients(self) -> int:
        """Minimum number of usable updates that change the global model."""
        is_trial = self.trainer.fast_dev_run  # type: ignore[attr-defined]
        return 1 if is_trial else self.federation.min_clients

    def lr(self, plan: RoundPlan, row: int) -> float:
        """Return the learning rate of a client from the policy, without schedulers.

        Args:
            plan: Plan of the round.
            row: Position of the client in the plan.
        """
        lr = self.runner.base_lr if plan.lr is None else float(plan.lr[row])
        factor = plan.hyperparameters.get("lr_factor")
        return lr if factor is None else lr * float(factor[row])

    def catch_up(self) -> None:
        """Check that the Trainer is at the current round, and repeat the last scheduler steps.

        Raises:
            FederationError: If the Trainer is at another epoch.
        """
        progress = self.progress
        if self.trainer.current_epoch != progress.round:
            raise FederationError(
                f"FederatedLoop is at round {progress.round}, but the Trainer is at epoch"
                f" {self.trainer.current_epoch}: create a new FederatedLoop for each Trainer, or"
                " resume both from a checkpoint with ckpt_path"
            )
        self.runner.constants.note()
        if progress.round:  # on_fit_start may have written over the initial values of the run
            self.runner.restore_private()

    def begin(self) -> None:
        """Take over what the hooks at the start of the fit have written to the module.

        Called once, when the first round of the fit begins.
        """
        self.has_begun, runner = True, self.runner
        runner.tensors.adopt()
        tensors = (*runner.named_parameters.values(), *runner.named_buffers.values())
        self.processes.same_start(tensors)
        if not self.progress.round:
            runner.note_private()
        has_idle_cores = self.module.device.type == "cpu" and (os.cpu_count() or 1) > 1
        if isinstance(self.module, VectorizedClients):
            if self.module.runner is not None:
                self._decide(self.module)
        elif runner.trains_here and self.trainer.world_size == 1 and has_idle_cores:
            rank_zero_info(
                "Clients train one after another in one process. To use more cores, set devices and"
                " strategy='client_parallel' of the Trainer, or vectorize clients"
                " (VectorizedClients(module); in a command, --vectorize=auto)"
            )

    def follow(self) -> None:
        """Take over what hooks have written to buffers of the module since the last round."""
        self.runner.tensors.adopt()
        buffers = self.runner.named_buffers.items()
        self.processes.same_start([b for n, b in buffers if n not in self.runner.private])
