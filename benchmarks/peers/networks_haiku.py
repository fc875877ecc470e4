"""The networks of ``networks.py`` in Haiku, for the peers that train with JAX."""

from __future__ import annotations

from collections.abc import Callable

import haiku as hk
import jax
import numpy as np


def channels_last(data: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Samples and labels as JAX takes them."""
    x, y = data
    return np.ascontiguousarray(np.moveaxis(x, 1, -1)), y.astype(np.int32)


def pool(x: jax.Array) -> jax.Array:
    """Halve maps by max pooling."""
    return hk.max_pool(x, (2, 2, 1), (2, 2, 1), "VALID")


def dropout(rate: float) -> Callable[[jax.Array], jax.Array]:
    """Drop out a share of the activations; for a rate of 0 there is no random key."""
    return lambda x: hk.dropout(hk.next_rng_key(), rate, x) if rate else x


def layers(shape: tuple[int, ...], workload: str, classes: int, is_training: bool) -> list:
    """The network of a workload for samples of this shape; channels come last."""
    relu, flat = jax.nn.relu, hk.Flatten()
    drop = [dropout(rate * is_training) for rate in (0.25, 0.5)]
    if workload == "blazefl":
        convs = [hk.Conv2D(6, 5, padding="VALID"), relu, pool]
        convs += [hk.Conv2D(16, 5, padding="VALID"), relu, pool, flat]
        return [*convs, hk.Linear(120), relu, hk.Linear(84), relu, hk.Linear(classes)]
    if workload in ("pfl", "femnist"):
        convs = [hk.Conv2D(32, 3, padding="VALID"), relu, hk.Conv2D(64, 3, padding="VALID"), relu]
        convs += [pool, drop[0], flat]
        return [*convs, hk.Linear(128), relu, drop[1], hk.Linear(classes)]
    if shape == (784,):
        return [hk.Linear(100), relu, hk.Linear(100), relu, hk.Linear(classes)]
    convs = []
    if shape == (32, 32, 3):
        for maps in (32, 64):
            convs += [hk.Conv2D(maps, 5), pool, relu]
    elif shape == (32, 32, 1):
        for i in range(4):
            convs += [hk.Conv2D(64, 3), *[pool] * (i % 2), relu]
    else:
        raise ValueError(f"no network for samples of shape {shape}")
    return [*convs, flat, hk.Linear(1024), relu, hk.Linear(classes)]
