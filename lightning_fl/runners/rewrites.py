"""Rewrites of the compiled graph of a vectorized local step, for a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.inductor_prims import force_stride_order
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map

aten, prims = torch.ops.aten, torch.ops.prims

#: Operators that torch's own code computes faster than generated code.
POOLING = (
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
)


class Rewrites(CustomGraphPass):
    """Rewrite the graph of a step before torch generates code from it.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def gradient(x, g):
        ...     return torch.bmm(x.permute(0, 2, 1), g).permute(0, 2, 1)
        >>> x, g = torch.ones(2, 4, 5), torch.ones(2, 4, 3)
        >>> made = make_fx(gradient, tracing_mode="fake")(x, g)
        >>> Rewrites()(made.graph)
        >>> [node.name for node in made.graph.nodes if node.op == "call_function"][-1]
        'bmm_default'
    """

    def __call__(self, graph: Graph) -> None:
        """Rewrite a graph in place."""
        turn_products(graph)
        compare_indices(graph)
        keep_pooling(graph)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Identify the rewrites in the compiler's cache on disk."""
        return get_hash_for_files((__file__,))


def turn_products(graph: Graph) -> None:
    r"""Compute transposed products in the order of their results: :math:`(AB)^T = B^T A^T`.

    The gradient of a stacked weight ``[k, out, in]`` is computed as ``[k, in, out]``, and the
    update would transpose it entry by entry.

    Args:
        graph: The graph, which is changed in place.
    """
    for node in graph.find_nodes(op="call_function", target=aten.permute.default):
        product, order = node.args
        if order != [0, 2, 1] or not _is(product, aten.bmm.default) or len(product.users) > 1:
            continue
        with graph.inserting_before(node):
            right, left = (_call(graph, aten.permute.default, m, order) for m in product.args)
            _replace(node, _call(graph, aten.bmm.default, left, right))


def compare_indices(graph: Graph) -> None:
    """Write one value per row into zeros by comparing indices.

    The gradient of the cross-entropy calls ``scatter_add``, which the compiler does not fuse with
    other operations.

    Args:
        graph: The graph, which is changed in place.
    """
    for node in graph.find_nodes(op="call_function", target=aten.scatter_add.default):
        zeros, dim, index, values = node.args
        like = node.meta["val"]
        one = list(like.shape)
        one[dim] = 1
        if not _is(zeros, aten.full.default) or zeros.args[1] != 0:
            continue
        if any(list(each.meta["val"].shape) != one for each in (index, values)):
            continue
        along = [-1 if at == dim % like.ndim else 1 for at in range(like.ndim)]
        how = {"dtype": torch.int64, "device": like.device}
        with graph.inserting_before(node):
            count = _call(
                graph,
                prims.iota.default,
                like.shape[dim],
                start=0,
                step=1,
                requires_grad=False,
                **how,
            )
            count = _call(graph, aten.reshape.default, count, along)
            is_here = _call(graph, aten.eq.Tensor, index, count)
            zero = _call(graph, aten.full.default, [], 0, dtype=like.dtype, device=like.device)
            _replace(node, _call(graph, aten.where.self, is_here, values, zero))


def keep_pooling(graph: Graph) -> None:
    """Compute the maximum over windows, and its gradient, with torch's own code.

    Generated code writes the gradient entry by entry, which takes ten times as long. Torch's code
    copies tensors of different memory formats, so that the gradient gets the format of the input.
    A graph has these operators only if they are not decomposed; see :data:`POOLING`.

    Args:
        graph: The graph, which is changed in place.
    """
    forward, backward = POOLING
    for node in graph.find_nodes(op="call_function", target=forward):
        node.meta["should_fallback"] = True
    for node in graph.find_nodes(op="call_function", target=backward):
        node.meta["should_fallback"] = True
        grad, x, *others = node.args
        x_value, grad_value = x.meta["val"], grad.meta["val"]
        if x_value.ndim == 4 and x_value.is_contiguous(memory_format=torch.channels_last):
            format = torch.channels_last
        else:
            format = torch.contiguous_format
        strides = torch.empty_like(grad_value, memory_format=format).stride()
        with graph.inserting_before(node):
            grad = _call(graph, force_stride_order, grad, list(strides))
        node.args = (grad, x, *others)


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target


def _call(graph: Graph, target: Any, *args: Any, **options: Any) -> Node:
    """Insert a call, with the tensor without data that stands for its result."""
    node = graph.call_function(target, args, options)
    known = next(each.meta["val"] for each in graph.nodes if "val" in each.meta)
    values = tree_map(lambda each: each.meta["val"] if isinstance(each, Node) else each, args)
    with known.fake_mode:
        node.meta["val"] = target(*values, **options)
    return node


def _replace(node: Node, other: Node) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)
