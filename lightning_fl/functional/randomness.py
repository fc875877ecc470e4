"""Randomness that belongs to (seed, round, client) and to nothing else."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
import torch


class RandomStream(IntEnum):
    """What a stream is for: two purposes never share numbers. Values are part of every result."""

    HOLD_OUT = 0
    PARTITION = 1
    COHORT = 2
    BATCHES = 3
    SAMPLES = 4
    CLIENT = 5
    VALIDATION = 6
    EVALUATION_SAMPLES = 7
    ROUND = 8
    POLICY = 9
    MATCHING = 10
    STRAGGLERS = 11
    CLIENT_LOSS = 12
    GRAPH = 13
    LOCAL_TEST = 14
    PERSONAL = 15
    NEURONS = 16
    ARRIVALS = 17
    POSTERIOR = 18
    DISTILLATION = 19
    TRANSFORM = 20
    FAULTS = 21
    ATTACKERS = 22
    SPEEDS = 23
    NOISE = 24
    BACKDOOR = 25


def derive_seed(seed: int, *key: int) -> int:
    """Mix a seed and a key to a seed of 63 bits (``numpy.random.SeedSequence``).

    Args:
        seed: The run's seed.
        key: Non-negative numbers: a purpose, then usually round and client.

    Example:
        >>> derive_seed(1, RandomStream.BATCHES, 0, 7) == derive_seed(1, RandomStream.BATCHES, 7, 0)
        False
    """
    return int(np.random.SeedSequence((seed, *key)).generate_state(1, np.uint64)[0] >> 1)


def generator(seed: int, *key: int) -> torch.Generator:
    """Return a CPU generator seeded with :func:`derive_seed`.

    Example:
        >>> one, other = (generator(1, RandomStream.COHORT, 0) for _ in range(2))
        >>> torch.equal(torch.rand(3, generator=one), torch.rand(3, generator=other))
        True
    """
    return torch.Generator().manual_seed(derive_seed(seed, *key))


def run_seed(seed: int | None) -> int:
    """Return the given seed, else that of ``lightning.seed_everything``, else 0.

    Example:
        >>> run_seed(3)
        3
    """
    return int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed


def rng_state(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of the global generators: Python's, numpy's, torch's, the CUDA device's."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  # what user code draws from
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type == "cuda":
        state["cuda"] = device, torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the global generators back to what :func:`rng_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        device, cuda_state = state["cuda"]
        torch.cuda.set_rng_state(cuda_state, device)


def seed_rng(seed: int, device: torch.device | None = None) -> None:
    """Seed the global generators, of a CUDA device too where one is given."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    # Not torch.manual_seed: without a GPU it formats a stack trace, for a later CUDA, every time.
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextmanager
def seeded_rng(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators for a while, then put them back.

    Example:
        >>> with seeded_rng(1):
        ...     a = torch.rand(1)
        >>> with seeded_rng(1):
        ...     torch.equal(a, torch.rand(1))
        True
    """
    state = rng_state(device)
    seed_rng(seed, device)
    try:
        yield
    finally:
        set_rng_state(state)
