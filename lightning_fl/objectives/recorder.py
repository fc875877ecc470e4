"""A network that tells what happens inside."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call

from lightning_fl.types import FederationError

POINTWISE_MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU),
    *(nn.SiLU, nn.Mish, nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Tanhshrink, nn.Softplus),
    *(nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
    nn.Threshold,
)
#: Names of functions of torch, of ``torch.nn.functional`` and of tensors, in place or not.
POINTWISE_NAMES = {
    *("relu", "relu6", "leaky_relu", "prelu", "rrelu", "elu", "selu", "celu", "gelu", "silu"),
    *("mish", "sigmoid", "expit", "special_expit", "logsigmoid", "log_sigmoid", "tanh"),
    *("tanhshrink", "softplus", "softsign", "softshrink", "hardshrink", "hardtanh", "hardswish"),
    *("hardsigmoid", "threshold"),
}
#: These are one where they cut at 0.
CLAMPS = {"clamp", "clamp_min", "clip"}
WEIGHTED_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
WEIGHTED_FUNCTIONS = {F.linear, F.conv1d, F.conv2d, F.conv3d}
#: Poolings by the module, and by the name of the function, with the options that they take.
POOLS: dict[Any, tuple[Callable[..., Any], tuple[str, ...]]] = {}
for _n in (1, 2, 3):
    _options = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    POOLS[f"max_pool{_n}d"] = POOLS[getattr(nn, f"MaxPool{_n}d")] = (
        getattr(F, f"max_pool{_n}d"),
        _options,
    )
    POOLS[f"adaptive_max_pool{_n}d"] = POOLS[getattr(nn, f"AdaptiveMaxPool{_n}d")] = (
        getattr(F, f"adaptive_max_pool{_n}d"),
        ("output_size",),
    )
#: What returns the memory that it was given, or part of it: writing to it writes to that.
VIEWS = {
    *("view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose"),
    *("permute", "movedim", "swapaxes", "expand", "expand_as", "narrow", "select", "chunk"),
    *("split", "unbind", "getitem", "contiguous", "detach", "t", "float", "to", "type_as"),
}
VIEW_MODULES = (nn.Flatten, nn.Unflatten, nn.Identity, nn.modules.dropout._DropoutNd)


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
    output = next(node for node in graph.nodes if node.op == "output")
    top = output.args[0]
    if not isinstance(top, fx.Node):
        raise FederationError(
            "representation matching needs a network with one output, a tensor: this one returns"
            f" {type(top).__name__}"
        )
    found: list[tuple[fx.Node, Callable[[Tensor], Tensor] | None]] = []
    for node in graph.nodes:
        module = _module(node, modules)
        nonlinearity = _nonlinearity(node, module)
        if node.op == "placeholder":
            found.append((node, None))
        elif nonlinearity is not None if named is None else str(node.target) in named:
            found.append((node, nonlinearity))
    if missing := sorted((named or set()) - {str(node.target) for node, _ in found}):
        raise FederationError(
            f"points names {missing[0]!r}, which is no point: forward does not call it, or it lies"
            " inside another one that is taken as it is"
        )
    if found[-1][0] is not top:
        found.append((top, None))
    crossed: list[list[tuple[fx.Node, bool]]] = [[]]
    crossed += [_poolings(a, b, modules) for (a, _), (b, _) in pairwise(found)]
    pools = {node for each in crossed for node, _ in each}
    switches = {node: _with_switches(graph, node, _module(node, modules)) for node in pools}
    replaced = {node: value for node, (value, *_) in switches.items()}
    nodes = _kept(graph, [replaced.get(node, node) for node, _ in found], modules)
    inside = [[switches[node][1:] for node, _ in each] for each in crossed]
    output.args = ((output.args[0], nodes, inside),)
    return [
        Point(nonlinearity, tuple(first for _, first in each))
        for (_, nonlinearity), each in zip(found, crossed, strict=True)
    ]


def _module(node: fx.Node, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    return modules.get(str(node.target)) if node.op == "call_module" else None


def _name(node: fx.Node) -> str:
    """The name of a function or a method, without what says that it is private or in place."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.strip("_")


def _nonlinearity(node: fx.Node, module: nn.Module | None) -> Callable[[Tensor], Tensor] | None:
    if module is not None:
        return module if isinstance(module, POINTWISE_MODULES) else None
    if node.op not in ("call_function", "call_method"):
        return None
    arguments = node.args[1:]
    options = {k: v for k, v in node.kwargs.items() if k not in ("input", "inplace")}
    if _name(node) in CLAMPS:
        lowest = options.get("min", arguments[0] if arguments else None)
        if not isinstance(lowest, int | float) or lowest != 0:
            return None
    elif _name(node) not in POINTWISE_NAMES:
        return None
    if len(node.all_input_nodes) > 1:
        raise FederationError(
            f"representation matching cannot repeat {_name(node)}, whose options are computed or"
            " learnt: make it a module (nn.PReLU), or name points=[...] without it"
        )
    name, target = _name(node), node.target
    if isinstance(target, str):
        return lambda x: getattr(x, name)(*arguments, **options)
    function = cast("Callable[..., Tensor]", target)
    if getattr(target, "__name__", "").endswith("_"):  # not in place: the guess is needed
        function = getattr(torch, name, None) or getattr(F, name)
    return lambda x: function(x, *arguments, **options)


# --- poolings between two points ------------------------------------------------------------------


def _pool(
    node: fx.Node, module: nn.Module | None
) -> tuple[Callable[..., Any], tuple[str, ...]] | None:
    if module is not None:
        return POOLS.get(type(module))
    if node.op != "call_function":
        return None
    return POOLS.get(_name(node).removesuffix("_with_indices"))


def _poolings(
    low: fx.Node, high: fx.Node, modules: Mapping[str, nn.Module]
) -> list[tuple[fx.Node, bool]]:
    """Return the poolings that all goes through from one point to another, from below.

    With each, whether it follows a layer with weights. One that a branch goes around cannot be
    reversed: nothing says which of the sum or concatenation came from where.
    """
    between = _above(low) & _below(high) if low is not high else set()
    found, weighted = [], False
    for node in low.graph.nodes:
        if node not in between and node is not high:
            continue
        module = _module(node, modules)
        if _pool(node, module) and high not in _above(low, without=node):
            found.append((node, weighted))
        weighted = weighted or isinstance(module, WEIGHTED_MODULES)
        weighted = weighted or node.target in WEIGHTED_FUNCTIONS
    return found


def _above(node: fx.Node, without: fx.Node | None = None) -> set[fx.Node]:
    """All that is computed from a node, without going through another one."""
    found, waiting = set[fx.Node](), [node]
    while waiting:
        for user in waiting.pop().users:
            if user not in found and user is not without:
                found.add(user)
                waiting.append(user)
    return found


def _below(node: fx.Node) -> set[fx.Node]:
    """All that a node is computed from."""
    found, waiting = set[fx.Node](), [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found


def _with_switches(
    graph: fx.Graph, node: fx.Node, module: nn.Module | None
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Make a pooling return its switches; return the nodes of its result, of them and its input."""
    known = _pool(node, module)
    assert known is not None
    pool, names = known
    if module is not None:
        options = {name: getattr(module, name) for name in names}
    else:
        options = dict(zip(names, node.args[1:], strict=False))
        options |= {k: v for k, v in node.kwargs.items() if k in names}
    inside = cast("fx.Node", node.args[0] if node.args else node.kwargs["input"])
    with graph.inserting_after(node):
        both = graph.call_function(pool, (inside,), {**options, "return_indices": True})
    with graph.inserting_after(both):
        index = graph.call_function(operator.getitem, (both, 1))
        value = graph.call_function(operator.getitem, (both, 0))
    gives_both = getattr(module, "return_indices", False) or "with_indices" in _name(node)
    node.replace_all_uses_with(both if gives_both else value)
    graph.erase_node(node)
    return value, index, inside


# --- operations in place --------------------------------------------------------------------------


def _kept(graph: fx.Graph, nodes: list[fx.Node], modules: Mapping[str, nn.Module]) -> list[fx.Node]:
    """Copy what an operation in place would write over: activations, and the batch itself."""
    written = {
        source
        for node in graph.nodes
        if _is_in_place(node, modules)
        for source in _memory(node.all_input_nodes[0], modules)
    }
    kept = []
    for node in nodes:
        if node not in written:
            kept.append(node)
            continue
        users = list(node.users)
        with graph.inserting_after(node):
            copy = graph.call_method("clone", (node,))
        if node.op == "placeholder":  # the network gets the copy: the batch is used again
            for user in users:
                user.replace_input_with(node, copy)
        kept.append(node if node.op == "placeholder" else copy)
    return kept


def _is_in_place(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    if (module := _module(node, modules)) is not None:
        return bool(getattr(module, "inplace", False))
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    is_call = node.op in ("call_function", "call_method")
    in_place = name.endswith("_") and not name.endswith("__")
    is_operator = getattr(target, "__module__", "") == "_operator" and name.startswith("i")
    is_operator = is_operator and hasattr(operator, f"__{name}__") and name not in ("inv", "invert")
    return is_call and (in_place or is_operator or bool(node.kwargs.get("inplace")))


def _memory(node: fx.Node, modules: Mapping[str, nn.Module]) -> Iterator[fx.Node]:
    """A node, and those whose memory it may share."""
    yield node
    module = _module(node, modules)
    is_view = isinstance(module, VIEW_MODULES) or (module is None and _name(node) in VIEWS)
    if (is_view or _is_in_place(node, modules)) and node.all_input_nodes:
        yield from _memory(node.all_input_nodes[0], modules)
