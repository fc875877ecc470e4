"""Figures of a split in words."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from torch import Tensor


def label_drift(counts: Tensor) -> Tensor:
    r"""Return how far the classes of each client are from those of all clients, ``[K]``.

    This is the total variation distance :math:`\frac12 \sum_c |p_{kc} - p_c|` between the class
    proportions of client :math:`k` and those of all samples: 0 if they are the same, and close to 1
    if a client has only classes that others hardly have.

    Args:
        counts: Number of samples of each client and class, ``[K, C]``.

    Example:
        >>> import torch
        >>> label_drift(torch.tensor([[10, 0], [0, 10], [5, 5]]))
        tensor([0.5000, 0.5000, 0.0000], dtype=torch.float64)
    """
    overall = counts.sum(0).double() / counts.sum()
    own = counts.double() / counts.sum(1, keepdim=True)
    return (own - overall).abs().sum(1) / 2


def summary(
    sizes: Sequence[int], counts: Tensor | None = None, names: Sequence[str] | None = None
) -> str:
    """Describe a split: samples, classes and drift of the clients.

    Args:
        sizes: Number of samples of each client.
        counts: Number of samples of each client and class, ``[K, C]``; None if classes are unknown.
        names: Names of the clients, and then of unseen ones, which are left out.

    Example:
        >>> import torch
        >>> print(summary([10, 30], torch.tensor([[10, 0], [10, 20]]), ["north", "south"]))
        clients             2 (north, south)
        samples             40
        samples per client  10 to 30, median 20
        classes             2
        classes per client  1 to 2, median 1.5
        label drift         0.17 to 0.50, mean 0.33 (0: as all samples; 1: no class in common)
    """
    names = list(names or ())[: len(sizes)]
    listed = ", ".join(names[:5]) + ", ..." * (len(names) > 5)
    rows = [
        ("clients", f"{len(sizes):,}" + f" ({listed})" * bool(listed)),
        ("samples", f"{sum(sizes):,}"),
        ("samples per client", f"{min(sizes):,} to {max(sizes):,}, median {median(sizes):,g}"),
    ]
    if counts is not None:
        held = (counts > 0).sum(1).tolist()
        drift = label_drift(counts)
        rows += [
            ("classes", f"{int((counts.sum(0) > 0).sum()):,}"),
            ("classes per client", f"{min(held)} to {max(held)}, median {median(held):g}"),
            (
                "label drift",
                f"{drift.min():.2f} to {drift.max():.2f}, mean {drift.mean():.2f}"
                " (0: as all samples; 1: no class in common)",
            ),
        ]
    return "\n".join(f"{name:<20}{value}" for name, value in rows)
