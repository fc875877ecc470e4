"""Switch between aggregation rules during a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.contracts.client_part import ClientContext, ClientPart
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.functional.stages import check_stages, stage_of


class Staged(Aggregator):
    """Switch from one aggregation rule to the next after a given number of rounds.

    An example is FedAvg+ (Jiang et al., 2019): many local epochs with server momentum, then few
    local steps (Reptile) with Adam on the server. Each rule keeps its own state. Rules with client
    or cluster models initialize them from the global model at the start of their stage.

    Args:
        rounds: Number of rounds of each stage except the last.
        aggregators: Rule of each stage, one more than ``rounds``.

    Raises:
        FederationError: If ``rounds`` and ``aggregators`` do not match.

    Example:
        >>> from lightning_fl.aggregators import FedAvg, FedAvgM
        >>> rule = Staged([10], [FedAvgM(), FedAvg()])
        >>> type(rule.active).__name__
        'FedAvgM'
    """

    round: Tensor

    def __init__(self, rounds: Sequence[int], aggregators: Sequence[Aggregator]) -> None:
        super().__init__()
        check_stages(rounds, aggregators, "aggregators")
        self.rounds = list(rounds)
        self.rules = nn.ModuleList(aggregators)
        self.needs_trained_mask = any(rule.needs_trained_mask for rule in aggregators)
        self.register_buffer("round", torch.zeros((), dtype=torch.int64))

    @property
    def stage(self) -> int:
        """Index of the current stage."""
        return stage_of(self.rounds, int(self.round))

    @property
    def active(self) -> Aggregator:
        """Rule of the current stage."""
        return cast("Aggregator", self.rules[self.stage])

    def allocate(self, server: Tensor) -> None:
        """Declare the states of all rules, which are all saved in the checkpoint."""
        for rule in self.rules:
            cast("Aggregator", rule).start(server)

    def setup(self, federation: Federation) -> None:
        """Set up all rules; each may reject the run."""
        super().setup(federation)
        for rule in self.rules:
            cast("Aggregator", rule).setup(federation)

    def client_parts(self) -> Sequence[ClientPart]:
        """Return the client-side hooks of all stages, each active in its own stage only."""
        return [
            _PartOfStage(self, stage, part)
            for stage, rule in enumerate(self.rules)
            for part in cast("Aggregator", rule).client_parts()
        ]

    def broadcast(self, plan: RoundPlan) -> Mapping[str, Tensor]:
        """Return the tensors that the current rule sends to clients."""
        return self.active.broadcast(plan)

    def start(self, server: Tensor, trained: Tensor | None = None) -> None:
        """Begin a round."""
        super().start(server, trained)
        if int(self.round) in accumulate(self.rounds):
            # The model of the previous stage initializes the client models of this one.
            self.active.allocate(server)
            self.active.to(server.device)
        self.active.start(server, trained)

    def update(self, clients: ClientUpdate) -> None:
        """Accumulate the updates of one or more clients."""
        self.active.update(clients)

    def compute(self) -> Tensor:
        """Return the new global model."""
        found: Tensor = self.active.compute()
        self.round = self.round + 1
        return found

    def conclude(self, returned: int, min_clients: int) -> Tensor | None:
        """End a round of the stage; see :meth:`Aggregator.conclude`."""
        model = self.active.conclude(returned, min_clients)
        self.round = self.round + 1
        return model

    def models_for(self, clients: Tensor) -> Tensor:
        """Return the initial model of each client, ``[k, P]``."""
        return self.active.models_for(clients)

    def unused_entries(self, clients: Tensor) -> Tensor:
        """Return the number of trained entries that clients do not exchange, ``[k]``."""
        return self.active.unused_entries(clients)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the rule of the last round, and its stage."""
        stage = stage_of(self.rounds, max(int(self.round) - 1, 0))
        return {"stage": stage + 1, **cast("Aggregator", self.rules[stage]).metrics()}


class _PartOfStage(ClientPart):
    """Client-side hook that is active in one stage only.

    The stage is that of the client's round: the state of the rule is the server's.
    """

    def __init__(self, rule: Staged, stage: int, part: ClientPart) -> None:
        self._rule, self._stage, self._part = rule, stage, part

    def initial_memory(self, federation: Federation) -> dict[str, Tensor]:
        return self._part.initial_memory(federation)

    def start(
        self, client: ClientContext, memory: dict[str, Tensor], broadcast: Mapping[str, Tensor]
    ) -> None:
        if self._is_active(client):
            self._part.start(client, memory, broadcast)

    def personal_models(
        self, federation: Federation, received: Tensor, memory: Mapping[str, Tensor]
    ) -> Tensor | None:
        is_next = self._rule.stage == self._stage
        return self._part.personal_models(federation, received, memory) if is_next else None

    def end(self, client: ClientContext, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._part.end(client, memory) if self._is_active(client) else {}

    def _is_active(self, client: ClientContext) -> bool:
        return stage_of(self._rule.rounds, client.round) == self._stage
