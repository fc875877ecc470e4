"""A rewritten graph computes the same."""

import pickle

import pytest
import torch
from torch import nn
from torch._inductor.inductor_prims import force_stride_order
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_fl.runners.rewrites import POOLING, Rewrites

aten = torch.ops.aten


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def rewritten(function, *args):
    """The operations of a function before and after, and the largest difference of its result."""
    made = make_fx(function, tracing_mode="fake")(*args)
    before = operations(made.graph)
    Rewrites()(made.graph)
    made.graph.lint()
    made.recompile()
    expected, found = function(*args), made(*args)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    return before, operations(made.graph), float((found - expected).abs().max())


def operations(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_a_transposed_product_is_computed_in_the_order_of_its_result():
    x, g = random(3, 4, 5), random(3, 4, 2)
    before, after, difference = rewritten(
        lambda x, g: torch.bmm(x.permute(0, 2, 1), g).permute(0, 2, 1) + 1, x, g
    )
    bmm, permute, add = aten.bmm.default, aten.permute.default, aten.add.Tensor
    assert before == [permute, bmm, permute, add]
    assert after[-2:] == [bmm, add]
    assert difference < 1e-15


@pytest.mark.parametrize(
    "function",
    [
        lambda x, g: torch.cat([(p := torch.bmm(x, g)).permute(0, 2, 1).reshape(-1), p.view(-1)]),
        lambda x, g: torch.bmm(x, g).permute(1, 0, 2),
        lambda x, g: x.permute(0, 2, 1) + g.sum(),
    ],
    ids=["used twice", "another order", "no product"],
)
def test_other_products_stay(function):
    before, after, difference = rewritten(function, random(3, 4, 5), random(3, 5, 2))
    assert after == before
    assert difference == 0


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_one_value_per_row_is_written_by_comparison(dim):
    shape = [3, 4, 5]
    one = [1 if at == dim % 3 else n for at, n in enumerate(shape)]
    index = torch.randint(shape[dim], one, generator=torch.Generator().manual_seed(1))
    before, after, difference = rewritten(
        lambda index, values: torch.full(shape, 0, dtype=torch.float64).scatter_add(
            dim, index, values
        ),
        index,
        random(*one),
    )
    assert aten.scatter_add.default in before
    assert aten.scatter_add.default not in after
    assert difference == 0


@pytest.mark.parametrize(
    ("start", "count"), [(0.0, 2), (1.0, 1)], ids=["two values per row", "not zeros"]
)
def test_other_writes_stay(start, count):
    index = torch.randint(5, (3, count), generator=torch.Generator().manual_seed(1))
    before, after, difference = rewritten(
        lambda index, values: torch.full((3, 5), start, dtype=torch.float64).scatter_add(
            1, index, values
        ),
        index,
        random(3, count),
    )
    assert after == before
    assert difference == 0


@pytest.mark.parametrize(
    "format", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels last"]
)
def test_pooling_is_left_to_torch_in_the_format_of_the_input(format):
    x = random(2, 3, 4, 4).contiguous(memory_format=format)

    def gradient(x, g):
        _, at = aten.max_pool2d_with_indices(x, [2, 2])
        return aten.max_pool2d_with_indices_backward(
            g.reshape(2, 3, 2, 2), x, [2, 2], [2, 2], [0, 0], [1, 1], False, at
        )

    made = make_fx(gradient, tracing_mode="fake")(x, random(2, 12))
    Rewrites()(made.graph)
    forward, backward = (made.graph.find_nodes(op="call_function", target=op) for op in POOLING)
    assert [node.meta["should_fallback"] for node in (*forward, *backward)] == [True, True]
    forced = backward[0].args[0]
    assert forced.target is force_stride_order
    assert forced.args[1] == list(random(2, 3, 2, 2).contiguous(memory_format=format).stride())


def test_the_cache_on_disk_knows_them():
    assert pickle.loads(pickle.dumps(Rewrites().uuid())) == Rewrites().uuid()


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double(), ignore_index=1),
        nn.CrossEntropyLoss(label_smoothing=0.1),
    ],
    ids=["plain", "weights", "smoothing"],
)
def test_the_gradient_of_a_stacked_classifier_has_both(loss):
    seen = []

    class Watched(Rewrites):
        def __call__(self, graph):
            seen.append(operations(graph))
            super().__call__(graph)
            seen.append(operations(graph))

        def uuid(self):
            return None  # no cache

    def one(w, v, x, y):
        return loss((x @ w.mT).relu() @ v.mT, y)

    stacked = grad(lambda *args: vmap(one)(*args).sum(), argnums=(0, 1))
    options = {"post_grad_custom_post_pass": Watched()}
    args = (random(2, 6, 5), random(2, 3, 6), random(2, 4, 5), torch.randint(3, (2, 4)))
    found = torch.compile(stacked, dynamic=False, options=options)(*args)
    for each, expected in zip(found, stacked(*args), strict=True):
        torch.testing.assert_close(each, expected, rtol=1e-12, atol=1e-14)
    before, after = seen
    assert aten.scatter_add.default in before
    assert aten.scatter_add.default not in after
    turned = [ops.count(aten.permute.default) for ops in (before, after)]
    assert turned[0] != turned[1]
