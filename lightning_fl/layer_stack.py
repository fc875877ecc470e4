"""The layers of a module whose hidden neurons have no order of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fl.types import FederationError

Layers = list[tuple[Tensor, Tensor]]


class LayerStack:
    """A module that is convolutions and linear layers, with the same function on each neuron.

    Neurons are the filters of convolutions and the units of linear layers. Weights are read as
    ``[out, in, ...]``: those of a convolution have its kernel behind, those of a linear layer after
    a convolution the pixels of a map. Layers can be given other widths: their parameters are the
    same objects, of other shapes.

    Args:
        module: What has no parameters but those of ``nn.Linear`` and ``nn.Conv2d`` layers, with
            biases, convolutions first.

    Raises:
        FederationError: If it has others, buffers, or layers that do not follow each other.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
        >>> chain = LayerStack(net)
        >>> chain.shapes, [tuple(weight.shape) for weight, _ in chain.read()]
        ([(4, 1), (2, 4)], [(4, 1, 3, 3), (2, 4, 9)])
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        name = type(module).__name__
        found = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
        #: Layers by name, from input to output.
        self.layers: dict[str, nn.Linear | nn.Conv2d] = found
        # By name: on its way to a device a module may get new parameters.
        self._trained = {name for name, p in module.named_parameters() if p.requires_grad}
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
                    f"{name} has a {kind}, whose neurons cannot be matched: use convolutions and"
                    " linear layers with activations between them, and no terms with parameters of"
                    " their own"
                )
        if len(found) < 2 or any(layer.bias is None for layer in found.values()):
            raise FederationError(
                f"{name} needs two layers or more, each with a bias, for its hidden neurons to be"
                " matched"
            )
        if isinstance(last := [*found.values()][-1], nn.Conv2d):
            raise FederationError(
                f"{name} ends with a {type(last).__name__}: neurons can be matched where a linear"
                " layer is the last"
            )
        #: Behind ``[out, in]``: the kernel of a convolution, pixels of a linear layer after one.
        self._kernels = [_kernel(layer) for layer in found.values()]
        for i, ((above, one), (below, other)) in enumerate(pairwise(found.items())):
            if isinstance(other, nn.Conv2d) and other.groups > 1:
                raise FederationError(
                    f"{name}.{below} is a convolution in {other.groups} groups, whose filters see"
                    " some of those before only: they cannot be matched"
                )
            outs, ins = _ends(one)[0], _ends(other)[1]
            is_flattened = isinstance(one, nn.Conv2d) and isinstance(other, nn.Linear)
            if is_flattened and ins % outs == 0:
                self._kernels[i + 1] = (ins // outs,)
            elif ins != outs or (isinstance(one, nn.Linear) and isinstance(other, nn.Conv2d)):
                raise FederationError(
                    f"{name}.{above} has {outs} outputs and {below}, the next layer, {ins} inputs:"
                    " neurons can be matched where layers follow each other, convolutions first"
                )

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of each layer, neurons and neurons before."""
        found = [_ends(layer) for layer in self.layers.values()]
        outs = [found[0][1], *(out for out, _ in found)]
        return [(out, into) for into, out in pairwise(outs)]

    def read(self) -> Layers:
        """Return copies of weights and biases."""
        each = zip(self._tensors(), self.shapes, self._kernels, strict=True)
        return [
            (weight.detach().reshape(*shape, *kernel).clone(), bias.detach().clone())
            for (weight, bias), shape, kernel in each
        ]

    def _tensors(self) -> Iterator[tuple[Tensor, Tensor]]:
        for layer in self.layers.values():
            assert layer.bias is not None  # it was checked
            yield layer.weight, layer.bias

    @torch.no_grad()
    def write(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Set weights and biases, whatever their shapes."""
        own = zip(self.layers.values(), self._tensors(), layers, strict=True)
        for layer, params, (weight, bias) in own:
            if isinstance(layer, nn.Linear):
                weight = weight.flatten(1)
                layer.out_features, layer.in_features = weight.shape
            else:
                layer.out_channels, layer.in_channels = weight.shape[:2]
            for param, value in zip(params, (weight, bias), strict=True):
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
        """Undo :meth:`pack`, for layers of these :attr:`shapes`."""
        sizes: dict[str, tuple[int, ...]] = {}
        for name, (out, into), kernel in zip(self.layers, shapes, self._kernels, strict=True):
            sizes[f"{name}.weight"], sizes[f"{name}.bias"] = (out, into, *kernel), (out,)
        order = [name for name, _ in self.module.named_parameters()]
        counts = [torch.Size(sizes[name]).numel() for name in order]
        found = dict(zip(order, vector.split(counts), strict=True))
        each = [found[name].view(sizes[name]) for name in self._names()]
        return list(zip(each[::2], each[1::2], strict=True))

    def drawn(self) -> Layers:
        """Return weights and biases as the layers draw them."""
        before = self.read()
        for layer in self.layers.values():
            layer.reset_parameters()
        found = self.read()
        self.write(before)
        return found

    def freeze(self, count: int) -> None:
        """Keep the lowest layers from being trained, the others as they came."""
        for i, (prefix, layer) in enumerate(self.layers.items()):
            for name, param in layer.named_parameters(prefix=prefix):
                param.requires_grad_(i >= count and name in self._trained)

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
        x = x.to(layers[0][0].dtype) if x.is_floating_point() else x
        wide = [(torch.randn_like(w), torch.randn_like(b)) for w, b in layers]
        with torch.no_grad():
            with self.holding(wide):
                before = self.module(x)
            for i in range(count - 1):
                (w, b), (v, c) = wide[i : i + 2]
                # Not merely turned round: what looks at neighbors would not see that.
                order = torch.cat([torch.arange(1, len(b), 2), torch.arange(0, len(b), 2)])
                moved = [*wide[:i], (w[order], b[order]), (v[:, order], c), *wide[i + 2 :]]
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


def _ends(layer: nn.Linear | nn.Conv2d) -> tuple[int, int]:
    """Return how many outputs and inputs a layer has."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    return layer.out_channels, layer.in_channels


def _kernel(layer: nn.Linear | nn.Conv2d) -> tuple[int, ...]:
    """Return what is behind ``[out, in]`` in a layer's own weight."""
    return tuple(layer.kernel_size) if isinstance(layer, nn.Conv2d) else ()
