"""A network that tells what happens inside."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call

from lightning_fl.types import FederationError

POINTWISE_MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
)
POINTWISE_FUNCTIONS = {
    *(F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.sigmoid),
    *(F.tanh, F.softplus, F.hardtanh, F.hardswish, F.hardsigmoid),
    *(torch.relu, torch.relu_, torch.sigmoid, torch.tanh),
}
POINTWISE_METHODS = {"relu", "relu_", "sigmoid", "tanh"}
WEIGHTED_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
WEIGHTED_FUNCTIONS = {F.linear, F.conv1d, F.conv2d, F.conv3d}
POOLS: dict[Any, Callable[..., Any]] = {
    nn.MaxPool1d: F.max_pool1d,
    nn.MaxPool2d: F.max_pool2d,
    nn.MaxPool3d: F.max_pool3d,
}
POOL_OPTIONS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")


class Point(NamedTuple):
    """A place in a network.

    Args:
        nonlinearity: What made the activation there; None for the input and the top layer.
        unpool_first: For each pooling since the last point, whether it followed a layer with
            weights.
    """

    nonlinearity: Callable[[Tensor], Tensor] | None
    unpool_first: tuple[bool, ...]


class Trace(NamedTuple):
    """What a network did with a batch.

    Args:
        activations: At the points, from the input up.
        switches: For each point, the poolings since the last one: where their winners were, and
            the sizes of their inputs.
    """

    activations: list[Tensor]
    switches: list[list[tuple[Tensor, torch.Size]]]


class _Tracer(fx.Tracer):
    """Takes the modules that the user named as they are."""

    def __init__(self, leaves: Sequence[str]) -> None:
        super().__init__()
        self.leaves = set(leaves)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Say whether not to look inside."""
        return module_qualified_name in self.leaves or super().is_leaf_module(
            m, module_qualified_name
        )


class _Recorded(nn.Module):
    """A network with another forward; parameters and buffers are the network's."""

    def __init__(self, net: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self._forward = net, forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self.net, x)


class Recorder:
    """Runs a network and notes activations at its points and switches of max pooling.

    Points are the input, the output of every point-wise non-linearity, and the output; or the
    input, named modules and the output. The network is traced by ``torch.fx``; what runs uses its
    own modules and parameters, without hooks.

    Args:
        net: The network, from one tensor to one tensor.
        points: Names of modules whose outputs are points; None finds the non-linearities.

    Raises:
        FederationError: If the network cannot be traced, or a named module is not in it.
    """

    def __init__(self, net: nn.Module, points: Sequence[str] | None = None) -> None:
        modules = dict(net.named_modules())
        for name in points or ():
            if name not in modules:
                raise FederationError(f"points names {name!r}, the network has {list(modules)[1:]}")
        try:
            graph = _Tracer(points or ()).trace(net)
        except Exception as error:  # whatever the user's forward raises on a proxy
            raise FederationError(
                f"{type(net).__name__} cannot be traced for representation matching"
                f" ({type(error).__name__}: {error}): its forward must not depend on values. Name"
                " modules that are to be taken as they are: points=[...]"
            ) from error
        self.points = _mark(graph, modules, None if points is None else set(points))
        self._run = _Recorded(net, type(fx.GraphModule(net, graph)).forward)

    def __call__(self, x: Tensor) -> tuple[Tensor, Trace]:
        """Run the network as it is."""
        return self._traced(self._run(x))

    @torch.no_grad()
    def fixed(self, params: Mapping[str, Tensor], x: Tensor) -> Trace:
        """Run the network with other parameters, and leave its buffers alone.

        Args:
            params: By name, ``net.`` in front.
            x: Samples.
        """
        buffers = {name: b.detach().clone() for name, b in self._run.named_buffers()}
        return self._traced(functional_call(self._run, {**params, **buffers}, (x,)))[1]

    def _traced(self, out: Any) -> tuple[Tensor, Trace]:
        outputs, activations, crossed = out
        sizes = [[(index, inside.shape[2:]) for index, inside in pools] for pools in crossed]
        return cast("Tensor", outputs), Trace(list(activations), sizes)


def _mark(graph: fx.Graph, modules: Mapping[str, nn.Module], named: set[str] | None) -> list[Point]:
    """Make a graph return (output, activations, poolings before each), and describe its points."""
    source = next(node for node in graph.nodes if node.op == "placeholder")
    output = next(node for node in graph.nodes if node.op == "output")
    nodes: list[Any] = [source]
    crossed: list[Any] = [[]]
    points = [Point(None, ())]
    pending: list[tuple[fx.Node, Any, bool]] = []
    weighted = False

    def close(node: Any, nonlinearity: Callable[[Tensor], Tensor] | None) -> None:
        nonlocal pending, weighted
        nodes.append(node)
        crossed.append([(index, inside) for index, inside, _ in pending])
        points.append(Point(nonlinearity, tuple(first for *_, first in pending)))
        pending, weighted = [], False

    for node in list(graph.nodes):
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if type(module) in POOLS or node.target in POOLS.values():
            pending.append((*_with_switches(graph, node, module), weighted))
            continue
        if isinstance(module, WEIGHTED_MODULES) or node.target in WEIGHTED_FUNCTIONS:
            weighted = True
        nonlinearity = _nonlinearity(node, module)
        if nonlinearity is not None if named is None else str(node.target) in named:
            close(node, nonlinearity)
    if nodes[-1] is not output.args[0]:
        close(output.args[0], None)
    output.args = ((output.args[0], nodes, crossed),)
    return points


def _nonlinearity(node: fx.Node, module: nn.Module | None) -> Callable[[Tensor], Tensor] | None:
    if isinstance(module, POINTWISE_MODULES):
        return module
    options = {k: v for k, v in node.kwargs.items() if k not in ("input", "inplace")}
    if node.op == "call_function" and node.target in POINTWISE_FUNCTIONS:
        function = cast("Callable[..., Tensor]", node.target)
        return lambda x: function(x, *node.args[1:], **options)
    if node.op == "call_method" and node.target in POINTWISE_METHODS:
        return cast("Callable[[Tensor], Tensor]", getattr(torch, str(node.target).rstrip("_")))
    return None


def _with_switches(graph: fx.Graph, node: fx.Node, module: nn.Module | None) -> tuple[fx.Node, Any]:
    """Make a pooling return its switches; return their node and that of its input."""
    if module is not None:
        pool = POOLS[type(module)]
        options = {name: getattr(module, name) for name in POOL_OPTIONS}
    else:
        pool = cast("Callable[..., Any]", node.target)
        options = dict(zip(POOL_OPTIONS, node.args[1:], strict=False))
        options |= {k: v for k, v in node.kwargs.items() if k in POOL_OPTIONS}
    inside = node.args[0] if node.args else node.kwargs["input"]
    with graph.inserting_after(node):
        both = graph.call_function(pool, (inside,), {**options, "return_indices": True})
    with graph.inserting_after(both):
        index = graph.call_function(operator.getitem, (both, 1))
        value = graph.call_function(operator.getitem, (both, 0))
    node.replace_all_uses_with(value)
    graph.erase_node(node)
    return index, inside
