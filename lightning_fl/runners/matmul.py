"""oneDNN's matrix products, which are twice as fast as torch's default on many processors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

#: Largest relative error that single precision explains; bfloat16's is a thousand times larger.
MOST_ERROR = 2e-6


def allow_fast_matmul(
    option: bool | Literal["auto"], shapes: Iterable[tuple[int, int]], device: torch.device
) -> Callable[[], None]:
    """Let oneDNN compute products of float32 matrices on a CPU, if its results are as exact.

    ``torch.backends.mkldnn.matmul.fp32_precision = "bf16"`` hands products to oneDNN and permits it
    lower precision. Without instructions for that it computes in float32; a processor with them
    may not. So ``auto`` compares with float64 first, for the shapes that are needed.

    Args:
        option: ``auto`` with that comparison, True without, False for torch's default.
        shapes: Rows and columns of weight matrices.
        device: Where the module is.

    Returns:
        What puts the setting back.
    """
    backend = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at run time
    if option is False or device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return lambda: None
    before = backend.fp32_precision
    if option == "auto" and before != "none":  # the user's own choice
        return lambda: None

    def put_back() -> None:
        backend.fp32_precision = before

    backend.fp32_precision = "bf16"
    if option == "auto" and matmul_error(shapes) > MOST_ERROR:
        put_back()
    return put_back


def matmul_error(shapes: Iterable[tuple[int, int]], rows: int = 64) -> float:
    """Return the largest relative error of float32 products with matrices of these shapes."""
    random = torch.Generator().manual_seed(0)
    worst = 0.0
    for shape in set(shapes):
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
