"""Training of one client whose server is another process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fl.aggregators import Aggregator
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.contracts.client_part import ClientPart
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.plan import Cohort, RoundPlan
from lightning_fl.contracts.update import ClientUpdate, ServerState
from lightning_fl.datamodules import FederatedDataModule, FromClients
from lightning_fl.errors import FederationError
from lightning_fl.federation.checkpoints import load_unsaved
from lightning_fl.federation.results import Results
from lightning_fl.federation.run_options import RunOptions
from lightning_fl.frozen import digest
from lightning_fl.hooks import quiet
from lightning_fl.integrations import server
from lightning_fl.integrations.exchange import Kept, client_side, exchange_id
from lightning_fl.integrations.messages import Hello, Reply, Task, check_version
from lightning_fl.options import describe
from lightning_fl.policies import HyperparameterPolicy, Schedule
from lightning_fl.runners import Phase
from lightning_fl.samplers import ClientSampler

#: Options of a ``FederatedLoop`` that a client needs.
OF_CLIENT = ("optimizer_state", "buffers", "update_transforms", "local_parameters", "phases")
#: Options of the Trainer that say when a fit ends, and what else it does.
NOT_OF_CLIENT = {"callbacks", "fast_dev_run", "max_epochs", "max_time", "min_epochs"}


class RemoteClient:
    """Train one client in each round as a ``FederatedLoop`` does, for a server elsewhere.

    A round is a ``Trainer.fit`` with a ``FederatedLoop`` in which only this client takes part.
    Terms, hooks, phases, update transforms and kept state work as in a simulation, and with the
    same data, seed and plan the update is the same, bit for bit.

    Args:
        module: The LightningModule.
        data: The client's samples: a data set, a ``FederatedDataModule`` with one client, or a
            ``FederatedDataModule`` with all clients of a simulation, of which this one trains.
        aggregator: Rule of the server. Only its client-side work is used, such as the control
            variates of :class:`~lightning_fl.aggregators.Scaffold`.
        trainer: Options of the Trainer, such as ``{"accelerator": "cpu"}``.
        batch_size: Samples per local step if ``data`` is a data set; None means all.
        options: Options of ``FederatedLoop`` for clients: ``optimizer_state``, ``buffers``,
            ``update_transforms``, ``local_parameters``. The phases of the server's policy are
            ``phases``.

    Raises:
        FederationError: If an option is not one of a client or out of range, or the samples are a
            stream.
    """

    def __init__(
        self,
        module: LightningModule,
        data: FederatedDataModule | Dataset[Any],
        aggregator: Aggregator | None = None,
        trainer: Mapping[str, Any] | None = None,
        batch_size: int | None = 32,
        **options: Any,
    ) -> None:
        server.check_names(options, OF_CLIENT, "a client", "the server plans and aggregates")
        of_loop = {name: value for name, value in options.items() if name != "phases"}
        policy = Schedule(phases=options.get("phases", ()))
        of_loop |= {} if aggregator is None else {"aggregator": aggregator}
        self.rule = RunOptions(policy=policy, **of_loop).aggregator
        self.module, self.trainer = module, dict(trainer or {})
        if taken := sorted(self.trainer.keys() & NOT_OF_CLIENT):
            raise FederationError(
                f"the Trainer of a remote client cannot have {taken[0]}: the server says what it"
                " trains"
            )
        places = self.trainer.keys() & {"accelerator", "devices", "num_nodes", "strategy"}
        own = {name: self.trainer[name] for name in places}
        if (count := server.trainer_of(own, Callback(), 1).world_size) != 1:
            raise FederationError(
                f"a remote client trains in one process, and its Trainer has {count}: set devices=1"
            )
        if not isinstance(data, FederatedDataModule):
            data = FromClients([data], batch_size=batch_size, val_size=0)
        if data.stream_steps > 1:
            raise FederationError(
                f"stream_steps={data.stream_steps} changes the samples of a client from round to"
                " round, which its server would not know: set stream_steps=1, or use FederatedLoop"
            )
        data.prepare_data()
        data.setup("fit")
        # Another RemoteClient may have repeated the only client of this data module.
        self._is_own = len({id(part) for part in data.parts}) == 1
        self.data = data
        self.options = {"buffers": "average"} | options  # the server warns of BatchNorm

    def _place(self, client: int, num_clients: int) -> None:
        """Make the client's own samples those of its id, or check that the data has the id."""
        count = len(self.data.num_samples)
        if self._is_own:  # the other clients never train here
            self.data.repeat_client(num_clients)
        elif client >= count:
            raise FederationError(
                f"client {client} has no samples: the data has {count} clients. Give each client"
                " its own data set, or use as many clients as the data has"
            )

    def work(self, client: int) -> tuple[int, int]:
        """Return the number of training samples and of batches per local epoch of a client."""
        self._place(client, client + 1)
        return int(self.data.num_samples[client]), int(self.data.batches_per_epoch[client])

    def about(self, client: int) -> dict[str, Any]:
        """Return what a server asks before the first round.

        Args:
            client: Id of the client.
        """
        return vars(Hello(client, *self.work(client)))

    def train(self, task: Task, kept: Kept) -> tuple[Reply, Kept]:
        """Train the client in a round.

        Args:
            task: What the server has sent.
            kept: What this method returned in the last round; ``Kept()`` in the first.

        Returns:
            What to send back, and what to keep.

        Raises:
            FederationError: If the server has another version of this package.
        """
        check_version(task.version, "the server", "this client")
        at = task.client
        self._place(at, task.num_clients)
        rule = ToServer(self.rule, task)
        loop = OneClient(task, rule, **self.options)
        loop.progress.round = task.round
        loop.evaluates_clients = True  # nothing is validated here, so that no warning is due
        loop.store.put(at, dict(kept.at(task.last)))
        loop.store.commit()
        made = server.trainer_of(self.trainer, loop, task.num_rounds)
        server.at_round(made, task.round)
        with quiet(server.LOG):
            made.fit(self.module, datamodule=self.data)
        loop.check_end()
        results, sent = loop.results, rule.sent
        delta, extras = (torch.empty(0), {}) if sent is None else (sent.delta[0], sent.extras)
        loss, dropped = results.losses.get(at, math.nan), results.dropped.get(at, "")
        numbers = at, task.update, int(self.data.num_samples[at]), results.rates[at]
        reply = Reply(*numbers, loss, dropped, delta, results.counters, extras)
        if not reply.dropped:
            kept = kept.after(task.last, task.update, dict(loop.store.get(at)))
        return reply, kept


class ToServer(Aggregator):
    """Keep the update of the client instead of aggregating it.

    Args:
        rule: Rule of the server, for its client-side work.
        task: What the server has sent.
    """

    #: The update; None if the client has no usable one.
    sent: ClientUpdate | None

    def __init__(self, rule: Aggregator, task: Task) -> None:
        super().__init__()
        self._rule = (rule,)  # in a tuple, since it is not a part of this rule
        self._task, self.sent = task, None

    def setup(self, federation: Federation) -> None:
        """Set up the rule, which its client-side work may need and which checks local training.

        The server has checked how clients are drawn.
        """
        super().setup(federation)
        rule, n = self._rule[0], self._task.num_clients
        rule.setup(replace(federation, aggregator=rule, sampling=Cohort(n, n), sampler=None))
        if (own := client_side(rule)) != self._task.rule:
            raise FederationError(
                f"the server uses {self._task.rule or 'a rule without work for clients'}, and this"
                f" client {own or describe(rule)}: pass the same aggregator to both"
            )

    def client_parts(self) -> Sequence[ClientPart]:
        """Return the client-side work of the rule."""
        return self._rule[0].client_parts()

    def broadcast(self, plan: RoundPlan) -> Mapping[str, Tensor]:
        """Return what the server has sent.

        Raises:
            FederationError: If the clients train other parameters than the server knows, and the
                rule depends on it.
        """
        rule, known = self._rule[0], self._task.num_trained
        assert self.num_parameters is not None
        if (own := server.counted(self.trained, self.num_parameters, rule)) != known:
            raise FederationError(
                f"this client trains {own} parameters and the server knows of {known}, on which"
                f" {type(rule).__name__} depends: freeze parameters in the constructor of the"
                " module, not in a hook, or use another rule"
            )
        return {
            name: tensor.to(self.server.device) for name, tensor in self._task.broadcast.items()
        }

    def allocate(self, server: Tensor) -> None:
        """Declare nothing."""

    def update(self, clients: ClientUpdate) -> None:
        """Keep the update."""
        self.sent = clients

    def compute(self) -> Tensor:
        """Keep the model: the server has the next one."""
        return self.server

    def conclude(self, returned: int, min_clients: int) -> Tensor | None:
        """Keep the model, without a warning if there is no update: the server warns."""
        return self.server


class TaskPolicy(HyperparameterPolicy):
    """Return the hyperparameters that the server has sent.

    Args:
        task: What the server has sent.
        phases: Phases of local training.
    """

    def __init__(self, task: Task, phases: Sequence[Phase]) -> None:
        super().__init__()
        self.task, self.phases = task, list(phases)

    def sample(self, round: int, clients: Tensor) -> dict[str, Tensor]:
        """Return the values for the client."""
        values = {
            name: torch.tensor(value, dtype=torch.float64)
            for name, value in self.task.values.items()
        }
        return {**values, "num_steps": torch.tensor(self.task.num_steps)}


class TaskSampler(ClientSampler):
    """Sample one client.

    Args:
        client: Its index.
    """

    def __init__(self, client: int) -> None:
        self.client = client

    def sample(
        self, round: int, count: int, num_samples: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the client."""
        return torch.tensor([self.client])


class OneClient(FederatedLoop):
    """Loop of one round with one client, which keeps its results.

    Args:
        task: What the server has sent.
        rule: Keeps the update.
        phases: Phases of local training.
        options: Options of ``FederatedLoop`` for clients.
    """

    results: Results

    def __init__(
        self, task: Task, rule: ToServer, phases: Sequence[Phase] = (), **options: Any
    ) -> None:
        super().__init__(
            rule,
            TaskPolicy(task, phases),
            TaskSampler(task.client),
            clients_per_round=1,
            seed=task.seed,
            check=False,  # of a step after another client
            **options,
        )
        self.table_name = None
        self._task = task
        #: Global models before and after the hooks at the start of the round, and at its end.
        self._models: tuple[ServerState, ...] = ()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the model of the server into the module, which may have created its layers now.

        Raises:
            FederationError: If the module is not that of the server, or has a scheduler.
        """
        server.refuse_schedulers(trainer, pl_module)
        self._load(pl_module)
        super().on_fit_start(trainer, pl_module)
        self.fit.memory.check_stored(self.runner)
        if exchange_id(self.runner) != self._task.exchanged:
            raise FederationError(
                "this client exchanges other parameters or buffers than the server: use the same"
                " module, precision, buffers, local_parameters and phases on both"
            )
        frozen = self.runner.constants.parameters
        if self._task.frozen and digest(frozen) != self._task.frozen:
            raise FederationError(
                "the frozen parameters of this client are not those of the server: create the"
                " module from the same weights on both, or set send_frozen=True on the server"
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the model again, which hooks of the module may have changed, and start the round."""
        self._load(pl_module)
        super().on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the results, and end the round and the fit."""
        round, self.results = self._current, self._current.results
        super().on_train_epoch_end(trainer, pl_module)
        self._models = round.before, round.server, self.runner.read()
        trainer.should_stop = True

    def check_end(self) -> None:
        """Refuse a module that has ended the fit early, or that has changed the global model."""
        module = type(self.runner.module).__name__
        if not self._models or self._task.client not in self.results.rates:
            raise FederationError(
                f"{module} has stopped the fit before this client trained: stop the server instead"
            )
        sent, started, ended = self._models
        pairs = [*zip(sent, started, strict=True), *zip(ended, self.runner.read(), strict=True)]
        if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs):
            raise FederationError(
                f"{module} changes the model in hooks of an epoch or of the end of a fit, which the"
                " server cannot: change it in training_step, or use FederatedLoop"
            )

    def _load(self, module: LightningModule) -> None:
        own = module.state_dict() if self._task.frozen else {}
        module.load_state_dict({**own, **self._task.model}, strict=module.strict_loading)
        load_unsaved(module, self._task.unsaved)
