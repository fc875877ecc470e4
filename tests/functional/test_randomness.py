"""Randomness that belongs to a key and to nothing else."""

import random
from itertools import product

import numpy as np
import pytest
import torch

from lightning_fl.functional.randomness import (
    RandomStream,
    derive_seed,
    generator,
    rng_state,
    run_seed,
    seed_rng,
    seeded_rng,
    set_rng_state,
)


def draw(device="cpu"):
    """One number of each global generator."""
    numbers = [random.random(), np.random.rand(), torch.rand(()).item()]
    return numbers + ([torch.rand((), device=device).item()] if device != "cpu" else [])


def test_a_seed_is_numpys_seed_sequence_on_every_machine():
    # Results in papers hang on these numbers.
    assert derive_seed(0) == 7896617691693857887
    assert derive_seed(1, RandomStream.BATCHES, 0, 7) == 7163219226752646882
    names = (
        "HOLD_OUT PARTITION COHORT BATCHES SAMPLES CLIENT VALIDATION EVALUATION_SAMPLES ROUND"
        " POLICY MATCHING STRAGGLERS CLIENT_LOSS GRAPH LOCAL_TEST PERSONAL NEURONS ARRIVALS"
        " POSTERIOR DISTILLATION TRANSFORM FAULTS ATTACKERS SPEEDS NOISE BACKDOOR RANKS"
        " AUGMENTATION CLIENT_START STARTS UNSEEN"
    )
    assert [stream.name for stream in RandomStream] == names.split()
    assert [stream.value for stream in RandomStream] == list(range(31))


def test_every_key_has_a_seed_of_its_own():
    keys = list(product(range(3), RandomStream, range(6), range(6)))
    seeds = {derive_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_close_keys_have_streams_that_know_nothing_of_each_other():
    draws = torch.stack(
        [torch.randn(400, generator=generator(0, RandomStream.CLIENT, 0, c)) for c in range(30)]
    )
    off_diagonal = torch.corrcoef(draws) - torch.eye(30)
    assert off_diagonal.abs().max() < 5 / 400**0.5


def test_a_runs_seed_is_its_own_else_lightnings_else_zero(monkeypatch):
    assert run_seed(None) == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert run_seed(None) == 7
    assert run_seed(3) == 3
    assert run_seed(0) == 0


def test_all_global_generators_are_seeded():
    seed_rng(2**62 + 5)
    first = draw()
    seed_rng(2**62 + 5)
    assert draw() == first
    seed_rng(2**62 + 6)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_a_state_brings_all_global_generators_back():
    state = rng_state()
    first = draw()
    draw()
    set_rng_state(state)
    assert draw() == first


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_a_seeded_while_leaves_no_trace(error):
    state = rng_state()
    expected = draw()
    set_rng_state(state)
    try:
        with seeded_rng(1):
            inside = draw()
            if error:
                raise error
    except ZeroDivisionError:
        pass
    assert draw() == expected
    with seeded_rng(1):
        assert draw() == inside


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_generator_is_one_of_them():
    device = torch.device("cuda", 0)
    state = rng_state(device)
    expected = draw(device)
    set_rng_state(state)
    with seeded_rng(1, device):
        inside = draw(device)
    assert draw(device) == expected
    with seeded_rng(1, device):
        assert draw(device) == inside
    seed_rng(2, device)
    assert all(a != b for a, b in zip(draw(device), inside, strict=True))
