"""Networks merged one layer a round, the lowest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_fl.aggregators.matching import NeuronMatching
from lightning_fl.chain import Layers
from lightning_fl.functional.networks import MatchedNetwork, match_upwards
from lightning_fl.types import FederationError


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
        sigma2: See :class:`NeuronMatching`; None is searched.
        sigma02: See :class:`NeuronMatching`; None is searched.
        std: See :class:`NeuronMatching`.
        options: Others of :class:`NeuronMatching`.

    Raises:
        FederationError: See :class:`NeuronMatching`.

    Example:
        >>> FedMA(sigma2=0.1).gamma
        7.0
    """

    def __init__(
        self,
        gamma: float | None = 7.0,
        sigma2: float | None = 1.0,
        sigma02: float | None = 1.0,
        std: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(gamma=gamma, sigma2=sigma2, sigma02=sigma02, std=std, **options)

    def prepare(self, module: LightningModule, example: Any = None) -> None:
        """Find the layers of a module; see :meth:`NeuronMatching.prepare`."""
        super().prepare(module, example)
        last = list(self.module_chain.layers.values())[-1]
        if example is not None and not any(p.requires_grad for p in last.parameters()):
            raise FederationError(
                "FedMA trains the last layer alone in its last round, and it is frozen"
                " (requires_grad): let it be trained, or use PFNM"
            )

    @property
    def layer(self) -> int:
        """The layer that the round matches, the lowest is 0."""
        return int(self.round) % len(self._own) if self.server.numel() else 0

    def withdraw(self) -> None:
        """Give the module the shapes that clients train, and fix the layers that are matched."""
        super().withdraw()
        self.module_chain.freeze(self.layer)

    def publish(self, score: Callable[[], float] | None = None) -> None:
        """Merge what clients returned, and give the module the network."""
        super().publish(score)
        self.module_chain.freeze(0)

    def _merge(self, score: Callable[[], float] | None) -> None:
        before = int(self.round)
        super()._merge(score)
        if self.round == before:  # nobody had all layers below
            self.round.zero_()

    def _usable(self, ids: Sequence[int]) -> list[int]:
        known = ids if self.layer == 0 else self.assignments()
        return [row for row, client in enumerate(ids) if client in known]

    def _matched(
        self, ids: Sequence[int], nets: Sequence[Layers], options: dict[str, Any]
    ) -> MatchedNetwork:
        atoms = self.assignments()
        known = [[torch.tensor(atoms[c][i]) for c in ids] for i in range(self.layer)]
        return match_upwards(nets, self._counts(ids), **options, known=known)

    def _next(
        self,
        ids: Sequence[int],
        nets: Sequence[Layers],
        found: MatchedNetwork,
        options: dict[str, float],
    ) -> None:
        """Give clients the layers that are matched; above them they keep their own."""
        for row, client in enumerate(ids):
            matched, own = found.of_client(row), nets[row]
            top = self.layer + 1
            self._start_with(client, [*matched[:top], *own[top:]])

    def figures(self) -> dict[str, float]:
        """Return the layer that was matched, counted from 1, too."""
        if not (found := super().figures()):
            return {}
        return {**found, "layer": float((int(self.round) - 1) % len(self._own) + 1)}
