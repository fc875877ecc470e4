"""The server of a federation whose clients are other processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl import __version__
from lightning_fl.aggregators import Aggregator, DPFedAvg
from lightning_fl.federation.checks import (
    check_module,
    check_one_optimizer,
    check_policy,
    checked_optimizers,
    warn_of_averaged_buffers,
    warn_of_running_statistics,
)
from lightning_fl.federation.context import Federation
from lightning_fl.federation.dropped import (
    CAUSES,
    describe_kept_model,
    describe_losses,
)
from lightning_fl.federation.frozen import digest
from lightning_fl.federation.plan import draw_clients, draw_values
from lightning_fl.federation.results import is_finite, weights_and_losses
from lightning_fl.federation.resume import changes, load_unsaved, unsaved_values
from lightning_fl.federation.run_options import RunOptions
from lightning_fl.files import check_writable, error_context, write_atomically
from lightning_fl.functional.randomness import run_seed
from lightning_fl.hooks import quiet
from lightning_fl.integrations.exchange import Reply, Task, client_side, exchange_id
from lightning_fl.options import check_flag, check_integer
from lightning_fl.policies import HyperparameterPolicy
from lightning_fl.runners import Declared, client_runner
from lightning_fl.samplers import ClientSampler, how_drawn
from lightning_fl.types import (
    ClientUpdate,
    Cohort,
    FederationError,
    Feedback,
    RoundPlan,
    ServerState,
    describe,
)

#: Name of the logger of what a Trainer reports at the start and the end of each fit.
LOG = "lightning.pytorch"
#: Options of the clients' Trainer that the server's module depends on.
OF_MODULE = {"precision", "plugins", "gradient_clip_val", "gradient_clip_algorithm"}


class RemoteServer:
    """Plan rounds and aggregate updates as a ``FederatedLoop`` does, for clients elsewhere.

    With the same clients, seed and options, plans and global models are those of the loop.

    Args:
        module: The LightningModule. Between rounds it holds the global model.
        aggregator: Aggregation rule; None means :class:`~lightning_fl.aggregators.FedAvg`.
        policy: Hyperparameters of each round and client; None means one local epoch.
        sampler: Samples the clients of each round; None samples uniformly.
        clients_per_round: Number of clients sampled per round.
        client_fraction: Fraction of clients sampled per round.
        min_clients: Minimum number of usable updates that change the global model.
        buffers: How buffers are combined, as in ``FederatedLoop``. Clients need the same option.
        send_frozen: Whether frozen parameters that are not exchanged are sent to clients in every
            round. Otherwise clients must have them, for example from the same pretrained weights; a
            digest is compared.
        local_parameters: Patterns of the parameters and buffers that stay with the clients.
        seed: Seed of the run; None means that of ``seed_everything``, or 0 without one.
        trainer: Options of the clients' Trainer, such as ``{"precision": "bf16-true"}``. The server
            creates the module's layers and optimizer as that Trainer does, on the CPU.

    Raises:
        FederationError: If an option is out of range, or the rule or the policy needs all clients
            in one process.
    """

    def __init__(
        self,
        module: LightningModule,
        aggregator: Aggregator | None = None,
        policy: HyperparameterPolicy | None = None,
        sampler: ClientSampler | None = None,
        *,
        clients_per_round: int | None = None,
        client_fraction: float | None = None,
        min_clients: int = 1,
        buffers: Any = None,
        send_frozen: bool = True,
        local_parameters: Sequence[str] = (),
        seed: int | None = None,
        trainer: Mapping[str, Any] | None = None,
    ) -> None:
        self.options = RunOptions.of(
            aggregator,
            policy,
            sampler,
            clients_per_round=clients_per_round,
            client_fraction=client_fraction,
            min_clients=min_clients,
            buffers=buffers,
            local_parameters=local_parameters,
        )
        self.module, self.seed = module, run_seed(check_integer("seed", seed, min=0, optional=True))
        self.rule, self.policy = self.options.aggregator, self.options.policy
        self.trainer = dict(trainer or {})
        self.send_frozen = check_flag("send_frozen", send_frozen)
        self._refuse()
        #: Id of the run, which a resumed run keeps.
        self.run = uuid4().hex
        #: Number of finished rounds.
        self.round = 0
        #: Round of the last used update of each client.
        self.last: dict[int, int] = {}
        self.num_samples = self.batches_per_epoch = torch.zeros(0, dtype=torch.int64)
        self._plan: RoundPlan | None = None

    def _refuse(self) -> None:
        """Refuse rules and policies that cannot work without the samples of the clients."""
        rule, policy = type(self.rule), type(self.policy)
        why = None
        if rule.prepare is not Aggregator.prepare:
            why = f"{rule.__name__} replaces the network of the module"
        elif self.rule.is_asynchronous:
            why = f"{rule.__name__} simulates the times at which updates arrive"
        elif isinstance(self.rule, DPFedAvg):
            why = "DPFedAvg draws its noise from the seed of the run, which the clients know"
        elif wanted := sorted(self.policy.learns_from - {"client_losses"}):
            why = f"{policy.__name__} learns from {wanted[0]}, which the server does not have"
        if why is not None:
            raise FederationError(
                f"{why}: choose another rule or policy, or FederatedLoop with all clients in one"
                " process"
            )

    def begin(
        self,
        num_samples: Sequence[int],
        batches_per_epoch: Sequence[int],
        num_rounds: int | None = None,
        initial: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Set up the module and the rules, when the clients are known.

        Args:
            num_samples: Number of training samples of each client.
            batches_per_epoch: Number of batches in a local epoch of each client.
            num_rounds: Number of rounds of the run, which modules read as ``Trainer.max_epochs``.
            initial: Initial global model; None means that of the module.
        """
        options, n = self.options, len(num_samples)
        self.num_rounds = num_rounds
        trainer = self._set_up_module(max(batches_per_epoch))
        if initial is not None:
            self.module.load_state_dict(initial)
        for name, value in self.module.state_dict().items():
            if not isinstance(value, Tensor):  # of get_extra_state
                raise FederationError(
                    f"{name} of the state_dict is a {type(value).__name__}, and only tensors can be"
                    " sent to clients: keep it in a buffer, or use FederatedLoop"
                )
        self.num_samples = torch.tensor(num_samples, dtype=torch.int64)
        self.batches_per_epoch = torch.tensor(batches_per_epoch, dtype=torch.int64)
        self.cohort_size = options.cohort_size(n)
        options.check_min_clients(self.cohort_size)
        check_policy(options)
        self.declared = Declared(self.module)
        self.runner = client_runner(
            self.module,
            options.buffer_policy,
            trainer.optimizers[0],  # never stepped: the clients have their own
            False,
            local_patterns=options.local_parameters,
        )
        if options.buffers is None:
            warn_of_running_statistics(self.module, self.runner.shared_buffers.values())
        frozen = self.runner.constants.parameters
        self._left_out = set() if self.send_frozen else set(frozen)
        self._frozen = digest(frozen) if self._left_out else ""
        federation = Federation(
            n,
            Cohort(self.cohort_size, n, how_drawn(options.sampler)),
            layout=self.runner.layout,
            seed=self.seed,
            num_samples=self.num_samples,
            module=self.module,
            trainer=trainer,
            aggregator=self.rule,
            policy=self.policy,
            sampler=options.sampler,
            min_clients=options.min_clients,
            buffers=options.buffer_policy,
            local_parameters=list(self.runner.private),
        )
        options.sampler.setup(federation)
        self.policy.setup(federation)
        options.sampler.begin(federation)
        server = self.runner.read().vector
        self.policy.to(server.device)
        self.rule.setup(federation)
        self.rule.to(server.device).start(server)

    def _set_up_module(self, num_batches: int) -> Trainer:
        """Let a Trainer call the hooks before the first round, which may create layers.

        It also converts the module to the precision of the clients. Nothing is trained.
        """
        options = {name: self.trainer[name] for name in OF_MODULE & self.trainer.keys()}
        trainer = trainer_of(options | {"accelerator": "cpu"}, StopAtOnce(), self.num_rounds or 1)
        check_module(self.module)
        # Lightning warns of a validation_step without a loader, and of a loader without one.
        validation = [0] if is_overridden("validation_step", self.module) else None
        with quiet(LOG), checked_optimizers(self.module, check_one_optimizer):
            trainer.fit(self.module, [0] * num_batches, validation)
        return trainer

    def tasks(self) -> list[Task]:
        """Draw the plan of the next round; return what to send to each of its clients."""
        sampled = draw_clients(
            self.options.sampler, self.seed, self.round, self.cohort_size, self.num_samples
        )
        clients, values, steps, is_empty = draw_values(
            self.policy, self.round, sampled, self.batches_per_epoch, self.declared
        )
        lr = values.pop("lr", None)
        self._plan = plan = RoundPlan(
            self.seed, self.round, clients, steps, lr, values, is_empty=is_empty
        )
        self.rule.load_client_network()
        self._start = start = self.runner.read()
        trained = self.runner.trained_mask()
        self.rule.start(start.vector, trained)
        broadcast = self.rule.broadcast(plan)
        models = self.rule.models_for(clients)
        sent = values if lr is None else values | {"lr": lr}
        tasks, model = list[Task](), self._model_to_send()
        same: dict[str, Any] = {
            "run": self.run,
            "round": self.round,
            "num_clients": len(self.num_samples),
            "num_rounds": max(self.num_rounds or 0, self.round + 1),
            "seed": self.seed,
            "rule": client_side(self.rule),
            "exchanged": exchange_id(self.runner, self.options.buffer_policy),
            "frozen": self._frozen,
            "num_trained": counted(trained, self.runner.num_parameters, self.rule),
            "unsaved": on_cpu(unsaved_values(self.module)),
            "broadcast": broadcast,
            "version": __version__,
        }
        for row, client in enumerate(plan.cohort.tolist()):
            if models.stride(0):  # each client starts from a model of its own
                self.runner.write(ServerState(models[row], start.counters))
                model = self._model_to_send()
            own = {name: float(value[row]) for name, value in sent.items()}
            task: dict[str, Any] = {
                "client": client,
                "num_steps": int(steps[row]),
                "model": model,
                "values": own,
            }
            tasks.append(Task(**same, **task, last=self.last.get(client, -1)))
        self.runner.write(start)
        self.rule.load_global_network()
        return tasks

    def model(self) -> dict[str, Tensor]:
        """Return a copy of the global model, a ``state_dict`` on the CPU."""
        return on_cpu(self.module.state_dict())

    def _model_to_send(self) -> dict[str, Tensor]:
        state = self.module.state_dict()
        return on_cpu({name: t for name, t in state.items() if name not in self._left_out})

    def finish(self, replies: Mapping[int, Reply]) -> dict[str, float]:
        """Aggregate the replies of a round, load the new global model, and update the policy.

        Args:
            replies: Replies by client. Clients without one have failed.

        Returns:
            Metrics of the round.
        """
        plan = self._plan
        assert plan is not None, "tasks() begins a round"
        self._plan, losses, counters = None, dict[int, float](), self._start.counters
        sampled, dropped = plan.cohort.tolist(), dict[int, str]()
        for row, client in enumerate(sampled):
            reply = replies.get(client)
            cause = "dropped_out" if reply is None else self._use(plan, row, reply)
            if reply is None or cause is not None:
                dropped[client] = str(cause)
                continue
            counters = torch.maximum(counters, reply.counters.to(counters.device))
            losses[client], self.last[client] = reply.loss, plan.round
        if dropped:
            rank_zero_warn(describe_losses(self.round + 1, len(sampled), dropped))
        returned = len(losses)
        vector = self.rule.conclude(returned, self.options.min_clients)
        if vector is not None:
            self.runner.write(ServerState(vector, counters))
            if self.runner.fit_to_average(returned) and self.options.buffers is None:
                buffers = self.runner.shared_buffers
                warn_of_averaged_buffers(self.module, buffers, self._start.vector)
        else:
            kept_by = f"min_clients={self.options.min_clients} and {describe(self.rule)}"
            kept = describe_kept_model(self.round + 1, returned, len(sampled), kept_by)
            rank_zero_warn(kept)
        self.rule.load_global_network()
        weights, reported = weights_and_losses(plan.clients, losses, self.num_samples)
        metrics = {
            "clients": len(sampled),
            "dropped": len(dropped),
            **self.rule.metrics(),
        }
        if returned:
            metrics["train_loss"] = float((weights * reported)[weights > 0].sum())
        wanted = reported if "client_losses" in self.policy.learns_from else None
        self.policy.update(Feedback(plan, None, None, wanted, weights, None, metrics, dropped))
        self.round += 1
        return metrics

    def _use(self, plan: RoundPlan, row: int, reply: Reply) -> str | None:
        """Pass the update of a client to the rule; return the cause if it is dropped instead."""
        client, device = int(plan.clients[row]), self._start.vector.device
        if reply.dropped is not None:
            return reply.dropped if reply.dropped in CAUSES else "dropped_out"
        one = torch.tensor([client])
        if causes := self.rule.rejected(one):
            return causes[client]
        try:
            self._check(client, reply)
            delta = reply.delta[None].to(device)
            extras = {name: value.to(device) for name, value in reply.extras.items()}
            if not math.isfinite(reply.lr) or not is_finite(delta, extras).all():
                return "non_finite"
            samples, steps = self.num_samples[one], plan.num_steps[[row]]
            lr = torch.tensor([reply.lr], dtype=torch.float64)
            self.rule.update(ClientUpdate(one, delta, samples, steps, lr, extras))
        except FederationError as error:  # rules check an update before they add it
            rank_zero_warn(f"client {client} is dropped: {error}")
            return "dropped_out"
        return None

    def _check(self, client: int, reply: Reply) -> None:
        """Check that an update is one of this federation.

        Raises:
            FederationError: If it has another size or dtype, or the client has other samples.
        """
        if reply.num_samples != (known := int(self.num_samples[client])):
            raise FederationError(
                f"it has trained {reply.num_samples} samples, and had {known} when the run began."
                " To use them, stop the run and resume it"
            )
        start = self._start
        if not (is_like(reply.delta, start.vector) and is_like(reply.counters, start.counters)):
            raise FederationError(
                f"it sent an update of {reply.delta.numel()} values in {reply.delta.dtype}, and the"
                f" model exchanges {start.vector.numel()} in {start.vector.dtype}: use the same"
                " module, buffers and local_parameters on the server and on all clients"
            )
        if other := [name for name, value in reply.extras.items() if value.shape[:1] != (1,)]:
            raise FederationError(f"it sent {other[0]}, which is not that of one client")

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two rounds."""
        return {
            "run": self.run,
            "round": self.round,
            "last": self.last,
            "model": self.module.state_dict(),
            "unsaved": unsaved_values(self.module),
            "aggregator": self.rule.state_dict(),
            "policy": self.policy.state_dict(),
            "identity": self._identity(),
            "options": self._described(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, after :meth:`begin`.

        Raises:
            FederationError: If it belongs to another federation.
        """
        for name, value in self._identity().items():
            if (found := state["identity"].get(name)) != value:
                raise FederationError(
                    f"the checkpoint has {name} {found!r}, and this federation has {value!r}: use"
                    " the same, or another file for a new run"
                )
        if changed := changes(self._described(), state["options"]):
            rank_zero_warn(f"resuming with other options: {changed}")
        self.module.load_state_dict(state["model"])
        load_unsaved(self.module, state["unsaved"])
        self.rule.load_state_dict(state["aggregator"])
        self.policy.load_state_dict(state["policy"])
        self.run, self.round, self.last = state["run"], state["round"], dict(state["last"])

    def read(self, file: Path) -> bool:
        """Restore the state that :meth:`write` has written, after :meth:`begin`.

        This also checks that the file can be written.

        Args:
            file: The file.

        Returns:
            Whether there is a state.

        Raises:
            FederationError: If the file is damaged or not of a server, belongs to another
                federation, or cannot be written.
        """
        check_writable(file)
        if not file.exists():
            return False
        with error_context(f"{file} is damaged, or not a checkpoint of a server", Exception):
            state = torch.load(file, weights_only=True)
            if not isinstance(state, dict) or state.keys() != self.state_dict().keys():
                raise FederationError("it has other entries: choose another file for a new run")
        self.load_state_dict(state)
        return True

    def write(self, file: Path) -> None:
        """Write the state between two rounds into a file.

        Raises:
            FederationError: If the file cannot be written. The file of the round before is kept.
        """
        what = f"the state after round {self.round} is not saved. Free space and start again"
        with error_context(what, OSError):
            write_atomically(file, partial(torch.save, self.state_dict()))

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "clients": len(self.num_samples),
            "aggregator": type(self.rule).__name__,
            "policy": type(self.policy).__name__,
            "parameters": self.runner.num_parameters,
            "buffers": self.options.buffer_policy,
            "exchange": exchange_id(self.runner, self.options.buffer_policy),
        }

    def _described(self) -> dict[str, Any]:
        """Return the options that may differ when a run is resumed, with a warning."""
        described = self.options.described(self.cohort_size)
        return described | {"training samples": int(self.num_samples.sum())}

    def close(self) -> None:
        """Release the module."""
        self.runner.close()


class StopAtOnce(Callback):
    """End a fit before its first batch."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the fit, or refuse a schedule, which would begin anew in every round of a client.

        Raises:
            FederationError: If the module has a learning rate scheduler.
        """
        refuse_schedulers(trainer, pl_module)
        trainer.should_stop = True


def trainer_of(options: Mapping[str, Any], callback: Callback, num_rounds: int) -> Trainer:
    """Return a Trainer of one process that neither validates nor writes files.

    Args:
        options: Further options of the Trainer.
        callback: Its callback.
        num_rounds: Number of rounds of the run.
    """
    usual = {
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
    }
    with quiet(LOG):
        return Trainer(**{**usual, **options}, max_epochs=num_rounds, callbacks=[callback])


def refuse_schedulers(trainer: Trainer, module: LightningModule) -> None:
    """Refuse learning rate schedulers.

    Raises:
        FederationError: If the module has one.
    """
    if trainer.lr_scheduler_configs:
        raise FederationError(
            f"{type(module).__name__} has a learning rate scheduler, which would begin anew in"
            " every round of a remote client: let the policy of the server set lr"
        )


def counted(trained: Tensor | None, size: int, rule: Aggregator) -> int:
    """Return the number of trained entries if a rule depends on which they are, else -1.

    Args:
        trained: Mask of the trained entries; None means all.
        size: Number of entries.
        rule: The rule.
    """
    if not rule.needs_trained_mask:
        return -1
    return size if trained is None else int(trained.sum())


def is_like(tensor: Tensor, other: Tensor) -> bool:
    """Return whether tensors have the same shape and dtype."""
    return tensor.shape == other.shape and tensor.dtype == other.dtype


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
