"""Matrix products by oneDNN, twice as fast as torch's default on many processors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

#: Maximum relative error of single precision; that of bfloat16 is a thousand times larger.
MOST_ERROR = 2e-6


@contextmanager
def allow_fast_matmul(
    option: bool | Literal["auto"], shapes: Iterable[tuple[int, int]], device: torch.device
) -> Iterator[None]:
    """Compute products of float32 matrices on a CPU by oneDNN within a ``with`` block.

    ``torch.backends.mkldnn.matmul.fp32_precision = "bf16"`` selects oneDNN and permits it lower
    precision. A processor without bfloat16 instructions computes in float32 nevertheless; a
    processor with them may not. ``auto`` therefore compares with float64 first, for the given
    shapes.

    Args:
        option: ``auto`` to use oneDNN after that comparison, True to use it without comparison,
            False for torch's default.
        shapes: Rows and columns of the weight matrices.
        device: Device of the module.
    """
    backend = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at run time
    if option is False or device.type != "cpu" or not torch.backends.mkldnn.is_available():
        yield
        return
    before = backend.fp32_precision
    if option == "auto" and before != "none":  # the user's own choice
        yield
        return
    try:
        backend.fp32_precision = "bf16"
        if option == "auto" and matmul_error(shapes) > MOST_ERROR:
            backend.fp32_precision = before
        yield
    finally:
        backend.fp32_precision = before


def matmul_error(shapes: Iterable[tuple[int, int]]) -> float:
    """Return the largest relative error of float32 products with matrices of these shapes."""
    random = torch.Generator().manual_seed(0)
    rows, worst = 64, 0.0
    for shape in {shape for shape in shapes if all(shape)}:
        weight = torch.randn(shape, generator=random)
        x = torch.randn(rows, shape[1], generator=random)
        for a, b in ((x, weight.T), (torch.randn(rows, shape[0], generator=random).T, x)):
            worst = max(
                worst, _error(a, b), _error(a[None].expand(2, -1, -1), b[None].expand(2, -1, -1))
            )
    return worst


def _error(a: Tensor, b: Tensor) -> float:
    exact = a.double() @ b.double()
    return float((a @ b - exact).abs().max() / exact.abs().max())
