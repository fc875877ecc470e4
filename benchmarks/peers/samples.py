"""Synthetic samples that the library and all others train on. NumPy only: FedJAX has no torch."""

from __future__ import annotations

from math import prod, sqrt

import numpy as np

#: Distance between the means of two classes, in standard deviations of a sample.
DISTANCE = 5.0
#: Number of test samples, from the same distribution.
TESTED = 2000


def drawn(
    count: int, shape: tuple[int, ...], classes: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return samples, normal around the mean of their class, and labels."""
    random = np.random.default_rng(seed)
    labels = random.integers(classes, size=count)
    samples = random.standard_normal((count, *shape), np.float32)
    samples += means(shape, classes)[labels]
    return samples, labels


def tested(shape: tuple[int, ...], classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the test samples and their labels."""
    return drawn(TESTED, shape, classes, seed=1)


def means(shape: tuple[int, ...], classes: int) -> np.ndarray:
    """Return the mean of each class; those of images are coarse, so that convolutions see them."""
    random = np.random.default_rng(2)
    coarse = (*shape[:-2], *(4,) * 2) if len(shape) > 1 else shape
    found = random.standard_normal((classes, *coarse))
    for axis in range(2, found.ndim):
        found = found.repeat(shape[axis - 1] // 4, axis)
    return (DISTANCE / sqrt(2 * prod(shape)) * found).astype(np.float32)
