"""Training of one client whose server is another process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fl.aggregators import Aggregator, FedAvg
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule, FromClients
from lightning_fl.federation.context import Federation
from lightning_fl.federation.exchange import ClientPart
from lightning_fl.federation.round import Results
from lightning_fl.functional.randomness import derive_seed
from lightning_fl.integrations.exchange import Reply, Task
from lightning_fl.policies import HyperparameterPolicy
from lightning_fl.runners import VectorizedClients
from lightning_fl.samplers import ClientSampler
from lightning_fl.types import ClientUpdate, Cohort, FederationError, RoundPlan


class RemoteClient:
    """Train one client in each round as a ``FederatedLoop`` does, for a server elsewhere.

    A round is a ``Trainer.fit`` with a ``FederatedLoop`` in which only this client takes part.
    Terms, hooks, phases, update transforms and kept state work as in a simulation, and with the
    same data, seed and plan the update is the same, bit for bit.

    Args:
        module: The LightningModule.
        data: The client's samples: a data set, or a ``FederatedDataModule`` with all clients of a
            simulation, of which this one trains.
        aggregator: Rule of the server. Only its client-side work is used, such as the control
            variates of :class:`~lightning_fl.aggregators.Scaffold`.
        trainer: Options of the Trainer, such as ``{"accelerator": "cpu"}``.
        batch_size: Samples per local step if ``data`` is a data set; None means all.
        options: Options of ``FederatedLoop`` for clients: ``optimizer_state``, ``buffers``,
            ``exchange_frozen``, ``update_transforms``, ``local_parameters``, ``phases``.
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
        if isinstance(module, VectorizedClients):
            raise FederationError(
                "a remote client is one client, and VectorizedClients trains several at once: pass"
                " the module itself"
            )
        self.module, self.rule = module, FedAvg() if aggregator is None else aggregator
        if not isinstance(data, FederatedDataModule):
            data = FromClients([data], batch_size=batch_size, val_size=0)
        data.prepare_data()
        data.setup("fit")
        self.data, self.trainer = data, dict(trainer or {})
        self.options = {"buffers": "average"} | options  # the server warns of BatchNorm

    def index(self, client: int) -> int:
        """Return the index of a client in the data: its id, or 0 if the data is its own."""
        count = len(self.data.num_samples)
        if count == 1:
            return 0
        if client >= count:
            raise FederationError(
                f"client {client} has no samples: the data has {count} clients. Give each client"
                " its own data set, or use as many clients as the data has"
            )
        return client

    def work(self, client: int) -> tuple[int, int]:
        """Return the number of training samples and of batches per local epoch of a client."""
        at = self.index(client)
        return int(self.data.num_samples[at]), int(self.data.batches_per_epoch[at])

    def train(self, task: Task, kept: Mapping[str, Tensor]) -> tuple[Reply, dict[str, Tensor]]:
        """Train the client in a round.

        Args:
            task: What the server has sent.
            kept: State that this method returned in round ``task.last``; empty in the first round.

        Returns:
            What to send back, and the state to keep.
        """
        at = self.index(task.client)
        is_own = len(self.data.num_samples) == 1 < task.num_clients
        # Sites with their own data all have index 0, and need random numbers of their own.
        seed = derive_seed(task.seed, task.client) % 2**32 if is_own else task.seed
        self.module.load_state_dict(dict(task.model))
        rule = ToServer(self.rule, task)
        loop = OneClient(
            rule,
            Given(task),
            Only(at),
            clients_per_round=1,
            seed=seed,
            csv_name=None,
            **self.options,
        )
        loop.progress.round = task.round
        loop.evaluates_clients = True  # nothing is validated here, so that no warning is due
        if kept:
            loop.store.put(at, dict(kept))
            loop.store.commit()
        made = Trainer(
            **{
                "max_epochs": task.round + 1,
                "limit_val_batches": 0,
                "num_sanity_val_steps": 0,
                "logger": False,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
            }
            | self.trainer,
            callbacks=[loop],
        )
        progress: Any = made.fit_loop.epoch_progress.current
        progress.ready = progress.started = progress.processed = progress.completed = task.round
        made.fit(self.module, datamodule=self.data)
        results, sent = loop.results, rule.sent
        reply = Reply(
            torch.empty(0) if sent is None else sent.delta[0],
            results.counters,
            {} if sent is None else sent.extras,
            int(self.data.num_samples[at]),
            results.rates[at],
            results.losses.get(at, math.nan),
            results.dropped.get(at),
        )
        return reply, dict(loop.store.get(at))


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
        rule.setup(
            replace(federation, aggregator=rule, num_clients=n, sampling=Cohort(n, n), sampler=None)
        )

    def client_parts(self) -> Sequence[ClientPart]:
        """Return the client-side work of the rule."""
        return self._rule[0].client_parts()

    def broadcast(self, plan: RoundPlan) -> Mapping[str, Tensor]:
        """Return what the server has sent."""
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


class Given(HyperparameterPolicy):
    """Return the hyperparameters that the server has sent.

    Args:
        task: What the server has sent.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def sample(self, round: int, clients: Tensor) -> dict[str, Tensor]:
        """Return the values for the client."""
        values = {
            name: torch.tensor(value, dtype=torch.float64)
            for name, value in self.task.values.items()
        }
        return {**values, "num_steps": torch.tensor(self.task.num_steps)}


class Only(ClientSampler):
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
    """Loop that keeps the results of its last round."""

    results: Results

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the fit of a round. A schedule would begin anew in every round."""
        if trainer.lr_scheduler_configs:
            raise FederationError(
                f"{type(pl_module).__name__} has a learning rate scheduler, which would begin anew"
                " in every round of a remote client: let the policy of the server set lr"
            )
        super().on_fit_start(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the results and end the round."""
        self.results = self._current.results
        super().on_train_epoch_end(trainer, pl_module)
