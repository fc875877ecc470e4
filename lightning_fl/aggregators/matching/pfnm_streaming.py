"""Probabilistic federated neural matching of data streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_fl.aggregators.matching.client_networks import padded
from lightning_fl.aggregators.matching.layer_stack import Layers
from lightning_fl.aggregators.matching.neuron_matching import NeuronMatching
from lightning_fl.functional.networks import (
    MatchedNetwork,
    MatchingOptions,
    NetworkPosterior,
    match_networks,
    part_of,
)
from lightning_fl.functional.neuron_matching import Posterior
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.functional.tables import make_place, with_place
from lightning_fl.options import check_integer, check_number


class LayerPosterior(nn.Module):
    """Posterior of a hidden layer after the past steps of a stream, for all clients.

    Args:
        device: Device of the buffers.
    """

    sums: Tensor
    precisions: Tensor
    uses: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        for name in ("sums", "precisions", "uses"):
            empty = torch.zeros(0, 0, dtype=torch.float64, device=device)
            self.register_buffer(name, empty)

    def posterior(self, clients: Sequence[int], steps: int) -> Posterior:
        """Return the posterior for ``clients`` after ``steps`` steps."""
        uses = with_place(self.uses.cpu(), torch.tensor(clients))[list(clients)]
        return Posterior(self.sums.cpu(), self.precisions.cpu(), uses, steps)

    def learn(self, clients: Sequence[int], posterior: Posterior) -> None:
        """Store the ``posterior`` of a step with these ``clients``."""
        rows = with_place(self.uses, torch.tensor(clients))
        uses = rows.new_zeros(len(rows), posterior.uses.shape[1])
        uses[:, : rows.shape[1]] = rows
        uses[list(clients)] = posterior.uses.to(uses)
        self.sums, self.precisions = posterior.sums.to(uses), posterior.precisions.to(uses)
        self.uses = uses

    def drawn(self, client: int, count: int, random: torch.Generator) -> Tensor:
        """Draw ``count`` distinct atoms, in proportion to the client's steps with each atom."""
        weights = with_place(self.uses.cpu(), torch.tensor([client]))[client] + 1e-9
        if (count := min(max(count, 0), len(weights))) == 0:
            return torch.arange(0)
        return torch.multinomial(weights, count, generator=random)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Resize the buffers to the atoms and clients of the checkpoint."""
        make_place(self, list(self._buffers), state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class StreamingPFNM(NeuronMatching):
    r"""Neural matching of a stream (Yurochkin et al., 2018, section 3.3 and supplement 3).

    Each round is a step :math:`s` of a stream; set ``stream_steps`` of the data module. The
    posterior of a step is the prior of the next. Before step :math:`s + 1` client :math:`j` draws
    neurons of the global network in proportion to :math:`m_{ji}`, the number of steps in which it
    had neuron :math:`i`. It draws neurons with :math:`m_{ji} = 0` only if there are too few others.
    Then ``fresh`` neurons at the prior mean and noise are added.

    Options are searched in the first step, and kept for later steps.

    Args:
        fresh: Number of neurons per hidden layer that start each step at the prior mean. They can
            learn new features.
        noise: Standard deviation of the noise added to all initial weights of a client.
        options: The arguments of :class:`NeuronMatching`, such as ``gamma``.

    Raises:
        FederationError: If an option is out of range; see also :class:`NeuronMatching`.

    Example:
        >>> rule = StreamingPFNM(gamma=1.0, client_variance=1.0, prior_variance=10.0, fresh=5)
        >>> rule.fresh, rule.noise
        (5, 0.01)
    """

    grown = (*NeuronMatching.grown, "top")
    layer = None
    searches_once = True
    top: Tensor

    def __init__(
        self,
        gamma: float | None = None,
        client_variance: float | None = None,
        prior_variance: float | None = None,
        fresh: int = 0,
        noise: float = 0.01,
        **options: Any,
    ) -> None:
        super().__init__(
            gamma=gamma, client_variance=client_variance, prior_variance=prior_variance, **options
        )
        self.fresh = check_integer("fresh", fresh, min=0)
        self.noise = check_number("noise", noise, min=0)

    def allocate(self, server: Tensor) -> None:
        """Declare also the posterior of the stream."""
        super().allocate(server)
        hidden = 0 if self.chain is None else len(self.chain.layers) - 1
        self.layers = nn.ModuleList(LayerPosterior(server.device) for _ in range(hidden))
        #: Sums and precisions of the softmax layer's bias, ``[2, classes]``.
        empty = torch.zeros(2, 0, dtype=torch.float64, device=server.device)
        self.register_buffer("top", empty)

    def posterior(self, ids: Sequence[int]) -> NetworkPosterior:
        """Return the posterior after the steps so far.

        Args:
            ids: Client indices for the atom counts.
        """
        if self.round == 0:
            return NetworkPosterior()
        layers = [layer.posterior(ids, int(self.round)) for layer in self._each_layer()]
        bias = self.top.cpu()
        return NetworkPosterior(layers, (bias[0], bias[1]))

    def _each_layer(self) -> list[LayerPosterior]:
        return [cast("LayerPosterior", layer) for layer in self.layers]

    def _matched(
        self, ids: Sequence[int], nets: Sequence[Layers], options: MatchingOptions
    ) -> MatchedNetwork:
        counts = None if self.class_counts is None else self.class_counts[list(ids)]
        past = self.posterior(ids)
        return match_networks(nets, counts, options, generator=self._orders(), past=past)

    def _next(self, ids: Sequence[int], nets: Sequence[Layers], merged: MatchedNetwork) -> None:
        """Store the posterior, from which all clients start the next step."""
        self.known.fill_(False)
        assert merged.posterior.bias is not None
        self.top = torch.stack(merged.posterior.bias).to(self.top)
        for layer, posterior in zip(self._each_layer(), merged.posterior.layers, strict=True):
            layer.learn(ids, posterior)

    def _first(self, client: int) -> Layers:
        if self.round == 0:
            return super()._first(client)
        key = (self.seed_of(self.seed), RandomStream.POSTERIOR, client, int(self.round))
        random = generator(*key)
        chosen = [
            layer.drawn(client, width - self.fresh, random)
            for layer, width in zip(self._each_layer(), self._clients.widths(client), strict=True)
        ]
        known = part_of([(w.cpu(), b.cpu()) for w, b in self.network()], chosen)
        layers = padded(known, self._clients.shapes_of(client), bias=self.bias_mean)
        noisy = (
            t + self.noise * torch.randn(t.shape, generator=random)
            for w, b in layers
            for t in (w, b)
        )
        return list(zip(noisy, noisy, strict=True))
