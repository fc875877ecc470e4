"""One communication round, from the current global model to the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_fl.contracts.client_part import ClientContext
from lightning_fl.contracts.plan import Step
from lightning_fl.contracts.step_module import StepModule
from lightning_fl.contracts.update import ClientUpdate, ServerState
from lightning_fl.errors import FederationError
from lightning_fl.federation.checks import check_options, warn_of_averaged_buffers
from lightning_fl.federation.dropped import (
    check_causes,
    describe_non_finite,
    list_clients,
    loss_parts,
)
from lightning_fl.federation.fit import Fit
from lightning_fl.federation.logs import ClientLogs
from lightning_fl.federation.results import Results, is_finite
from lightning_fl.federation.round_report import feedback, metrics
from lightning_fl.federation.spectral_norm import refine_singular_vectors
from lightning_fl.federation.table import COLUMNS
from lightning_fl.federation.traffic import Traffic
from lightning_fl.functional.randomness import (
    RandomStream,
    derive_seed,
    rng_state,
    seed_rng,
    seeded_rng,
    set_rng_state,
)
from lightning_fl.hooks import call_hook
from lightning_fl.options import describe
from lightning_fl.runners.client_optimizers import Options
from lightning_fl.runners.sequential import SequentialRunner


class Round:
    """One communication round of the clients of this process.

    ``begin`` stores the model from which clients start. For each group of clients that train at
    once, ``load`` prepares the first local step and ``collect`` takes the updates after the last
    one. ``aggregate`` computes the next global model, and ``end`` ends the round after validation.
    For an interrupted round, ``abandon`` restores the previous global model instead.

    Clients that train elsewhere are loaded and collected in the same way, without a batch between.

    Args:
        fit: Objects shared by the rounds of the fit.
    """

    def __init__(self, fit: Fit) -> None:
        self.fit, self.plan = fit, fit.planner.plan()
        plan = self.plan
        fit.progress.table.begin(fit.trainer.callback_metrics)
        #: State before any hook of the round, restored if the round is abandoned.
        self.before, self.schedule_before = fit.runner.read(), fit.schedulers.read()
        #: Model state of the server, and the state that the clients in training received.
        self.server = self.start = self.before
        self.results = Results(self.before.counters, self.schedule_before)
        #: Whether too few updates returned, so that the global model is unchanged.
        self.is_kept = False
        #: Current local step; None before the first and after the last.
        self.step: Step | None = None
        #: Number of finished clients of this process.
        self.position = 0
        #: Whether a hook of the module runs at the start or the end of a batch.
        self.is_in_hook = False
        self.logs = ClientLogs()
        #: Updates of the clients of this process, for policies that learn from contributions.
        self.updates: dict[int, Tensor] = {}
        self.is_aggregating = self.is_aggregated = self.is_abandoned = self.is_validated = False
        self._schedule = self.schedule_before
        self._by_rounds: list[Options] = []  # which schedulers set at the end of the round
        self._steps_at_start = 0  # Lightning's count at the start of the client
        self._client: ClientContext | None = None
        self._broadcast: Mapping[str, Tensor] = {}
        #: First loss of each client, and the loss and its terms in each local step of one client.
        self._reported, self._losses = torch.empty(0), list[dict[str, Tensor]]()
        layout, bits = fit.federation.known_layout, fit.aggregator.sent_bits
        self.traffic = fit.traffic = Traffic(layout, fit.memory.transforms, bits)
        # Random numbers outside of client training depend on the seed and the round only.
        device = fit.module.device
        seed_rng(derive_seed(plan.seed, RandomStream.ROUND, plan.round), device)
        #: State of the random stream of the round, restored after the clients.
        self.rng: Mapping[str, Any] = rng_state(device)

    # --- begin ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Store the model from which clients start, including changes by other hooks."""
        fit = self.fit
        check_options(fit.trainer, fit.planner.accumulated)
        fit.runner.tensors.check_parameters()
        if fit.has_begun:
            fit.follow()
        else:
            fit.begin()
            self.plan = fit.planner.plan()  # which depends on whether clients are vectorized
        fit.runner.check_optimizers(fit.trainer.optimizers)
        now = fit.runner.read()
        self.server = self.start = self.before if all(map(torch.equal, now, self.before)) else now
        self.results.counters = self.server.counters
        self._schedule = self.results.schedule = fit.schedulers.read()
        self.rng = rng_state(fit.module.device)
        #: Mask of the trained parameters, ``[num_parameters]``; None means all.
        self.trained = fit.runner.trained_mask()
        self._trained_at = None if self.trained is None else self.trained.nonzero()[:, 0]
        self.traffic.begin(self.trained)
        cohort = self.plan.cohort
        #: Number of trained entries that a client does not exchange, by client id.
        unused = fit.aggregator.unused_entries(cohort).tolist()
        self.unused = dict(zip(cohort.tolist(), unused, strict=True))
        self._class_counts = fit.class_counts()
        fit.aggregator.start(self.server.vector, self.trained)
        self._broadcast = fit.aggregator.broadcast(self.plan)
        self.traffic.down(self._broadcast)
        self.step = self.plan.schedule[0]
        self._seed_next_clients(self.step)

    def sent_entries(self) -> Tensor | slice:
        """Return the index of the entries of an update that clients send, in the vector.

        They are those of trained parameters, and of buffers unless the server keeps its own.
        """
        n, keeps = self.fit.runner.num_parameters, self.fit.runner.buffers == "server"
        if self.trained is None:
            return slice(n if keeps else None)
        buffers = self.trained.new_full((len(self.server.vector) - n,), not keeps)
        return torch.cat([self.trained, buffers])

    def _seed_next_clients(self, step: Step) -> None:
        """Seed the next clients before their first batch, as device transforms draw from it."""
        if step.rows:
            key = (RandomStream.CLIENT, self.plan.round, int(self.plan.clients[step.rows[0]]))
            seed_rng(derive_seed(self.plan.seed, *key), self.fit.module.device)

    # --- clients ----------------------------------------------------------------------------------

    def start_batch(self, batch_idx: int) -> None:
        """Prepare the local steps of a training batch."""
        fit, plan, step = self.fit, self.plan, self.plan.schedule[batch_idx]
        fit.processes.wait(is_idle=not step.rows)
        if not step.rows:  # Lightning also steps schedulers in idle batches
            fit.schedulers.write(self._schedule)
        fit.runner.steps_before = step.start
        if step.first:
            self.load(step)
        self.step, rows = step, list(step.rows)

        def work() -> tuple[Tensor, Tensor]:
            at = torch.arange(step.start, step.start + step.steps)[:, None]
            sizes = fit.data.batch_sizes(plan.clients[rows], step.start, step.steps)
            return sizes, at < plan.num_steps[rows]

        fit.runner.begin_batch(work)

    def load(self, step: Step) -> None:
        """Load the model from which the clients of a step start, before their first batch."""
        fit, rows = self.fit, list(step.rows)
        clients = self.plan.clients[rows]
        self._steps_at_start = int(fit.trainer.fit_loop.epoch_loop.global_step)
        self.start = ServerState(fit.aggregator.models_for(clients), self.server.counters)
        # Before the optimizer state of the client, which takes precedence.
        fit.schedulers.write(self._schedule)
        kept = [fit.memory.of_runner(client) for client in clients.tolist()]
        fit.runner.load(self.start, kept, [fit.lr(self.plan, row) for row in rows])
        fit.runner.start_phases(fit.planner.phase_ends(clients, self.plan.num_steps[rows]))
        values = {name: value[rows] for name, value in self.plan.hyperparameters.items()}
        fit.runner.set_hyperparameters(values | self._inputs(clients))
        self._client = self._context(step)
        self._part_memory = fit.memory.of_parts(clients)
        for part, memory in zip(fit.parts, self._part_memory, strict=True):
            part.start(self._client, memory, self._broadcast)
        fit.measures.close_batches()
        if fit.runner.trains_here:
            call_hook(fit.module, "on_client_start")

    def _inputs(self, clients: Tensor) -> dict[str, Tensor]:
        """Return what the module asks for of data and aggregator, ``[k, ...]`` by name."""
        sent = {
            name: value.expand(len(clients), *value.shape)
            for name, value in self._broadcast.items()
            if name in self.fit.runner.declared.values
        }
        return sent | {name: rows[clients] for name, rows in self._class_counts.items()}

    def _context(self, step: Step) -> ClientContext:
        fit, rows = self.fit, list(step.rows)
        clients, measures = self.plan.clients[rows], fit.measures
        own = fit.runner, clients.tolist(), self.plan.round
        return ClientContext(
            fit.federation,
            self.plan.round,
            clients,
            fit.planner.num_samples[clients],
            self.plan.num_steps[rows],
            self.start.vector,
            self.trained,
            fit.data.batches_per_epoch[clients],
            fit.runner.add_to_gradients,
            fit.runner.start_from,
            mean_losses=partial(measures.client_losses, *own),
            mean_gradients=partial(measures.client_gradients, *own),
            batch_gradients=measures.batch_gradients(*own),
        )

    def step_schedulers(self, step: Callable[[], None]) -> None:
        """Step the schedulers that count rounds, at the end of the last batch.

        Of several clients, the last one must not decide from where schedulers go on.

        Args:
            step: Function that steps the schedulers.
        """
        if self.is_aggregated or len(self.plan.clients) == 1:
            step()
        else:
            self._by_rounds = self.fit.schedulers.step_rounds(step, self._schedule)

    def report(self, step: Step, outputs: Any) -> None:
        """Record the losses of a batch: what clients report is that of their first local step."""
        runner, processes = self.fit.runner, self.fit.processes
        if step.first:
            self._losses, self._reported = [], runner.reported(outputs).double()
            if processes.share_samples:
                self._reported = processes.mean(self._reported, self._batch_size(step))
        # Other runners have the loss of all clients, and a module that optimizes manually may none.
        if isinstance(runner, SequentialRunner) and "loss" in (outputs or {}):
            self._losses.append(loss_parts(outputs))

    def hold_gradients(self) -> None:
        """Remove the gradients of parameters that clients do not train in this phase."""
        if self.step is not None and self.step.rows:
            self.fit.runner.hold_gradients()

    def scale(self, loss: Tensor) -> None:
        """Scale the loss by this process's share of the samples if processes share a batch."""
        if self.fit.processes.share_samples and self.step is not None:
            factor = self.fit.processes.scale(self._batch_size(self.step))
            loss.register_hook(lambda gradient: gradient * factor)

    def _batch_size(self, step: Step) -> int:
        """Return the number of samples of a local step over all processes that share them."""
        return int(self.fit.data.batch_sizes(self.plan.clients[list(step.rows)], step.start, 1))

    def optimizer_steps(self, local_steps: int) -> int:
        """Return the optimizer steps of the clients in this round; a client may skip some."""
        if not isinstance(self.fit.runner, SequentialRunner):  # Lightning counts whole batches
            return local_steps
        loop: Any = self.fit.trainer.fit_loop.epoch_loop
        return int(loop.global_step) - self._steps_at_start

    def end_batch(self, batch_idx: int) -> None:
        """Collect updates after the last local step of clients; aggregate after the last client."""
        schedule = self.plan.schedule
        step = schedule[batch_idx]
        if step.last:
            module = self.fit.runner.module
            if self.plan.is_empty and isinstance(module, StepModule):
                module._discard_losses()
            call_hook(self.fit.module, "on_client_end")
            self.collect(step)
            if self.plan.is_empty:
                self.logs.discard(self.fit.trainer)
            else:
                self.logs.take(self.fit.trainer, step.rows[0])
            steps = 0 if self.plan.is_empty else step.start + step.steps
            if steps > self.results.most_steps:
                self.results.most_steps = steps
                self.results.optimizer_steps = self.optimizer_steps(steps)
                self.results.schedule = self.fit.schedulers.read()
            self.position += len(step.rows)
            if batch_idx + 1 < len(schedule):
                self._seed_next_clients(schedule[batch_idx + 1])
        self.fit.processes.wait(is_idle=False)  # hooks after the last batch log values
        self.step = schedule[batch_idx + 1] if batch_idx + 1 < len(schedule) else None
        if self.step is None:
            self.aggregate()

    def collect(self, step: Step) -> None:
        """Collect the updates of finished clients and pass the usable ones to the aggregator."""
        fit, rows = self.fit, list(step.rows)
        clients = self.plan.clients[rows]
        steps = zip(rows, self.plan.num_steps[rows].tolist(), strict=True)
        rates = [fit.runner.mean_lr(count, fit.lr(self.plan, row)) for row, count in steps]
        self.results.rates |= dict(zip(clients.tolist(), rates, strict=True))
        if self.plan.is_empty:
            return
        if fit.processes.share_samples:  # running statistics and rounding may differ
            model = fit.runner.module
            fit.processes.same_start((*model.parameters(), *model.buffers()))
        if self.position == 0:  # the first clients; aggregation checks after the last
            fit.runner.constants.check()
        for _, param in fit.runner.optimizer_state.params():
            param.grad = None  # which the next client would remove
        delta, counters = fit.runner.collect(self.start)
        lr = torch.tensor(rates, dtype=torch.float64)
        extras = self._end_parts(delta, lr)
        self.traffic.up(extras)
        num_samples, num_steps = fit.planner.num_samples[clients], self.plan.num_steps[rows]
        update = ClientUpdate(clients, delta, num_samples, num_steps, lr, extras)
        update, dropped = self._received(update)
        self.results.dropped |= dropped
        self.results.reported |= dict(zip(clients.tolist(), self._reported.tolist(), strict=True))
        usable = torch.tensor([client not in dropped for client in clients.tolist()])
        if not usable.any():
            return
        memories = self._part_memory
        kept = fit.runner.rows()
        if dropped:
            update, counters = update.select(usable), counters[usable]
            memories = [{n: t[usable.to(t.device)] for n, t in m.items()} for m in memories]
            kept = [row for row, is_good in zip(kept, usable.tolist(), strict=True) if is_good]
        sent = fit.memory.keep(update, kept, memories, self.plan.round, self._trained_at)
        fit.aggregator.update(sent)
        self._note(sent, counters)

    def _received(self, sent: ClientUpdate) -> tuple[ClientUpdate, dict[int, str]]:
        """Return the updates that the server receives, and the causes of those that it drops."""
        fit, clients, delta, dropped = self.fit, sent.clients, sent.delta, dict[int, str]()
        for callback in fit.watchers:
            delta = callback.on_client_updates(self.plan, clients, delta, dropped)
        for client, cause in fit.aggregator.rejected(clients).items():
            dropped.setdefault(client, cause)
        check_causes(dropped, clients.tolist(), COLUMNS)
        beside = {**sent.extras, **fit.runner.local_parameters()}
        finite = is_finite(delta, beside)
        for client in clients[~finite].tolist():
            dropped.setdefault(client, "non_finite")
        is_first = not self.results.cause and "dropped" not in fit.warnings.given
        if not finite.all() and is_first and fit.runner.trains_here:
            row = int(finite.logical_not().nonzero()[0])
            parts = {n: t[row] for n, t in {**fit.runner.layout.split(delta), **beside}.items()}
            client, steps = int(clients[row]), self._losses or [{"loss": self._reported[row]}]
            with seeded_rng(0, fit.module.device):  # transforms of samples may draw
                samples = None if fit.data.is_stream else fit.data.samples_of(client)
                self.results.cause = describe_non_finite(client, parts, steps, samples)
        return replace(sent, delta=delta), dropped

    def _end_parts(self, delta: Tensor, lr: Tensor) -> dict[str, Tensor]:
        """Run the client parts after training; return the tensors sent with the updates."""
        assert self._client is not None
        self._client.delta, self._client.lr = delta, lr
        extras: dict[str, Tensor] = {}
        for part, memory in zip(self.fit.parts, self._part_memory, strict=True):
            extras |= part.end(self._client, memory)
        return extras

    def _note(self, update: ClientUpdate, counters: Tensor) -> None:
        """Record results of clients with a used update for the table and the policy."""
        results, clients = self.results, update.clients.tolist()
        if "contributions" in self.fit.policy.learns_from:
            self.updates.update(zip(clients, update.delta.clone(), strict=True))
        results.counters = torch.maximum(results.counters, counters.amax(0))
        results.num_samples += int(update.num_samples.sum())

    # --- aggregate --------------------------------------------------------------------------------

    def aggregate(self) -> None:
        """Compute the next global model from all updates, and load it into the module."""
        fit, self.is_aggregating = self.fit, True
        fit.runner.constants.check()
        self._client = None  # which holds an update
        self._merge()
        returned = len(self.plan.cohort) - len(self.results.dropped)
        vector = fit.aggregator.conclude(returned, fit.min_clients)
        server, kept_by, self.is_kept = self.server, None, vector is None
        if vector is None:
            kept_by = f"min_clients={fit.min_clients} and {describe(fit.aggregator)}"
        else:
            server = ServerState(vector.view_as(self.server.vector), self.results.counters)
        self.traffic.note_moved(self.server.vector, server.vector)
        self._leave_clients(server, self.results.schedule)
        fit.aggregator.release()
        fit.runner.optimizer_state.set_options(self._by_rounds)
        if vector is not None:
            is_of_one = returned == 1 and fit.runner.buffers != "server"
            if refine_singular_vectors(fit.runner.module, is_of_one):
                fit.runner.restore_private()  # local vectors keep their initial values
            if fit.options.buffers is None and not fit.has_aggregated:
                shared = fit.runner.shared_buffers
                warn_of_averaged_buffers(fit.runner.module, shared, self.server.vector)
            fit.has_aggregated = True
        clients, round = self.plan.clients.tolist(), self.plan.round
        fit.aggregator.load_global_network(
            lambda: fit.measures.training_accuracy(fit.runner.module, clients, round)
        )
        self.is_aggregated = True
        fit.warnings.note(self.plan, self.results, kept_by)
        fit.boundary.passed()

    def _merge(self) -> None:
        """Merge the results of all processes. The aggregator reduces its own state."""
        own, memory, processes = self.results, self.fit.memory, self.fit.processes
        device = own.counters.device
        if processes.share_clients:
            own.counters = own.counters.cpu()
        every = processes.gather((own, memory.store.new, self.traffic.extra_up))
        memory.store.new = {client: rows for _, new, _ in every for client, rows in new.items()}
        self.traffic.extra_up = max(extra for _, _, extra in every)  # a process may have no client
        self.results = Results.merged([results for results, _, _ in every], device)

    def _leave_clients(self, server: ServerState, schedule: Any) -> None:
        self.fit.schedulers.write(schedule)
        self.fit.runner.write(server)
        set_rng_state(self.rng)

    def abandon(self) -> None:
        """Restore the state before the round, after an interruption."""
        if self.is_aggregated or self.is_abandoned:
            return
        rule = self.fit.aggregator
        if self.is_aggregating:  # the aggregator failed during aggregation
            rule.load_state_dict(self.fit.boundary.state()["aggregator"])
        with suppress(FederationError):  # of a buffer with another shape, which is restored, too
            self.fit.runner.tensors.adopt()
        rule.reset()
        rule.load_client_network()
        self._leave_clients(self.before, self.schedule_before)
        rule.load_global_network()
        self.fit.memory.store.discard()
        self.is_abandoned = True

    # --- afterwards -------------------------------------------------------------------------------

    def begin_validation(self) -> None:
        """Switch to the random stream of validation. An interrupted round is abandoned."""
        self.abandon()
        device = self.fit.module.device
        self.rng = rng_state(device)
        seed_rng(derive_seed(self.plan.seed, RandomStream.VALIDATION, self.plan.round), device)

    def end_validation(self) -> None:
        """Return to the random stream of the round."""
        set_rng_state(self.rng)
        self.is_validated = True

    def end(self) -> dict[str, float]:
        """Update the policy and add a row to the table of rounds; return the metrics to log."""
        fit, progress, before = self.fit, self.fit.progress, self.fit.progress.val_loss
        trainer, policy = fit.trainer, fit.policy
        fit.memory.store.commit()
        self.logs.put_back(trainer, self.plan if fit.processes.share_clients else None)
        fit.aggregator.check_metrics({f"federation/{name}" for name in COLUMNS - {"lr"}})
        progress.val_loss = fit.validation.loss(progress.table) if self.is_validated else None
        if policy.learns and not self.plan.is_empty:
            # Modules may log without synchronizing, but policies must agree on all processes.
            fresh = trainer.strategy.broadcast(progress.table.fresh(trainer.callback_metrics))
            policy.update(feedback(self, before, progress.val_loss, fresh))
        row, learned = metrics(self), fit.aggregator.metrics() | policy.metrics()
        learned |= fit.options.sampler.metrics(self.plan.round)
        progress.table.add(row | learned)
        progress.round += 1
        progress.steps += self.results.optimizer_steps
        return {k: v for k, v in row.items() if k not in ("round", "dropped_clients")} | learned

    def end_early(self) -> None:
        """Abandon a round that ended before its last client. A resumed run repeats it.

        Raises:
            FederationError: If it was not stopped by the Trainer.
        """
        self.abandon()
        self.logs.put_back(self.fit.trainer)
        if not self.fit.trainer.should_stop:
            raise FederationError(
                f"round {self.plan.round + 1} ended after {self.position} of"
                f" {len(self.plan.rows)} clients: on_train_batch_start must not return -1"
            )
        rank_zero_info(
            f"Round {self.plan.round + 1} was stopped after {self.position} of"
            f" {len(self.plan.rows)} clients, and does not count"
        )

    def where(self) -> str | None:
        """Return a text with the round and the clients in training; None after the round."""
        if self.is_aggregated:
            return None
        where = [f"In round {self.plan.round + 1}"]
        if self.fit.trainer.world_size > 1:
            where.append(f"process {self.fit.trainer.global_rank}")
        if self.is_aggregating:
            where.append("during aggregation")
        elif (step := self.step) is not None and step.rows:
            clients = self.plan.clients[list(step.rows)].tolist()
            where.append(list_clients(clients, self.fit.data.client_names, len(clients)))
            first, last = step.start + 1, step.start + step.steps
            where.append(
                f"local steps {first} to {last}" if last > first else f"local step {first}"
            )
        return ", ".join(where)
