"""Networks that were trained apart, fused once by matching their neurons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fl.aggregators.matching import NeuronMatching
from lightning_fl.functional.networks import MatchedNetwork, MatchingOptions, match_networks
from lightning_fl.layer_stack import Layers
from lightning_fl.types import FederationError


class PFNM(NeuronMatching):
    r"""Probabilistic federated neural matching (Yurochkin et al., 2019).

    Clients start from networks of their own, trained apart; after a round their hidden neurons are
    matched, the top layer first: :func:`~lightning_fl.functional.networks.match_networks`. Filters
    of convolutions are neurons. One round of several local epochs is the paper's one-shot setting.
    In further rounds each client starts from the neurons that its own were matched to;
    ``Proximal`` then is the paper's pull towards them. The matching goes on from that of the last
    round, as in the authors' program (``pfnm_communication.py``): clients that were in it begin
    with the atoms that their neurons had, the others are placed greedily, and sweeps follow.

    Args:
        gamma: See :class:`NeuronMatching`.
        client_variance: See :class:`NeuronMatching`.
        prior_variance: See :class:`NeuronMatching`.
        restart: What a client starts the next round from: ``matched`` neurons, or its ``own``
            network as it was: then nothing is ever sent to it. In a stream class counts are those
            of the round's samples, not of all that a network has seen.
        matching_start: Where the matching of a round after the first starts: ``previous`` is the
            last round's assignment, ``greedy`` matches all clients anew.
        options: Others of :class:`NeuronMatching`.

    Raises:
        FederationError: If an option is out of range, or see :class:`NeuronMatching`.

    Example:
        >>> rule = PFNM(gamma=1.0, client_variance=1.0, prior_variance=10.0)
        >>> rule.metrics()
        {}
    """

    layer = None

    def __init__(
        self,
        gamma: float | None = None,
        client_variance: float | None = None,
        prior_variance: float | None = None,
        restart: Literal["matched", "own"] = "matched",
        matching_start: Literal["previous", "greedy"] = "previous",
        **options: Any,
    ) -> None:
        super().__init__(
            gamma=gamma, client_variance=client_variance, prior_variance=prior_variance, **options
        )
        if restart not in ("matched", "own"):
            raise FederationError(f"restart must be matched or own, got {restart!r}")
        if matching_start not in ("previous", "greedy"):
            raise FederationError(
                f"matching_start must be previous or greedy, got {matching_start!r}"
            )
        self.restart, self.matching_start = restart, matching_start

    def _first(self, client: int) -> Layers:
        return self._clients.first(client, self.base)

    def _matched(
        self, ids: Sequence[int], nets: Sequence[Layers], options: MatchingOptions
    ) -> MatchedNetwork:
        counts, start = self._counts(ids), self._start(ids)
        return match_networks(nets, counts, options, start=start, generator=self._orders())

    def _next(self, ids: Sequence[int], nets: Sequence[Layers], merged: MatchedNetwork) -> None:
        """Let clients start from what their neurons were matched to, or from their own."""
        for row, client in enumerate(ids):
            own = self.restart == "own"
            self._start_with(client, list(nets[row]) if own else merged.of_client(row))

    def _start(self, ids: Sequence[int]) -> list[list[Tensor | None]] | None:
        """Return the last assignment of each hidden layer and client; None of other clients."""
        goes_on = self.matching_start == "previous" and self.round > 0
        last = self.assignments() if goes_on else {}
        if last.keys().isdisjoint(ids):
            return None
        return [
            [torch.tensor(last[client][layer]) if client in last else None for client in ids]
            for layer in range(len(self._clients.shapes) - 1)
        ]
