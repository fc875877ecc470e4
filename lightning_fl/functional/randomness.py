"""Random streams that depend only on (seed, round, client)."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum, unique
from typing import Any

import numpy as np
import torch


@unique
class RandomStream(IntEnum):
    """Use of a random stream. Changing a value changes the results of all runs."""

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
    RANKS = 26
    AUGMENTATION = 27
    CLIENT_START = 28
    STARTS = 29
    UNSEEN = 30


def derive_seed(seed: int, *key: int) -> int:
    """Return a 63-bit seed derived from a seed and a key (``numpy.random.SeedSequence``).

    Keys that differ in zeros at the end have equal seeds.

    Args:
        seed: Seed of the run.
        key: Non-negative integers: a :class:`RandomStream`, then usually round and client.

    Example:
        >>> derive_seed(1, RandomStream.BATCHES, 0, 7) == derive_seed(1, RandomStream.BATCHES, 7, 0)
        False
    """
    return int(np.random.SeedSequence((seed, *key)).generate_state(1, np.uint64)[0] >> 1)


def generator(seed: int, *key: int) -> torch.Generator:
    """Return a CPU generator seeded with :func:`derive_seed`.

    Args:
        seed: See :func:`derive_seed`.
        key: See :func:`derive_seed`.

    Example:
        >>> one, other = (generator(1, RandomStream.COHORT, 0) for _ in range(2))
        >>> torch.equal(torch.rand(3, generator=one), torch.rand(3, generator=other))
        True
    """
    return torch.Generator().manual_seed(derive_seed(seed, *key))


def run_seed(seed: int | None) -> int:
    """Return the given seed, else that of ``lightning.seed_everything``, else 0.

    Args:
        seed: Seed, or None.

    Example:
        >>> run_seed(3)
        3
    """
    return int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed


def rng_state(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of the global generators of Python, NumPy, torch and a CUDA device."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  # used by user code
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type == "cuda":
        state["cuda"] = device, torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the global generators to a state of :func:`rng_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        device, cuda_state = state["cuda"]
        torch.cuda.set_rng_state(cuda_state, device)


def seed_rng(seed: int, device: torch.device | None = None) -> None:
    """Seed the global generators, including that of a given CUDA device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    # torch.manual_seed is slow: without a GPU it formats a stack trace in every call.
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextmanager
def seeded_rng(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators in a context, and restore them at its end.

    Args:
        seed: Seed of the generators.
        device: CUDA device to include, or None.

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
