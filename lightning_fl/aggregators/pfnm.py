"""Networks that were trained apart, fused once by matching their neurons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lightning_fl.aggregators.matching import NeuronMatching
from lightning_fl.chain import Layers
from lightning_fl.functional.networks import MatchedNetwork, match_networks
from lightning_fl.types import FederationError


class PFNM(NeuronMatching):
    r"""Probabilistic federated neural matching (Yurochkin et al., 2019).

    Clients start from networks of their own, trained apart; after a round their hidden neurons are
    matched, the top layer first: :func:`~lightning_fl.functional.networks.match_networks`. Filters
    of convolutions are neurons. One round of several local epochs is the paper's one-shot setting.
    In further rounds each client starts from the neurons that its own were matched to;
    ``Proximal`` then is the paper's pull towards them.

    Args:
        gamma: See :class:`NeuronMatching`.
        sigma2: See :class:`NeuronMatching`.
        sigma02: See :class:`NeuronMatching`.
        restart: What a client starts the next round from: ``matched`` neurons, or its ``own``
            network as it was: then nothing is ever sent to it. In a stream class counts are those
            of the round's samples, not of all that a network has seen.
        options: Others of :class:`NeuronMatching`.

    Raises:
        FederationError: If an option is out of range, or see :class:`NeuronMatching`.

    Example:
        >>> rule = PFNM(gamma=1.0, sigma2=1.0, sigma02=10.0)
        >>> rule.figures()
        {}
    """

    def __init__(
        self,
        gamma: float | None = None,
        sigma2: float | None = None,
        sigma02: float | None = None,
        restart: Literal["matched", "own"] = "matched",
        **options: Any,
    ) -> None:
        super().__init__(gamma=gamma, sigma2=sigma2, sigma02=sigma02, **options)
        if restart not in ("matched", "own"):
            raise FederationError(f"restart must be matched or own, got {restart!r}")
        self.restart = restart

    def _next(
        self,
        ids: Sequence[int],
        nets: Sequence[Layers],
        found: MatchedNetwork,
        options: dict[str, float],
    ) -> None:
        super()._next(ids, nets, found, options)
        if self.restart == "own":
            for client, net in zip(ids, nets, strict=True):
                self._start_with(client, net)

    def _matched(
        self, ids: Sequence[int], nets: Sequence[Layers], options: dict[str, Any]
    ) -> MatchedNetwork:
        return match_networks(nets, self._counts(ids), **options)
