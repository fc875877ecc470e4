"""One rule after another in one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.functional.stages import check_stages, stage_of
from lightning_fl.types import ClientUpdate, FederationError

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
        for rule in aggregators:
            if rule.replaces_network:
                raise FederationError(
                    f"{type(rule).__name__} replaces the module's network and cannot be a stage:"
                    " use it alone"
                )
            if rule.is_private:
                raise FederationError(
                    f"{type(rule).__name__} cannot be a stage: what other stages give away would"
                    " not be counted. Use it alone"
                )
        self.rounds = list(rounds)
        self.rules = nn.ModuleList(aggregators)
        self.forgets = all(rule.forgets for rule in aggregators)
        self.needs_losses = any(rule.needs_losses for rule in aggregators)
        self.least_clients = max(rule.least_clients for rule in aggregators)
        self.register_buffer("round", torch.zeros((), dtype=torch.int64))

    @property
    def active(self) -> Aggregator:
        """The rule of the present stage."""
        return cast("Aggregator", self.rules[stage_of(self.rounds, int(self.round))])

    def allocate(self, server: Tensor) -> None:
        """Let all rules declare what they need: a checkpoint has it of all."""
        for rule in self.rules:
            each = cast("Aggregator", rule)
            if each.num_clients is None:
                each.num_clients = self.num_clients
            each.num_parameters = self.num_parameters
            each.start(server)

    def start(self, server: Tensor) -> None:
        """Begin a round."""
        super().start(server)
        begins = int(self.round) in [sum(self.rounds[:i]) for i in range(1, len(self.rounds) + 1)]
        if begins:  # with the model that the stage before has left
            self.active.allocate(server)
            self.active.to(server.device)
        self.active.start(server)

    def update(self, clients: ClientUpdate) -> None:
        """Take in the updates of one or more clients."""
        self.active.update(clients)

    def compute(self) -> Tensor:
        """Return the server's new parameters."""
        found: Tensor = self.active.compute()
        self.round = self.round + 1
        return found

    def skip(self) -> None:
        """Let a round pass."""
        self.active.skip()
        self.round = self.round + 1

    def server_for(self, clients: Tensor) -> Tensor:
        """Return what each client starts from, ``[k, P]``."""
        return self.active.server_for(clients)

    def figures(self) -> dict[str, float]:
        """Return the figures of the rule whose round it was, and its stage."""
        stage = stage_of(self.rounds, max(int(self.round) - 1, 0))
        return {"stage": stage + 1, **cast("Aggregator", self.rules[stage]).figures()}

    def figure(self) -> Figure | None:
        """Draw what the rule of the last stage draws, of those that have a picture."""
        drawn = (cast("Aggregator", rule).figure() for rule in reversed(list(self.rules)))
        return next((figure for figure in drawn if figure is not None), None)
