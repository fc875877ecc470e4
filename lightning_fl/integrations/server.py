"""The server of a federation whose clients are other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fl.aggregators import Aggregator, DPFedAvg
from lightning_fl.federation.checks import check_policy, warn_of_running_statistics
from lightning_fl.federation.context import Federation
from lightning_fl.federation.plan import draw_clients, draw_values
from lightning_fl.federation.round import is_finite, weights_and_losses
from lightning_fl.federation.run_options import RunOptions
from lightning_fl.functional.randomness import run_seed
from lightning_fl.integrations.exchange import Reply, Task
from lightning_fl.options import check_integer
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
)


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
        exchange_frozen: Whether frozen parameters are exchanged, as in ``FederatedLoop``.
        local_parameters: Patterns of the parameters and buffers that stay with the clients.
        seed: Seed of the run; None means that of ``seed_everything``, or 0 without one.

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
        exchange_frozen: bool | None = None,
        local_parameters: Sequence[str] = (),
        seed: int | None = None,
    ) -> None:
        self.options = RunOptions.of(
            aggregator,
            policy,
            sampler,
            clients_per_round=clients_per_round,
            client_fraction=client_fraction,
            min_clients=min_clients,
            buffers=buffers,
            exchange_frozen=exchange_frozen,
            local_parameters=local_parameters,
        )
        self.module, self.seed = module, run_seed(check_integer("seed", seed, min=0, optional=True))
        self.rule, self.policy = self.options.aggregator, self.options.policy
        self._refuse()
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

    def begin(self, num_samples: Sequence[int], batches_per_epoch: Sequence[int]) -> None:
        """Set up the rules, when the clients are known.

        Args:
            num_samples: Number of training samples of each client.
            batches_per_epoch: Number of batches in a local epoch of each client.
        """
        options, n = self.options, len(num_samples)
        self.num_samples = torch.tensor(num_samples, dtype=torch.int64)
        self.batches_per_epoch = torch.tensor(batches_per_epoch, dtype=torch.int64)
        self.cohort_size = options.cohort_size(n)
        options.check_min_clients(self.cohort_size)
        check_policy(options)
        self.declared = Declared(self.module)
        # The optimizer of the clients is theirs; this one is never stepped.
        unused = torch.optim.SGD(self.module.parameters(), lr=1.0)
        self.runner = client_runner(
            self.module,
            options.buffer_policy,
            unused,
            False,
            options.exchange_frozen,
            options.local_parameters,
        )
        if options.buffers is None:
            warn_of_running_statistics(self.module, self.runner.shared_buffers.values())
        federation = Federation(
            n,
            Cohort(self.cohort_size, n, how_drawn(options.sampler)),
            layout=self.runner.layout,
            seed=self.seed,
            num_samples=self.num_samples,
            module=self.module,
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
        self.rule.start(start.vector, self.runner.trained_mask())
        broadcast = self.rule.broadcast(plan)
        models = self.rule.models_for(clients)
        sent = values if lr is None else values | {"lr": lr}
        tasks, model = [], self.model()
        for row, client in enumerate([] if is_empty else clients.tolist()):
            if models.stride(0):  # each client starts from a model of its own
                self.runner.write(ServerState(models[row], start.counters))
                model = self.model()
            own = {name: float(value[row]) for name, value in sent.items()}
            count, number = len(self.num_samples), int(steps[row])
            last = self.last.get(client, -1)
            tasks.append(
                Task(self.round, client, count, self.seed, number, last, model, own, broadcast)
            )
        self.runner.write(start)
        self.rule.load_global_network()
        return tasks

    def model(self) -> dict[str, Tensor]:
        """Return a copy of the global model, a ``state_dict`` on the CPU."""
        return {name: t.detach().cpu().clone() for name, t in self.module.state_dict().items()}

    def finish(self, replies: Mapping[int, Reply]) -> dict[str, float]:
        """Aggregate the replies of a round, load the new global model, and update the policy.

        Args:
            replies: Replies by client. Clients without one have failed.

        Returns:
            Metrics of the round.

        Raises:
            FederationError: If an update does not have the size of the model.
        """
        plan = self._plan
        assert plan is not None, "tasks() begins a round"
        self._plan, losses, counters, returned = None, dict[int, float](), self._start.counters, 0
        clients = [] if plan.is_empty else plan.clients.tolist()
        for row, client in enumerate(clients):
            reply = replies.get(client)
            if reply is None or reply.dropped is not None:
                continue
            size, device = len(self._start.vector), self._start.vector.device
            if reply.delta.shape != (size,):
                raise FederationError(
                    f"client {client} sent an update of {reply.delta.numel()} values, and the model"
                    f" exchanges {size}: use the same module, buffers and local_parameters on the"
                    " server and on all clients"
                )
            delta = reply.delta[None].to(device)
            extras = {name: value.to(device) for name, value in reply.extras.items()}
            known = torch.tensor([client])
            if self.rule.rejected(known) or not is_finite(delta, extras).all():
                continue
            update = ClientUpdate(
                known,
                delta,
                torch.tensor([reply.num_samples]),
                plan.num_steps[[row]],
                torch.tensor([reply.lr], dtype=torch.float64),
                extras,
            )
            self.rule.update(update)
            counters = torch.maximum(counters, reply.counters.to(counters.device))
            losses[client], self.last[client] = reply.loss, plan.round
            returned += 1
        vector = self.rule.conclude(returned, self.options.min_clients)
        if vector is not None:
            self.runner.write(ServerState(vector, counters))
        self.rule.load_global_network()
        weights, reported = weights_and_losses(plan.clients, losses, self.num_samples)
        metrics = {
            "clients": len(clients),
            "dropped": len(clients) - returned,
            **self.rule.metrics(),
        }
        if returned:
            metrics["train_loss"] = float((weights * reported)[weights > 0].sum())
        wanted = reported if "client_losses" in self.policy.learns_from else None
        self.policy.update(Feedback(plan, None, None, wanted, weights, None, metrics))
        self.round += 1
        return metrics

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two rounds."""
        return {
            "round": self.round,
            "last": self.last,
            "model": self.module.state_dict(),
            "aggregator": self.rule.state_dict(),
            "policy": self.policy.state_dict(),
            "identity": self._identity(),
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
        self.module.load_state_dict(state["model"])
        self.rule.load_state_dict(state["aggregator"])
        self.policy.load_state_dict(state["policy"])
        self.round, self.last = state["round"], dict(state["last"])

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "clients": len(self.num_samples),
            "aggregator": type(self.rule).__name__,
            "policy": type(self.policy).__name__,
            "parameters": self.runner.num_parameters,
        }

    def close(self) -> None:
        """Release the module."""
        self.runner.close()
