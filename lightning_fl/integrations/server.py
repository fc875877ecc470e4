"""The server of a federation whose clients are other processes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_fl import __version__
from lightning_fl.aggregators import Aggregator, DPFedAvg, SecureAggregation
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.contracts.plan import RoundPlan, Step
from lightning_fl.errors import FederationError
from lightning_fl.federation.checkpoints import unsaved_values
from lightning_fl.federation.dropped import CAUSES, describe_losses
from lightning_fl.federation.results import weights_and_losses
from lightning_fl.federation.round import Round
from lightning_fl.files import check_writable, error_context, one_line
from lightning_fl.frozen import digest
from lightning_fl.hooks import quiet
from lightning_fl.integrations.exchange import client_side, exchange_id
from lightning_fl.integrations.messages import Reply, Task
from lightning_fl.integrations.runner import Elsewhere, Exchange, RemoteRunner
from lightning_fl.objectives import DPSGD
from lightning_fl.options import check_flag
from lightning_fl.policies import HyperparameterPolicy
from lightning_fl.samplers import ClientSampler

#: Name of the logger of what a Trainer reports at the start and the end of each fit.
LOG = "lightning.pytorch"
#: Options of the clients' Trainer that the server's module depends on.
OF_MODULE = {"precision", "plugins", "gradient_clip_val", "gradient_clip_algorithm"}
#: Options of a ``FederatedLoop`` that a server has.
OF_SERVER = ("clients_per_round", "client_fraction", "min_clients", "buffers", "local_parameters")


class RemoteServer(FederatedLoop):
    """A ``FederatedLoop`` whose clients train elsewhere.

    It plans rounds and aggregates updates by the same code, so that with the same clients, seed and
    options, plans and global models are those of the loop. :meth:`begin` sets it up; then each
    round is a call of :meth:`tasks` and one of :meth:`finish`.

    Args:
        module: The LightningModule. Between rounds it holds the global model.
        aggregator: Aggregation rule; None means :class:`~lightning_fl.aggregators.FedAvg`.
        policy: Hyperparameters of each round and client; None means one local epoch.
        sampler: Samples the clients of each round; None samples uniformly.
        send_frozen: Whether frozen parameters that are not exchanged are sent to clients in every
            round. Otherwise clients must have them, for example from the same pretrained weights; a
            digest is compared.
        seed: Seed of the run; None means that of ``seed_everything``, or 0 without one.
        trainer: Options of the clients' Trainer, such as ``{"precision": "bf16-true"}``. The server
            creates the module's layers and optimizer as that Trainer does, on the CPU.
        options: Options of ``FederatedLoop`` for servers: ``clients_per_round``,
            ``client_fraction``, ``min_clients``, ``buffers``, ``local_parameters``. Clients need
            the same last two.

    Raises:
        FederationError: If an option is out of range or not one of a server, or the rule or the
            policy needs all clients in one process.
    """

    def __init__(
        self,
        module: LightningModule,
        aggregator: Aggregator | None = None,
        policy: HyperparameterPolicy | None = None,
        sampler: ClientSampler | None = None,
        *,
        send_frozen: bool = True,
        seed: int | None = None,
        trainer: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_names(options, OF_SERVER, "a server", "pass what concerns local training to clients")
        super().__init__(aggregator, policy, sampler, seed=seed, check=False, **options)
        self.table_name = None
        self.module, self.trainer_options = module, dict(trainer or {})
        self.send_frozen = check_flag("send_frozen", send_frozen)
        self.evaluates_clients = True  # nothing is validated here, so that no warning is due
        self._exchange = Exchange()
        self._refuse()

    def _refuse(self) -> None:
        """Refuse rules and policies that cannot work without the samples of the clients."""
        rule, policy = type(self.aggregator), type(self.policy)
        why = None
        if rule.prepare is not Aggregator.prepare:
            why = f"{rule.__name__} replaces the network of the module"
        elif self.aggregator.is_asynchronous:
            why = f"{rule.__name__} simulates the times at which updates arrive"
        elif isinstance(self.aggregator, DPFedAvg):
            why = "DPFedAvg draws its noise from the seed of the run, which the clients know"
        elif isinstance(self.module, DPSGD):
            why = "DPSGD draws its noise from the seed of the run, which the server knows"
        elif isinstance(self.aggregator, SecureAggregation):
            why = "SecureAggregation simulates what a server would not see, and this one sees it"
        elif wanted := sorted(self.policy.learns_from - {"client_losses"}):
            why = f"{policy.__name__} learns from {wanted[0]}, which the server does not have"
        if why is not None:
            raise FederationError(
                f"{why}: choose another rule or policy, or FederatedLoop with all clients in one"
                " process"
            )

    # --- the start --------------------------------------------------------------------------------

    def begin(
        self,
        num_samples: Sequence[int],
        batches_per_epoch: Sequence[int],
        num_rounds: int | None = None,
        initial: Mapping[str, Tensor] | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        """Set up the module and the rules, when the clients are known.

        A Trainer calls the hooks before the first round, which may create layers, and loads the
        checkpoint. Nothing is trained.

        Args:
            num_samples: Number of training samples of each client.
            batches_per_epoch: Number of batches in a local epoch of each client.
            num_rounds: Number of rounds of the run, which modules read as ``Trainer.max_epochs``.
            initial: Initial global model; None means that of the module.
            checkpoint: Checkpoint to write after each round. If it exists, the run resumes from it.

        Raises:
            FederationError: If the checkpoint cannot be written, is damaged, or belongs to another
                federation.
        """
        self.file, self.num_rounds = None if checkpoint is None else Path(checkpoint), num_rounds
        if self.file is not None:
            check_writable(self.file)
        resumed = self.file if self.file is not None and self.file.exists() else None
        if resumed is not None and initial is not None:  # has what the checkpoint leaves out
            self.module.load_state_dict(initial, strict=False)
        options = {name: self.trainer_options[name] for name in OF_MODULE & {*self.trainer_options}}
        trainer = trainer_of({**options, "accelerator": "cpu"}, self, num_rounds)
        data = Elsewhere(num_samples, batches_per_epoch)
        with quiet(LOG), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You defined a `val_dataloader`")
            trainer.fit(self.module, datamodule=data, ckpt_path=resumed)
        if initial is not None and resumed is None:
            self.module.load_state_dict(initial, strict=self.module.strict_loading)
        self.fit.catch_up()
        self._run_state.note(self.fit)
        frozen = self.runner.constants.parameters
        # With strict_loading=False, the state_dict may leave out some, too.
        sent = self.module.state_dict().keys() if self.send_frozen else set[str]()
        self._left_out = frozen.keys() - sent
        self._frozen = digest(frozen) if self._left_out else ""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set up rounds in which each client takes one step: its task and its reply."""
        super().setup(trainer, pl_module, stage)
        assert self._prepared is not None
        self._prepared.runner_class = RemoteRunner
        self._prepared.client_parts = lambda: [self._exchange]
        self._prepared.planner.change = in_one_step

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set up the rules.

        Raises:
            FederationError: If the module has a learning rate scheduler, or a state that cannot be
                sent.
        """
        refuse_schedulers(trainer, pl_module)
        for name, value in pl_module.state_dict().items():
            if not isinstance(value, Tensor):  # of get_extra_state
                raise FederationError(
                    f"{name} of the state_dict is a {type(value).__name__}, and only tensors can be"
                    " sent to clients: keep it in a buffer, or use FederatedLoop"
                )
        super().on_fit_start(trainer, pl_module)
        assert isinstance(self.runner, RemoteRunner), "a server takes the module that is wrapped"
        self.runner.exchange = self._exchange

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the fit after this hook of the module."""
        trainer.should_stop = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Do nothing: the rounds come after the fit of the Trainer, and :meth:`close` at last."""

    def close(self) -> None:
        """Release the module; abandon a round that has no end."""
        self._abandon()
        self._summarize()
        if self._fit is not None:
            super().teardown(self._fit.trainer, self.module, "fit")

    # --- a round ----------------------------------------------------------------------------------

    def tasks(self) -> list[Task]:
        """Draw the plan of the next round; return what to send to each of its clients."""
        self.aggregator.load_client_network()
        self._round = round = Round(self.fit)
        round.begin()
        plan, exchange = round.plan, self._exchange
        exchange.update = uuid4().int >> 65  # 63 bits, for which every transport has a number
        values = {**plan.hyperparameters, **({} if plan.lr is None else {"lr": plan.lr})}
        task: dict[str, Any] = {
            "update": exchange.update,
            "round": plan.round,
            "num_clients": self.fit.planner.num_clients,
            "num_rounds": max(self.num_rounds or 0, plan.round + 1),
            "seed": plan.seed,
            "rule": client_side(self.aggregator),
            "exchanged": exchange_id(self.runner),
            "num_trained": counted(round.trained, self.runner.num_parameters, self.aggregator),
            "frozen": self._frozen,
            "unsaved": on_cpu(unsaved_values(self.module)),
            "version": __version__,
        }
        tasks, sent = list[Task](), torch.empty(0)
        for step in steps_of(plan):
            round.load(step)
            if not torch.equal(sent, round.start.vector):
                sent = round.start.vector
                task["model"] = self.model()
            row = step.rows[0]
            task |= {"last": exchange.last, "broadcast": exchange.broadcast}
            task |= {"client": int(plan.clients[row]), "num_steps": int(plan.num_steps[row])}
            task["values"] = {name: float(value[row]) for name, value in values.items()}
            tasks.append(Task(**task))
        self.runner.write(round.server)  # if clients start from models of their own
        self.aggregator.load_global_network()
        return tasks

    def model(self) -> dict[str, Tensor]:
        """Return a copy of the model in the module on the CPU, without what is not sent."""
        state = self.module.state_dict()
        return on_cpu({name: t for name, t in state.items() if name not in self._left_out})

    def finish(self, replies: Mapping[int, Reply]) -> dict[str, float]:
        """Aggregate the replies of a round, load the new global model, and update the policy.

        The checkpoint is written, if there is one.

        Args:
            replies: Replies by client. Clients without one have failed.

        Returns:
            Metrics of the round.

        Raises:
            FederationError: If the checkpoint cannot be written.
        """
        round, plan = self._current, self._current.plan
        for step in steps_of(plan):
            client = int(plan.clients[step.rows[0]])
            self._collect(step, client, replies.get(client))
        round.aggregate()
        at_round(self.fit.trainer, plan.round + 1)
        metrics, results = round.end(), round.results
        self._round, self._is_closing = None, True
        self._close_round()
        if results.dropped:
            rank_zero_info(describe_losses(self.round, len(plan.cohort), results.dropped))
        if results.losses:
            samples = self.fit.planner.num_samples
            weights, losses = weights_and_losses(plan.clients, results.losses, samples)
            metrics["train_loss"] = float((weights * losses)[weights > 0].sum())
        if self.file is not None:
            what = f"the state after round {self.round} is not saved. Free space and start again"
            with error_context(what, OSError):
                self.fit.trainer.save_checkpoint(self.file)
        return metrics

    def _collect(self, step: Step, client: int, reply: Reply | None) -> None:
        """Pass the update of a client to the rule, or drop the client."""
        round, fit = self._current, self.fit
        if reply is None or reply.dropped:
            cause = "" if reply is None else reply.dropped
            round.results.dropped[client] = cause if cause in CAUSES else "dropped_out"
            return
        ids = client, self._exchange.update, int(fit.planner.num_samples[client])
        try:
            if problem := reply.problem(ids, fit.lr(round.plan, step.rows[0]), round.server):
                raise FederationError(f"{problem}. Use the same module, data and options on both")
            self._exchange.reply = reply
            round.report(step, None)
            round.collect(step)
        except FederationError as error:  # rules check an update before they add it
            self.store.new.pop(client, None)
            why = f"client {client} is dropped: {one_line(error, 500)}"
            rank_zero_warn(f"round {round.plan.round + 1}: {why}")
            round.results.dropped[client] = "dropped_out"


def check_names(options: Mapping[str, Any], known: Sequence[str], who: str, remedy: str) -> None:
    """Check that all options are known."""
    if others := sorted(options.keys() - {*known}):
        what = f"{others[0]} is not an option of {who}, which has {', '.join(known)}"
        raise FederationError(f"{what}: {remedy}")


def steps_of(plan: RoundPlan) -> list[Step]:
    """Return the steps of a plan, one for each client that takes part."""
    return [] if plan.is_empty else plan.schedule


def in_one_step(plan: RoundPlan) -> RoundPlan:
    """Return a plan in which the local steps of a client are one step of the schedule."""
    return replace(plan, steps_per_batch=int(plan.num_steps.max()))


def trainer_of(options: Mapping[str, Any], callback: Callback, num_rounds: int | None) -> Trainer:
    """Return a Trainer of one process that neither validates nor writes files.

    Args:
        options: Further options of the Trainer.
        callback: Its callback.
        num_rounds: Number of rounds of the run; None if it is not known.
    """
    usual: dict[str, Any] = {"devices": 1, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    shown = ("checkpointing", "progress_bar", "model_summary")
    usual |= {"logger": False, **dict.fromkeys((f"enable_{name}" for name in shown), False)}
    max_epochs = -1 if num_rounds is None else max(num_rounds, 1)
    with quiet(LOG):
        return Trainer(**{**usual, **options}, max_epochs=max_epochs, callbacks=[callback])


def at_round(trainer: Trainer, round: int) -> None:
    """Set the number of epochs that a Trainer counts."""
    progress: Any = trainer.fit_loop.epoch_progress
    for count in (progress.total, progress.current):
        count.ready = count.started = count.processed = count.completed = round


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


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
