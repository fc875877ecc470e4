"""One rule after another in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.federation.context import Federation
from lightning_fl.federation.exchange import ClientContext, ClientPart
from lightning_fl.functional.stages import check_stages, stage_of
from lightning_fl.types import ClientUpdate, RoundPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Staged(Aggregator):
    """Let one server rule take over from another after some rounds.

    As FedAvg+ does (Jiang et al., 2019): many local epochs with momentum on the server, then few
    local steps (Reptile) with Adam on the server. Each rule keeps its own state. A rule that holds
    models of clients or clusters starts with the server's when its stage begins.

    Args:
        rounds: Rounds of each stage but the last.
        aggregators: The stages' rules, one more than ``rounds``.

    Raises:
        FederationError: If numbers do not fit.

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
        self.register_buffer("round", torch.zeros((), dtype=torch.int64))

    @property
    def stage(self) -> int:
        """Index of the present stage."""
        return stage_of(self.rounds, int(self.round))

    @property
    def active(self) -> Aggregator:
        """The rule of the present stage."""
        return cast("Aggregator", self.rules[self.stage])

    def allocate(self, server: Tensor) -> None:
        """Let all rules declare what they need: a checkpoint has it of all."""
        for rule in self.rules:
            cast("Aggregator", rule).start(server)

    def setup(self, federation: Federation) -> None:
        """Let every rule refuse what does not fit it."""
        super().setup(federation)
        for rule in self.rules:
            cast("Aggregator", rule).setup(federation)

    def client_parts(self) -> Sequence[ClientPart]:
        """Return the parts of all stages, each of which works in its own stage only."""
        return [
            _PartOfStage(self, stage, part)
            for stage, rule in enumerate(self.rules)
            for part in cast("Aggregator", rule).client_parts()
        ]

    def broadcast(self, plan: RoundPlan) -> Mapping[str, Tensor]:
        """Return what the rule of the stage sends."""
        return self.active.broadcast(plan)

    def start(self, server: Tensor, trained: Tensor | None = None) -> None:
        """Begin a round."""
        super().start(server, trained)
        begins = int(self.round) in [sum(self.rounds[:i]) for i in range(1, len(self.rounds) + 1)]
        if begins:  # with the model that the stage before has left
            self.active.allocate(server)
            self.active.to(server.device)
        self.active.start(server, trained)

    def update(self, clients: ClientUpdate) -> None:
        """Take in the updates of one or more clients."""
        self.active.update(clients)

    def compute(self) -> Tensor:
        """Return the server's new parameters."""
        found: Tensor = self.active.compute()
        self.round = self.round + 1
        return found

    def conclude(self, returned: int, min_clients: int) -> Tensor | None:
        """End a round of the stage; see :meth:`Aggregator.conclude`."""
        model = self.active.conclude(returned, min_clients)
        self.round = self.round + 1
        return model

    def models_for(self, clients: Tensor) -> Tensor:
        """Return what each client starts from, ``[k, P]``."""
        return self.active.models_for(clients)

    def metrics(self) -> dict[str, float]:
        """Return the figures of the rule whose round it was, and its stage."""
        stage = stage_of(self.rounds, max(int(self.round) - 1, 0))
        return {"stage": stage + 1, **cast("Aggregator", self.rules[stage]).metrics()}

    def plot(self) -> Figure | None:
        """Draw what the rule of the last stage draws, of those that have a picture."""
        drawn = (cast("Aggregator", rule).plot() for rule in reversed(list(self.rules)))
        return next((figure for figure in drawn if figure is not None), None)


class _PartOfStage(ClientPart):
    """A part of a client's work that rests while other stages run."""

    def __init__(self, rule: Staged, stage: int, part: ClientPart) -> None:
        self._rule, self._stage, self._part = rule, stage, part

    def initial_memory(self, federation: Federation) -> dict[str, Tensor]:
        return self._part.initial_memory(federation)

    def start(
        self, client: ClientContext, memory: dict[str, Tensor], broadcast: Mapping[str, Tensor]
    ) -> None:
        if self._rule.stage == self._stage:
            self._part.start(client, memory, broadcast)

    def end(self, client: ClientContext, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._part.end(client, memory) if self._rule.stage == self._stage else {}
