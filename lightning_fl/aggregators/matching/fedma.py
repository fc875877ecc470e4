"""Federated matched averaging: one layer per round, from the lowest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_fl.aggregators.matching.layer_stack import Layers
from lightning_fl.aggregators.matching.neuron_matching import NeuronMatching
from lightning_fl.functional.networks import MatchedNetwork, MatchingOptions, match_upwards


class FedMA(NeuronMatching):
    r"""Federated matched averaging (Wang et al., 2020, algorithm 1).

    Each round matches one layer: filters or units are matched by their incoming weights, in the
    order of the atoms of the layer below
    (:func:`~lightning_fl.functional.networks.match_upwards`). Clients receive the atoms of their
    neurons, freeze them, and train the layers above to adapt to the change. The next round matches
    the next layer. The softmax layer is averaged by class counts. A network of :math:`n` layers
    takes :math:`n` rounds (``max_epochs``). Further rounds start again from the lowest layer.

    For validation between rounds all layers are merged. A client that missed the round of a lower
    layer is ignored until the lowest layer is matched again.

    Unlike in the paper, clients keep their own widths: each receives the filters that its own
    filters were matched to.

    Args:
        gamma: Concentration :math:`\gamma_0`; larger values give wider networks. None is searched.
        client_variance: Variance :math:`\sigma^2` of client weights around the atom. None is
            searched.
        prior_variance: Variance :math:`\sigma_0^2` of atoms around the prior mean. None is
            searched.
        std: Standard deviation of the initial weights. None uses the default initialization of
            the layers.
        options: Other arguments of :class:`NeuronMatching`.

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
        """Layer to match in this round, from 0 for the lowest."""
        return int(self.round) % len(self.module_chain.layers) if self.server.numel() else 0

    def _matched(
        self, ids: Sequence[int], nets: Sequence[Layers], options: MatchingOptions
    ) -> MatchedNetwork:
        atoms, counts = self.assignments(), self._counts(ids)
        known = [[torch.tensor(atoms[c][i]) for c in ids] for i in range(self.layer)]
        return match_upwards(nets, counts, options, known=known, generator=self._orders())

    def _next(self, ids: Sequence[int], nets: Sequence[Layers], merged: MatchedNetwork) -> None:
        """Replace the matched layers of clients; they keep their own layers above."""
        top = self.layer + 1
        for row, client in enumerate(ids):
            self._start_with(client, [*merged.of_client(row)[:top], *nets[row][top:]])
