"""Neural matching of data that arrive in steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fl.aggregators.matching import NeuronMatching
from lightning_fl.chain import Layers
from lightning_fl.functional.matching import Posterior
from lightning_fl.functional.networks import (
    MatchedNetwork,
    NetworkPosterior,
    match_networks,
    part_of,
)
from lightning_fl.functional.randomness import Purpose, generator, run_seed
from lightning_fl.functional.tables import with_place
from lightning_fl.types import FederationError


class StreamingPFNM(NeuronMatching):
    r"""Neural matching of a stream (Yurochkin et al., 2019, section 3.3 and supplement 3).

    A round is a step :math:`s` of a stream: data modules have ``arrivals``. The posterior of a step
    is the prior of the next. Before step :math:`s + 1` client :math:`j` draws neurons of the global
    network, each in proportion to :math:`m_{ji}`, the steps in which it had neuron :math:`i`
    (others only where these are too few), adds ``fresh`` ones at the prior's mean, and noise.

    What is searched is searched in the first step, and kept.

    Args:
        gamma: See :class:`NeuronMatching`.
        sigma2: See :class:`NeuronMatching`.
        sigma02: See :class:`NeuronMatching`.
        fresh: Neurons of each hidden layer that a client begins a step with at the prior's mean:
            those that it may use for something new.
        noise: Standard deviation of what is added to all weights a client begins with.
        options: Those of :class:`NeuronMatching`.

    Raises:
        FederationError: If an option is out of range, or see :class:`NeuronMatching`.

    Example:
        >>> rule = StreamingPFNM(gamma=1.0, sigma2=1.0, sigma02=10.0, fresh=5)
        >>> rule.fresh, rule.noise
        (5, 0.01)
    """

    top: Tensor
    chosen: Tensor

    def __init__(
        self,
        gamma: float | None = None,
        sigma2: float | None = None,
        sigma02: float | None = None,
        fresh: int = 0,
        noise: float = 0.01,
        **options: Any,
    ) -> None:
        super().__init__(gamma=gamma, sigma2=sigma2, sigma02=sigma02, **options)
        if not isinstance(fresh, int):
            raise FederationError(f"fresh must be a whole number, got {fresh!r}")
        for name, value in (("fresh", fresh), ("noise", noise)):
            if not 0 <= value < math.inf:
                raise FederationError(f"{name} must be at least 0, got {value}")
        self.fresh, self.noise = fresh, noise

    def allocate(self, server: Tensor) -> None:
        """Declare what a stream teaches, too."""
        super().allocate(server)
        device = server.device
        #: What the search has found: gamma, sigma2, sigma02.
        self.register_buffer("chosen", torch.full((3,), math.nan, dtype=torch.float64))
        #: Sums and precisions of the softmax layer's bias, ``[2, classes]``.
        self.register_buffer("top", torch.zeros(2, 0, dtype=torch.float64, device=device))
        self._layers = range(len(self._own) - 1)
        for i in self._layers:  # of each hidden layer, see Posterior
            for name in ("sums", "precisions", "uses"):
                empty = torch.zeros(0, 0, dtype=torch.float64, device=device)
                self.register_buffer(f"{name}_{i}", empty)
        names = (f"{name}_{i}" for i in self._layers for name in ("sums", "precisions", "uses"))
        self.grown = (*NeuronMatching.grown, "top", *names)

    def posterior(self, ids: Sequence[int]) -> NetworkPosterior:
        """Return what the steps so far have taught.

        Args:
            ids: Clients whose use of atoms is wanted.
        """
        if self.round == 0:
            return NetworkPosterior()
        layers = []
        for i in self._layers:
            sums, precisions, uses = (
                getattr(self, f"{name}_{i}").cpu() for name in ("sums", "precisions", "uses")
            )
            each = with_place(uses, torch.tensor(ids))[list(ids)]
            layers.append(Posterior(sums, precisions, each, int(self.round)))
        bias = self.top.cpu()
        return NetworkPosterior(layers, (bias[0], bias[1]))

    def _given(self, name: str) -> float | None:
        at = float(self.chosen[list(self.searched).index(name)])
        return super()._given(name) if math.isnan(at) else at

    def _counts(self, ids: Sequence[int]) -> Tensor | None:
        return None if self.class_counts is None else self.class_counts[list(ids)]

    def _matched(
        self, ids: Sequence[int], nets: Sequence[Layers], options: dict[str, Any]
    ) -> MatchedNetwork:
        past = self.posterior(ids)
        return match_networks(nets, self._counts(ids), **options, past=past)

    def _next(
        self,
        ids: Sequence[int],
        nets: Sequence[Layers],
        found: MatchedNetwork,
        options: dict[str, float],
    ) -> None:
        """Keep the posterior: all clients start from it."""
        self.known.fill_(False)
        self.chosen = self.chosen.new_tensor([options[name] for name in self.searched])
        assert found.posterior.bias is not None
        self.top = torch.stack(found.posterior.bias).to(self.top)
        for i, layer in enumerate(found.posterior.layers):
            before = getattr(self, f"uses_{i}")
            rows = with_place(before, torch.tensor(ids))
            uses = rows.new_zeros(len(rows), layer.uses.shape[1])
            uses[:, : rows.shape[1]] = rows
            uses[list(ids)] = layer.uses.to(uses)
            for name, value in (
                ("sums", layer.sums),
                ("precisions", layer.precisions),
                ("uses", uses),
            ):
                setattr(self, f"{name}_{i}", value.to(before))

    def _first(self, client: int) -> Layers:
        if self.round == 0:
            return super()._first(client)
        random = generator(run_seed(self.seed), Purpose.POSTERIOR, client, int(self.round))
        layers = [(w.cpu(), b.cpu()) for w, b in self.network()]
        chosen = []
        for i, width in enumerate(self._client_widths(client)):
            uses = with_place(getattr(self, f"uses_{i}").cpu(), torch.tensor([client]))
            weights = uses[client] + 1e-9
            count = min(max(width - self.fresh, 0), len(weights))
            drawn = torch.arange(0)
            if count:
                drawn = torch.multinomial(weights, count, generator=random)
            chosen.append(drawn)
        found = []
        narrow = self._narrow(self.module_chain.unpack(self.base.cpu(), self._own), client)
        for (piece, known), (like, bias) in zip(part_of(layers, chosen), narrow, strict=True):
            weight, shift = torch.zeros_like(like), torch.full_like(bias, self.bias_mean)
            weight[: piece.shape[0], : piece.shape[1]] = piece
            shift[: len(known)] = known
            found.append(
                tuple(
                    t + self.noise * torch.randn(t.shape, generator=random) for t in (weight, shift)
                )
            )
        return self._wide([(w, b) for w, b in found])
