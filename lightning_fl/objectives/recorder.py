"""Record activations and max pooling indices of a network."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call

from lightning_fl.errors import FederationError

#: Names of point-wise non-linearities among the functions of torch, of ``torch.nn.functional`` and
#: of tensors, in place or not. Modules have the same names without underscores.
POINTWISE = {
    *("relu", "relu6", "leaky_relu", "prelu", "rrelu", "elu", "selu", "celu", "gelu", "silu"),
    *("mish", "sigmoid", "expit", "special_expit", "logsigmoid", "log_sigmoid", "tanh"),
    *("tanhshrink", "softplus", "softsign", "softshrink", "hardshrink", "hardtanh", "hardswish"),
    *("hardsigmoid", "threshold"),
}
_MODULE_NAMES = {name.replace("_", "") for name in POINTWISE}
POINTWISE_MODULES = tuple(c for name, c in vars(nn).items() if name.lower() in _MODULE_NAMES)
#: Functions that are point-wise non-linearities if their lower bound is 0.
CLAMPS = {"clamp", "clamp_min", "clip"}
WEIGHTED_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
WEIGHTED_FUNCTIONS = {F.linear, F.conv1d, F.conv2d, F.conv3d}
_WINDOW = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
#: Max poolings by module and by function name: the function, and its options.
POOLS: dict[Any, tuple[Callable[..., Any], tuple[str, ...]]] = {
    nn.MaxPool1d: (F.max_pool1d, _WINDOW),
    nn.MaxPool2d: (F.max_pool2d, _WINDOW),
    nn.MaxPool3d: (F.max_pool3d, _WINDOW),
    nn.AdaptiveMaxPool1d: (F.adaptive_max_pool1d, ("output_size",)),
    nn.AdaptiveMaxPool2d: (F.adaptive_max_pool2d, ("output_size",)),
    nn.AdaptiveMaxPool3d: (F.adaptive_max_pool3d, ("output_size",)),
}
POOLS |= {function.__name__: (function, options) for function, options in POOLS.values()}
#: Functions whose result may share the memory of their argument: a write to one changes both.
VIEWS = {
    *("view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose"),
    *("permute", "movedim", "swapaxes", "expand", "expand_as", "narrow", "select", "chunk"),
    *("split", "unbind", "getitem", "contiguous", "detach", "t", "float", "to", "type_as"),
}
#: ``operator.iadd`` and the like.
IN_PLACE_OPERATORS = {
    function
    for name, function in vars(operator).items()
    if name.startswith("__i") and not name.startswith("__in")
}
#: Value of ``points`` that records the input of the last layer only.
LAST_INPUT: tuple[str, ...] = ()
VIEW_MODULES = (nn.Flatten, nn.Unflatten, nn.Identity, nn.modules.dropout._DropoutNd)


class Point(NamedTuple):
    """A node of a network whose activation is recorded.

    Args:
        nonlinearity: Function that computed the activation; None for the input and the top layer.
        unpool_first: For each pooling since the previous point, whether it follows a layer with
            weights.
    """

    nonlinearity: Callable[[Tensor], Tensor] | None
    unpool_first: tuple[bool, ...]


class Trace(NamedTuple):
    """Record of a network on a batch.

    Args:
        activations: Activations at the points, from the input up.
        switches: For each point, the poolings since the previous one: indices of their maxima and
            spatial sizes of their inputs.
    """

    activations: list[Tensor]
    switches: list[list[tuple[Tensor, torch.Size]]]


class _Tracer(fx.Tracer):
    """Tracer of a network with one input that treats the named modules as leaves.

    Unlike that of torch, it also records operations of buffers alone, which it would otherwise make
    once, and the places where gradients are switched off and on.
    """

    proxy_buffer_attributes = True

    def __init__(self, leaves: Sequence[str]) -> None:
        super().__init__()
        self.leaves = set(leaves)
        self._has_gradients, self._autocast = True, _autocast()

    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return name in self.leaves or super().is_leaf_module(m, name)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> Any:
        """Trace the input only: other arguments of ``forward`` have their default values."""

        def forward(net: nn.Module, x: Any) -> Any:
            return root_fn(net, x)

        return super().create_args_for_root(forward, is_module, concrete_args)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Record a node, and before it a change of the gradient mode; refuse autocast."""
        if _autocast() != self._autocast:
            raise NotImplementedError("torch.autocast cannot be recorded")
        if (enabled := torch.is_grad_enabled()) != self._has_gradients:
            self._has_gradients = enabled
            super().create_node("call_function", torch.set_grad_enabled, (enabled,), {})
        return super().create_node(*args, **kwargs)


def _autocast() -> list[tuple[bool, torch.dtype]]:
    """Return whether operations are in lower precision, and the dtype, by type of device."""
    kinds = ("cpu", "cuda")
    return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


@contextmanager
def _attributes_as_before(net: nn.Module) -> Iterator[None]:
    """Restore the attributes to which the traced forward assigns; refuse buffers among them."""
    owners = [(part, each) for part in net.modules() for each in (vars(part), part._buffers)]
    before = [dict(owner) for _, owner in owners]
    assigned = []
    try:
        yield
    finally:
        for (part, owner), values in zip(owners, before, strict=True):
            for name in [name for name, value in owner.items() if isinstance(value, fx.Proxy)]:
                owner[name] = values.get(name)
                if name not in values:
                    del owner[name]
                if owner is part._buffers:
                    assigned.append((type(part).__name__, name))
    for kind, name in assigned:
        raise FederationError(
            f"the forward of {kind} assigns to the buffer {name}, which cannot be recorded: write"
            f" to it in place, as in self.{name}.add_(1) or self.{name}.copy_(...)"
        )


class _Recorded(nn.Module):
    """Network with a replaced forward, and the original parameters and buffers."""

    def __init__(self, net: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self._forward = net, forward

    def forward(self, x: Tensor) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # restored after an error, too
            return self._forward(self.net, x)


class Recorder:
    """Run a network and record activations at its points and the switches of max pooling.

    Points are the input, the output of every point-wise non-linearity, and the network output; or
    the input, the outputs of named modules, and the network output; or the input, the input of the
    last layer, and the network output. ``torch.fx`` traces the network once. The traced code uses
    the modules and parameters of the network without hooks, so it supports ``vmap`` and
    ``torch.func.functional_call``. For the reasons not to use
    ``torchvision.models.feature_extraction`` see ``docs/decisions`` (0006).

    Args:
        net: Network from one tensor to one tensor.
        points: Names of the modules with outputs that are points. These modules are not traced.
            None selects all non-linearities, and no name (``LAST_INPUT``) the input of the last
            layer.

    Raises:
        FederationError: If the network cannot be traced, has no module of a given name, or its last
            layer is not a linear layer.
    """

    def __init__(self, net: nn.Module, points: Sequence[str] | None = None) -> None:
        modules = dict(net.named_modules())
        for name in points or ():
            if name not in modules:
                raise FederationError(
                    f"points contains {name!r}, which is not a module of the network: choose from"
                    f" {list(modules)[1:]}"
                )
        with _attributes_as_before(net):
            try:
                with torch.enable_grad():
                    graph = _Tracer(points or ()).trace(net)
            except Exception as error:  # whatever the user's forward raises on a proxy
                raise FederationError(
                    f"{type(net).__name__} cannot be traced to record activations"
                    f" ({type(error).__name__}: {error}): its forward must not depend on values."
                    " Set points=[...] to the names of modules to leave untraced (MOON:"
                    " point='...')"
                ) from error
        output = next(node for node in graph.nodes if node.op == "output").args[0]
        #: Name of the module that returns the output of the network; None if none does.
        is_module = isinstance(output, fx.Node) and output.op == "call_module"
        self.last_layer = str(output.target) if is_module else None
        self.points = _mark(graph, modules, None if points is None else set(points))
        self._run = _Recorded(net, type(fx.GraphModule(net, graph)).forward)

    def __call__(self, x: Tensor) -> tuple[Tensor, Trace]:
        """Run the network with its current parameters; return its output and trace."""
        return self._traced(self._run(x))

    @torch.no_grad()
    def fixed(self, params: Mapping[str, Tensor], x: Tensor) -> Trace:
        """Return the trace for other parameters, without changing the buffers of the network.

        Args:
            params: Parameters by name, with the prefix ``net.``, and buffers if they differ from
                those of the network.
            x: Samples, ``[batch, ...]``.
        """
        buffers = {name: b.detach().clone() for name, b in self._run.named_buffers()}
        return self._traced(functional_call(self._run, {**buffers, **params}, (x,)))[1]

    def _traced(self, out: Any) -> tuple[Tensor, Trace]:
        outputs, activations, crossed = out
        sizes = [[(index, inside.shape[2:]) for index, inside in pools] for pools in crossed]
        return cast("Tensor", outputs), Trace(list(activations), sizes)


def _mark(graph: fx.Graph, modules: Mapping[str, nn.Module], named: set[str] | None) -> list[Point]:
    """Extend a graph to return activations and poolings, and describe its points.

    Args:
        graph: Graph of the network. It is changed to return (output, activations, switches and
            inputs of the poolings before each point).
        modules: Modules of the network by name.
        named: Names of the modules with outputs that are points. None selects all non-linearities.
    """
    output = next(node for node in graph.nodes if node.op == "output")
    found = _points(graph, output.args[0], modules, named)
    crossed: list[list[tuple[fx.Node, bool]]] = [[]]
    crossed += [_poolings(a, b, modules) for (a, _), (b, _) in pairwise(found)]
    pools = {node for each in crossed for node, _ in each}
    switches = {node: _with_switches(graph, node, _module(node, modules)) for node in pools}
    nodes = [switches[node][0] if node in switches else node for node, _ in found]
    inside = [[switches[node][1:] for node, _ in each] for each in crossed]
    output.args = ((output.args[0], _protected(graph, nodes, modules), inside),)
    return [
        Point(nonlinearity, tuple(after_weights for _, after_weights in each))
        for (_, nonlinearity), each in zip(found, crossed, strict=True)
    ]


def _points(
    graph: fx.Graph, top: Any, modules: Mapping[str, nn.Module], named: set[str] | None
) -> list[tuple[fx.Node, Callable[[Tensor], Tensor] | None]]:
    """Return the nodes of the points, from the input to ``top``, with their non-linearities."""
    if not isinstance(top, fx.Node):
        raise FederationError(
            "terms that record activations require a network that returns a single tensor, got"
            f" {type(top).__name__}"
        )
    points: list[tuple[fx.Node, Callable[[Tensor], Tensor] | None]] = []
    if named is not None and not named:
        if not isinstance(_module(top, modules), nn.Linear):
            raise FederationError(
                "the network does not end with a linear layer (nn.Linear) inside it, whose input"
                " would be the representation: set point to the name of a module"
            )
        placeholder = next(node for node in graph.nodes if node.op == "placeholder")
        return [(placeholder, None), (top.all_input_nodes[0], None), (top, None)]
    for node in graph.nodes:
        nonlinearity = _nonlinearity(node, _module(node, modules))
        if node.op == "placeholder":
            points.append((node, None))
        elif nonlinearity is not None if named is None else str(node.target) in named:
            points.append((node, nonlinearity))
    if missing := sorted((named or set()) - {str(node.target) for node, _ in points}):
        raise FederationError(
            f"points contains {missing[0]!r}, which cannot be recorded: forward does not call it,"
            " or it is inside another module of points"
        )
    return points if points[-1][0] is top else [*points, (top, None)]


def _module(node: fx.Node, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    return modules.get(str(node.target)) if node.op == "call_module" else None


def _function(node: fx.Node) -> str:
    """Return the name of a function or a method."""
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _name(node: fx.Node) -> str:
    """Return the name of a function or a method, without leading and trailing underscores."""
    return _function(node).strip("_")


def _nonlinearity(node: fx.Node, module: nn.Module | None) -> Callable[[Tensor], Tensor] | None:
    """Return a point-wise non-linearity as a function of its input; None for any other node."""
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
    elif _name(node) not in POINTWISE:
        return None
    if len(node.all_input_nodes) > 1:
        raise FederationError(
            f"representation matching does not support {_name(node)} with computed or learned"
            " options: use a module (nn.PReLU), or set points=[...] without it"
        )
    name, target = _name(node), node.target
    if isinstance(target, str):
        return lambda x: getattr(x, name)(*arguments, **options)
    function = cast("Callable[..., Tensor]", target)
    if _function(node).endswith("_"):  # use the out-of-place variant: autograd needs the argument
        function = getattr(torch, name, None) or getattr(F, name)
    return lambda x: function(x, *arguments, **options)


# --- poolings between two points ------------------------------------------------------------------


def _pool(
    node: fx.Node, module: nn.Module | None
) -> tuple[Callable[..., Any], tuple[str, ...]] | None:
    """Return the function and the option names of a max pooling; None for other nodes."""
    if module is not None:
        return POOLS.get(type(module))
    if node.op != "call_function":
        return None
    return POOLS.get(_name(node).removesuffix("_with_indices"))


def _poolings(
    low: fx.Node, high: fx.Node, modules: Mapping[str, nn.Module]
) -> list[tuple[fx.Node, bool]]:
    """Return the poolings that are on every path between two points, from the lower point up.

    Each comes with a flag that is True if it follows a layer with weights. A pooling that a branch
    bypasses is left out. It cannot be reversed, because its part of the sum or concatenation is
    unknown.
    """
    between = _reachable(low, _users) & _reachable(high, _inputs) if low is not high else set()
    found, weighted = [], False
    for node in low.graph.nodes:
        if node not in between and node is not high:
            continue
        module = _module(node, modules)
        if _pool(node, module) and high not in _reachable(low, _users, without=node):
            found.append((node, weighted))
        weighted = weighted or isinstance(module, WEIGHTED_MODULES)
        weighted = weighted or node.target in WEIGHTED_FUNCTIONS
    return found


def _reachable(
    node: fx.Node, neighbors: Callable[[fx.Node], Iterable[fx.Node]], without: fx.Node | None = None
) -> set[fx.Node]:
    """Return the nodes that are reachable from a node on paths that avoid another node."""
    reached, waiting = set[fx.Node](), [node]
    while waiting:
        new = set(neighbors(waiting.pop())) - reached - {without}
        reached |= new
        waiting += new
    return reached


_users, _inputs = attrgetter("users"), attrgetter("all_input_nodes")


def _with_switches(
    graph: fx.Graph, node: fx.Node, module: nn.Module | None
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Replace a pooling; return the nodes of its output, its switches and its input."""
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


def _protected(
    graph: fx.Graph, nodes: list[fx.Node], modules: Mapping[str, nn.Module]
) -> list[fx.Node]:
    """Copy activations and inputs that an in-place operation would overwrite."""
    written = {
        source
        for node in graph.nodes
        if _is_in_place(node, modules)
        for source in _memory(node.all_input_nodes[0], modules)
    }
    safe = []
    for node in nodes:
        recorded = node
        if node in written:
            with graph.inserting_after(node):
                copy = graph.call_method("clone", (node,))
            if node.op == "placeholder":  # the network gets the copy, as the batch is used again
                for user in [user for user in node.users if user is not copy]:
                    user.replace_input_with(node, copy)
            else:
                recorded = copy
        safe.append(recorded)
    return safe


def _is_in_place(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    if (module := _module(node, modules)) is not None:
        return bool(getattr(module, "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    name = _function(node)
    by_name = name.endswith("_") and not name.endswith("__")
    return by_name or node.target in IN_PLACE_OPERATORS or bool(node.kwargs.get("inplace"))


def _memory(node: fx.Node, modules: Mapping[str, nn.Module]) -> Iterator[fx.Node]:
    """Yield a node, and the nodes that may share its memory."""
    yield node
    module = _module(node, modules)
    is_view = isinstance(module, VIEW_MODULES) or (module is None and _name(node) in VIEWS)
    if (is_view or _is_in_place(node, modules)) and node.all_input_nodes:
        yield from _memory(node.all_input_nodes[0], modules)
