"""Probabilistic federated neural matching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fl.aggregators.matching.layer_stack import Layers
from lightning_fl.aggregators.matching.neuron_matching import NeuronMatching
from lightning_fl.functional.networks import MatchedNetwork, MatchingOptions, match_networks
from lightning_fl.options import check_choice


class PFNM(NeuronMatching):
    r"""Probabilistic federated neural matching (Yurochkin et al., 2019).

    Each client starts from its own network. After a round, hidden neurons are matched from the top
    layer down (:func:`~lightning_fl.functional.networks.match_networks`). Filters of convolutions
    are treated as neurons. One round of several local epochs is the paper's one-shot setting. In
    further rounds each client starts from the atoms that its neurons were matched to; add
    ``Proximal`` for the paper's regularization towards them. The matching is initialized from the
    previous round, as in the authors' program (``pfnm_communication.py``): clients of that round
    keep the atoms of their neurons, other clients are assigned greedily, and sweeps follow.

    Args:
        restart: Initial network of a client in the next round. ``matched`` uses the atoms of its
            neurons. ``own`` keeps its network unchanged, so that clients receive no model. In a
            stream, class counts are those of the samples of the round, not of all samples that a
            network was trained on.
        options: The other arguments of :class:`NeuronMatching`.

    Raises:
        FederationError: If an option is out of range; see also :class:`NeuronMatching`.

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
        **options: Any,
    ) -> None:
        super().__init__(
            gamma=gamma, client_variance=client_variance, prior_variance=prior_variance, **options
        )
        self.restart = check_choice("restart", restart, "matched", "own")

    def _matched(
        self, ids: Sequence[int], nets: Sequence[Layers], options: MatchingOptions
    ) -> MatchedNetwork:
        counts, start = self._counts(ids), self._start(ids)
        return match_networks(nets, counts, options, start=start, generator=self._orders())

    def _next(self, ids: Sequence[int], nets: Sequence[Layers], merged: MatchedNetwork) -> None:
        """Set the next initial networks: matched atoms, or the clients' own networks."""
        for row, client in enumerate(ids):
            own = self.restart == "own"
            self._start_with(client, list(nets[row]) if own else merged.of_client(row))

    def _start(self, ids: Sequence[int]) -> list[list[Tensor | None]] | None:
        """Return the last assignment per hidden layer and client, None for new clients."""
        last = self.assignments() if self.round > 0 else {}
        if last.keys().isdisjoint(ids):
            return None
        return [
            [torch.tensor(last[client][layer]) if client in last else None for client in ids]
            for layer in range(len(self._clients.shapes) - 1)
        ]
