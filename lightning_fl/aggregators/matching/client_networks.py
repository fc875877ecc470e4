"""Client networks, which may be narrower than the module, and their initialization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fl.aggregators.matching.layer_stack import Layers, LayerStack
from lightning_fl.errors import FederationError
from lightning_fl.functional.randomness import RandomStream, derive_seed, generator, seeded_rng

if TYPE_CHECKING:
    from lightning_fl.aggregators.matching.neuron_matching import NeuronMatching

Shapes = list[tuple[int, int]]


class ClientNetworks:
    """Convert between client networks and parameter vectors of the module.

    The vector of a client that is narrower than the module is padded with neurons of weight zero.

    Args:
        chain: Layers of the module, with the shapes that clients train.
        rule: The rule, whose options the networks have.
    """

    def __init__(self, chain: LayerStack, rule: NeuronMatching) -> None:
        self.chain, self.rule = chain, rule
        #: Shapes of the module's layers, and its initial network.
        self.shapes, self.initial = chain.shapes, chain.read()

    def widths(self, client: int) -> list[int]:
        """Return the hidden widths of a client."""
        if (widths := self.rule.widths) is None:
            return [width for width, _ in self.shapes[:-1]]
        return [widths[client % len(widths)]] * (len(self.shapes) - 1)

    def shapes_of(self, client: int) -> Shapes:
        """Return the shapes of a client's layers."""
        widths = self.widths(client)
        outs, ins = [*widths, self.shapes[-1][0]], [self.shapes[0][1], *widths]
        return list(zip(outs, ins, strict=True))

    def network(self, vector: Tensor, client: int) -> Layers:
        """Return the network of a client from its vector."""
        return self._narrowed(self.chain.unpack(vector, self.shapes), client)

    def vector(self, layers: Layers) -> Tensor:
        """Return the vector of a client's network."""
        return self.chain.pack(padded(layers, self.shapes))

    def first(self, client: int, server: Tensor) -> Layers:
        """Return the initial network of a client.

        Args:
            client: Client index.
            server: Parameter vector of the module.
        """
        key = (self.rule.seed_of(self.rule.seed), RandomStream.NEURONS, client)
        if (std := self.rule.std) is None:
            with seeded_rng(derive_seed(*key)):
                return self._narrowed(self.chain.drawn(), client)
        random, mean = generator(*key), self.rule.bias_mean
        layers = [
            (std * torch.randn(w.shape, generator=random), torch.full(b.shape, mean))
            for w, b in self.chain.unpack(server, self.shapes)
        ]
        return self._narrowed(layers, client)

    def check(self, example: Any) -> None:
        """Raise an error if the module cannot be matched, or if widths do not fit it.

        Args:
            example: Batch ``(x, ...)`` of training samples.
        """
        rule = type(self.rule).__name__
        if not (isinstance(example, list | tuple) and isinstance(example[0], Tensor)):
            raise FederationError(
                f"{rule} requires batches (x, ...) with a tensor x, got a batch of type"
                f" {type(example).__name__}: return such tuples from the dataset"
            )
        try:
            is_inert = self.chain.check_order(example[0])
        except NotImplementedError as error:
            raise FederationError(
                f"{rule} requires forward(x), and {type(self.chain.module).__name__} has none:"
                " implement it"
            ) from error
        narrow = min(width for width, _ in self.shapes[:-1])
        if (widths := self.rule.widths) is not None and max(widths) > narrow:
            raise FederationError(
                f"widths has {max(widths)} neurons, the module's network {narrow}: use a module as"
                " wide as the widest client"
            )
        if widths is not None and not is_inert:
            raise FederationError(
                "widths requires an activation that maps 0 to 0, and the module's does not: use"
                " ReLU or tanh, or remove widths"
            )

    def _narrowed(self, layers: Layers, client: int) -> Layers:
        each = zip(layers, self.shapes_of(client), strict=True)
        return [(weight[:out, :into], bias[:out]) for (weight, bias), (out, into) in each]


def padded(layers: Layers, shapes: Shapes, bias: float = 0.0) -> Layers:
    """Add neurons of weight zero to a network.

    Args:
        layers: Layers of the network.
        shapes: Target shapes of the layers.
        bias: Bias of the added neurons.

    Example:
        >>> padded([(torch.ones(1, 1), torch.ones(1))], [(2, 1)], bias=0.5)
        [(tensor([[1.],
                [0.]]), tensor([1.0000, 0.5000]))]
    """
    wide = []
    for (weight, own), shape in zip(layers, shapes, strict=True):
        wide.append((weight.new_zeros(*shape, *weight.shape[2:]), own.new_full(shape[:1], bias)))
        wide[-1][0][: weight.shape[0], : weight.shape[1]] = weight
        wide[-1][1][: len(own)] = own
    return wide
