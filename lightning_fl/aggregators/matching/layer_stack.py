"""Read and write the layers of a module with permutable hidden neurons."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fl.errors import FederationError

Layers = list[tuple[Tensor, Tensor]]


class LayerStack:
    """View a module as a stack of convolutions and linear layers with elementwise activations.

    Neurons are the filters of convolutions and the units of linear layers. Weights have the shape
    ``[out, in, ...]``. The last axes are the kernel of a convolution, or the pixels of a channel
    for a linear layer after a convolution. Layers can be resized: their parameters remain the same
    objects with other shapes.

    Args:
        module: Module with no parameters except those of ``nn.Conv2d`` and ``nn.Linear`` layers,
            all with biases, convolutions first.

    Raises:
        FederationError: If the module has other parameters, buffers, or layers with sizes that do
            not match.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
        >>> stack = LayerStack(net)
        >>> stack.shapes, [tuple(weight.shape) for weight, _ in stack.read()]
        ([(4, 1), (2, 4)], [(4, 1, 3, 3), (2, 4, 9)])
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        #: Layers by name, from input to output.
        self.layers: dict[str, nn.Linear | nn.Conv2d] = {
            n: m for n, m in module.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)
        }
        # By name, because a transfer to another device may replace the parameters.
        self._trained = {name for name, p in module.named_parameters() if p.requires_grad}
        self._check_layers()
        #: Axes after ``[out, in]``: kernel of a convolution, or pixels of a channel.
        self._kernels = self._checked_kernels()

    def _check_layers(self) -> None:
        """Raise an error if the module has other tensors, or layers of another kind."""
        name = type(self.module).__name__
        inside = {id(p) for layer in self.layers.values() for p in layer.parameters()}
        for part in self.module.modules():
            for tensor in [*part._parameters.values(), *part._buffers.values()]:
                if tensor is not None and id(tensor) not in inside:
                    raise FederationError(
                        f"{name} has a {type(part).__name__}, which neural matching does not"
                        " support: use only Conv2d and Linear layers with activations between them,"
                        " and no terms with parameters"
                    )
        layers = [*self.layers.values()]
        are_plain = all(layer.bias is not None and _groups(layer) == 1 for layer in layers)
        if len(layers) < 2 or not are_plain or isinstance(layers[-1], nn.Conv2d):
            raise FederationError(
                f"{name} must have two or more layers with biases and without groups, the last of"
                " them Linear, for neural matching"
            )

    def _checked_kernels(self) -> list[tuple[int, ...]]:
        """Return the axes after ``[out, in]``; raise an error if a layer does not feed the next."""
        kernels = [
            tuple(layer.kernel_size) if isinstance(layer, nn.Conv2d) else ()
            for layer in self.layers.values()
        ]
        for i, ((above, one), (below, other)) in enumerate(pairwise(self.layers.items()), 1):
            outs, ins = _ends(one)[0], _ends(other)[1]
            is_flattened = isinstance(one, nn.Conv2d) and isinstance(other, nn.Linear)
            if is_flattened and ins % outs == 0:
                kernels[i] = (ins // outs,)
            elif ins != outs or (isinstance(one, nn.Linear) and isinstance(other, nn.Conv2d)):
                raise FederationError(
                    f"{type(self.module).__name__}.{above} has {outs} outputs, but the next layer,"
                    f" {below}, has {ins} inputs: for neural matching each layer must feed the"
                    " next, convolutions first"
                )
        return kernels

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Number of neurons of each layer, and of the layer before."""
        ends = [_ends(layer) for layer in self.layers.values()]
        outs = [ends[0][1], *(out for out, _ in ends)]
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
            assert layer.bias is not None  # checked in __init__
            yield layer.weight, layer.bias

    @torch.no_grad()
    def write(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Set weights and biases of any shapes."""
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
        """Set weights and biases temporarily."""
        before = self.read()
        self.write(layers)
        try:
            yield
        finally:
            self.write(before)

    def fit_to(self, state_dict: Mapping[str, Any], prefix: str = "") -> None:
        """Resize the layers to the shapes of a state dictionary before it is loaded."""
        keys = [(f"{prefix}{n}.weight", f"{prefix}{n}.bias") for n in self.layers]
        if all(key in state_dict for pair in keys for key in pair):
            self.write([(state_dict[weight], state_dict[bias]) for weight, bias in keys])

    def pack(self, layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return weights and biases of any shapes as a vector, in the module's order."""
        tensors = dict(zip(self._names(), (t for pair in layers for t in pair), strict=True))
        return torch.cat([tensors[n].reshape(-1) for n, _ in self.module.named_parameters()])

    def unpack(self, vector: Tensor, shapes: Sequence[tuple[int, int]]) -> Layers:
        """Reverse :meth:`pack` for layers with these :attr:`shapes`."""
        sizes: dict[str, tuple[int, ...]] = {}
        for name, (out, into), kernel in zip(self.layers, shapes, self._kernels, strict=True):
            sizes[f"{name}.weight"], sizes[f"{name}.bias"] = (out, into, *kernel), (out,)
        order = [name for name, _ in self.module.named_parameters()]
        counts = [torch.Size(sizes[name]).numel() for name in order]
        tensors = dict(zip(order, vector.split(counts), strict=True))
        each = [tensors[name].view(sizes[name]) for name in self._names()]
        return list(zip(each[::2], each[1::2], strict=True))

    def drawn(self) -> Layers:
        """Return newly initialized weights and biases; the module is unchanged.

        They are drawn on the CPU, so that they do not depend on the device.
        """
        layers = []
        for layer, (weight, _) in zip(self.layers.values(), self.read(), strict=True):
            params = {
                name: nn.Parameter(torch.empty_like(param, device="cpu"))
                for name, param in layer.named_parameters()
            }
            new = copy.copy(layer)
            vars(new)["_parameters"] = params
            new.reset_parameters()
            drawn = [params[name].detach().to(weight) for name in ("weight", "bias")]
            layers.append((drawn[0].view_as(weight), drawn[1]))
        return layers

    def freeze(self, count: int) -> None:
        """Freeze the first ``count`` layers and restore ``requires_grad`` of the others."""
        for i, (prefix, layer) in enumerate(self.layers.items()):
            for name, param in layer.named_parameters(prefix=prefix):
                param.requires_grad_(i >= count and name in self._trained)

    def _names(self) -> list[str]:
        return [f"{name}.{kind}" for name in self.layers for kind in ("weight", "bias")]

    def check_order(self, x: Tensor) -> bool:
        """Check that the output does not depend on the order of the hidden neurons.

        Args:
            x: Batch of inputs.

        Returns:
            Whether neurons with zero weights add nothing to the output, that is, whether the
            activations map 0 to 0. Such neurons receive no gradient.

        Raises:
            FederationError: If the order matters, as with residual connections.
        """
        layers, count = self.read(), len(self.layers)
        x = x.to(layers[0][0].dtype) if x.is_floating_point() else x
        wide = [(torch.randn_like(w), torch.randn_like(b)) for w, b in layers]
        with torch.no_grad():
            with self.holding(wide):
                before = self.module(x)
            for i in range(count - 1):
                (w, b), (v, c) = wide[i : i + 2]
                # Not a reversal, which functions of neighboring neurons may not detect.
                order = torch.cat([torch.arange(1, len(b), 2), torch.arange(0, len(b), 2)])
                moved = [*wide[:i], (w[order], b[order]), (v[:, order], c), *wide[i + 2 :]]
                with self.holding(moved):
                    after = self.module(x)
                if not torch.allclose(before, after, rtol=1e-3, atol=1e-3 * float(before.std())):
                    raise FederationError(
                        f"the output of {type(self.module).__name__} depends on the order of its"
                        " hidden neurons, as with skip connections or functions of several"
                        " neurons: neural matching does not support this"
                    )
            quiet = [(torch.zeros_like(w), torch.zeros_like(b)) for w, b in layers[:-1]]
            with self.holding([*quiet, wide[-1]]):
                return torch.allclose(self.module(x), wide[-1][1].expand_as(before))


def _groups(layer: nn.Module) -> int:
    return layer.groups if isinstance(layer, nn.Conv2d) else 1


def _ends(layer: nn.Linear | nn.Conv2d) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a layer."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    return layer.out_channels, layer.in_channels
