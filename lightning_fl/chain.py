"""The linear layers of a module whose hidden neurons have no order of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fl.types import FederationError

Layers = list[tuple[Tensor, Tensor]]


class Chain:
    """A module that is linear layers, one after another, with the same function on each neuron.

    Layers can be given other widths: their parameters are the same objects, of other shapes.

    Args:
        module: What has no parameters but those of ``nn.Linear`` layers with biases.

    Raises:
        FederationError: If it has others, buffers, or layers that do not follow each other.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        >>> chain = Chain(net)
        >>> chain.write([(w.repeat(1, 1), b) for w, b in chain.read()])
        >>> chain.shapes
        [(3, 4), (2, 3)]
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        name = type(module).__name__
        found = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
        #: Layers by name, from input to output.
        self.layers: dict[str, nn.Linear] = found
        inside = {id(p) for layer in found.values() for p in layer.parameters()}
        kinds = (
            (type(m).__name__, t)
            for m in module.modules()
            for t in [*m._parameters.values(), *m._buffers.values()]
            if t is not None
        )
        for kind, tensor in kinds:
            if id(tensor) not in inside:
                raise FederationError(
                    f"{name} has a {kind}, whose neurons cannot be matched: use linear layers with"
                    " activations between them, and no terms with parameters of their own"
                )
        if len(found) < 2 or any(layer.bias is None for layer in found.values()):
            raise FederationError(
                f"{name} needs two linear layers or more, each with a bias, for its hidden neurons"
                " to be matched"
            )
        for (above, one), (below, other) in pairwise(found.items()):
            if one.out_features != other.in_features:
                raise FederationError(
                    f"{name}.{above} has {one.out_features} outputs and {below}, the next linear"
                    f" layer, {other.in_features} inputs: neurons can be matched where layers"
                    " follow each other"
                )

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of each layer, outputs and inputs."""
        return [(layer.out_features, layer.in_features) for layer in self.layers.values()]

    def read(self) -> Layers:
        """Return copies of weights and biases."""
        return [
            (layer.weight.detach().clone(), layer.bias.detach().clone())
            for layer in self.layers.values()
        ]

    @torch.no_grad()
    def write(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Set weights and biases, whatever their shapes."""
        for layer, (weight, bias) in zip(self.layers.values(), layers, strict=True):
            layer.out_features, layer.in_features = weight.shape
            for param, value in ((layer.weight, weight), (layer.bias, bias)):
                param.data = value.to(param, copy=True)
                param.grad = None

    @contextmanager
    def holding(self, layers: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Let the module have other weights for a while."""
        before = self.read()
        self.write(layers)
        try:
            yield
        finally:
            self.write(before)

    def fit_to(self, state_dict: Mapping[str, Any], prefix: str = "") -> None:
        """Take the shapes of a state dictionary, to be loaded."""
        keys = [(f"{prefix}{n}.weight", f"{prefix}{n}.bias") for n in self.layers]
        if all(key in state_dict for pair in keys for key in pair):
            self.write([(state_dict[weight], state_dict[bias]) for weight, bias in keys])

    def pack(self, layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return weights and biases, of whatever shapes, as a vector in the module's order."""
        tensors = dict(zip(self._names(), (t for pair in layers for t in pair), strict=True))
        return torch.cat([tensors[n].reshape(-1) for n, _ in self.module.named_parameters()])

    def unpack(self, vector: Tensor, shapes: Sequence[tuple[int, int]]) -> Layers:
        """Undo :meth:`pack`, for layers of these shapes."""
        sizes: dict[str, tuple[int, ...]] = {}
        for name, (out, into) in zip(self.layers, shapes, strict=True):
            sizes[f"{name}.weight"], sizes[f"{name}.bias"] = (out, into), (out,)
        order = [name for name, _ in self.module.named_parameters()]
        counts = [torch.Size(sizes[name]).numel() for name in order]
        found = dict(zip(order, vector.split(counts), strict=True))
        each = [found[name].view(sizes[name]) for name in self._names()]
        return list(zip(each[::2], each[1::2], strict=True))

    def _names(self) -> list[str]:
        return [f"{name}.{kind}" for name in self.layers for kind in ("weight", "bias")]

    def check_order(self, x: Tensor) -> bool:
        """Refuse a module whose output changes with the order of its hidden neurons.

        Args:
            x: A batch of inputs.

        Returns:
            Whether a neuron with weights of zero, which no gradient moves, adds nothing to the
            output: a function on neurons that maps 0 to 0.

        Raises:
            FederationError: If the order counts, as with residual connections.
        """
        layers, count = self.read(), len(self.layers)
        wide = [(torch.randn_like(w), torch.randn_like(b)) for w, b in layers]
        with torch.no_grad():
            with self.holding(wide):
                before = self.module(x)
            for i in range(count - 1):
                (w, b), (v, c) = wide[i : i + 2]
                moved = [*wide[:i], (w.flip(0), b.flip(0)), (v.flip(1), c), *wide[i + 2 :]]
                with self.holding(moved):
                    after = self.module(x)
                if not torch.allclose(before, after, rtol=1e-3, atol=1e-3 * float(before.std())):
                    raise FederationError(
                        f"{type(self.module).__name__} has hidden neurons whose order counts (a"
                        " connection past a layer, a function of several neurons at once): they"
                        " cannot be matched"
                    )
            quiet = [(torch.zeros_like(w), torch.zeros_like(b)) for w, b in layers[:-1]]
            with self.holding([*quiet, wide[-1]]):
                return torch.allclose(self.module(x), wide[-1][1].expand_as(before))
