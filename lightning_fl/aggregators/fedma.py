"""Networks merged one layer a round, the lowest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_fl.aggregators.matching import NeuronMatching
from lightning_fl.functional.networks import MatchedNetwork, MatchingOptions, match_upwards
from lightning_fl.layer_stack import Layers


class FedMA(NeuronMatching):
    r"""Federated matched averaging (Wang et al., 2020, algorithm 1).

    One layer is matched a round: filters or units by their incoming weights, in the order of the
    atoms below (:func:`~lightning_fl.functional.networks.match_upwards`). Clients then get what
    their neurons were matched to, keep it fixed, and train the layers above, which makes up for
    the change below; then the next layer is matched. The last, softmax layer is averaged by class
    counts. A network of :math:`n` layers takes :math:`n` rounds (``max_epochs``); in further
    rounds it begins with the lowest layer again.

    The module has all layers merged also when it is validated in between. A client that was not in
    the rounds of all layers below is left out until the lowest is matched again.

    Unlike the paper's, clients keep their own widths: each gets the filters that its own were
    matched to.

    Args:
        gamma: See :class:`NeuronMatching`; None is searched.
        client_variance: See :class:`NeuronMatching`; None is searched.
        prior_variance: See :class:`NeuronMatching`; None is searched.
        std: See :class:`NeuronMatching`.
        options: Others of :class:`NeuronMatching`.

    Raises:
        FederationError: See :class:`NeuronMatching`.

    Example:
        >>> FedMA(client_variance=0.1).gamma
        7.0
    """

    def __init__(
        self,
        gamma: float | None = 7.0,
        client_variance: float | None = 1.0,
        prior_variance: float | None = 1.0,
        std: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            gamma=gamma,
            client_variance=client_variance,
            prior_variance=prior_variance,
            std=std,
            **options,
        )

    @property
    def layer(self) -> int:
        """The layer that the round matches, the lowest is 0."""
        return int(self.round) % len(self.module_chain.layers) if self.server.numel() else 0

    def _first(self, client: int) -> Layers:
        return self._clients.first(client, self.base)

    def _matched(
        self, ids: Sequence[int], nets: Sequence[Layers], options: MatchingOptions
    ) -> MatchedNetwork:
        atoms, counts = self.assignments(), self._counts(ids)
        known = [[torch.tensor(atoms[c][i]) for c in ids] for i in range(self.layer)]
        return match_upwards(nets, counts, options, known=known, generator=self._orders())

    def _next(self, ids: Sequence[int], nets: Sequence[Layers], merged: MatchedNetwork) -> None:
        """Give clients the layers that are matched; above them they keep their own."""
        top = self.layer + 1
        for row, client in enumerate(ids):
            self._start_with(client, [*merged.of_client(row)[:top], *nets[row][top:]])
