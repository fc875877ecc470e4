"""Who takes part in a round."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fl.samplers import PoissonSampler, RoundRobinSampler, UniformSampler, WeightedSampler
from lightning_fl.types import FederationError


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


SAMPLERS = [UniformSampler(), WeightedSampler(), RoundRobinSampler()]
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: type(s).__name__)


@every_sampler
@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=12), data=st.data())
def test_a_cohort_is_of_different_clients(sampler, sizes, data):
    count = data.draw(st.integers(1, len(sizes)))
    round = data.draw(st.integers(0, 10_000))
    sizes = torch.tensor(sizes)
    before = sizes.clone()
    found = sampler.sample(round, count, sizes, rng(round))
    assert found.dtype == torch.int64
    assert len(found) == len(set(found.tolist())) == count
    assert set(found.tolist()) <= set(range(len(sizes)))
    assert torch.equal(sizes, before)


@every_sampler
def test_a_cohort_depends_on_the_rounds_generator_alone(sampler):
    before = torch.get_rng_state()
    first, again = (sampler.sample(3, 4, torch.arange(1, 10), rng(5)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), before)


def frequencies(sampler, count, num_samples, draws=4000):
    generator = rng()
    found = Counter(
        tuple(sampler.sample(0, count, num_samples, generator).tolist()) for _ in range(draws)
    )
    return {cohort: times / draws for cohort, times in found.items()}


def test_every_client_is_as_probable_as_any_other():
    found = frequencies(UniformSampler(), 2, torch.tensor([1, 100, 10_000, 7]))
    assert found == pytest.approx(dict.fromkeys(permutations(range(4), 2), 1 / 12), abs=0.02)


@pytest.mark.parametrize("weights", ["samples", [3.0, 1.0, 6.0]])
def test_weights_are_probabilities_of_one_draw_after_another(weights):
    sizes = torch.tensor([3, 1, 6]) if weights == "samples" else torch.ones(3)
    found = frequencies(WeightedSampler(weights), 2, sizes)
    p = [0.3, 0.1, 0.6]
    by_hand = {(i, j): p[i] * p[j] / (1 - p[i]) for i, j in permutations(range(3), 2)}
    assert found == pytest.approx(by_hand, abs=0.025)


def test_a_client_without_weight_never_takes_part():
    sampler = WeightedSampler([0.0, 1.0, 0, 2.0])
    for seed in range(50):
        assert set(sampler.sample(0, 2, torch.ones(4), rng(seed)).tolist()) == {1, 3}
    with pytest.raises(
        FederationError, match=r"a positive weight must be an integer of at least 3, got 2"
    ):
        sampler.sample(0, 3, torch.ones(4), rng())


@pytest.mark.parametrize("weights", ["size", [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_weights_that_make_no_sense_are_refused(weights):
    with pytest.raises(
        FederationError, match=r"weights\[.\] must be a finite number of at least 0"
    ):
        WeightedSampler(weights)


def test_weights_may_be_an_array():
    assert WeightedSampler(np.array([0.0, 1.0])).weights == [0.0, 1.0]


def test_there_is_a_weight_for_each_client():
    with pytest.raises(FederationError, match="weights must have 3 entries, one per client, got 2"):
        WeightedSampler([1.0, 1.0]).sample(0, 1, torch.ones(3), rng())


def test_round_robin_takes_clients_in_turn():
    sampler, sizes = RoundRobinSampler(), torch.ones(5)
    found = [sampler.sample(t, 2, sizes, rng()).tolist() for t in range(5)]
    assert found == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]


def test_poisson_cohorts_are_coins_of_clients():
    """Numbers are binomial, clients independent, and nobody is a cohort, too."""
    random = rng()
    cohorts = [PoissonSampler().sample(t, 3, torch.ones(12), random) for t in range(4000)]
    counts = torch.tensor([len(cohort) for cohort in cohorts]).double()
    assert float(counts.mean()) == pytest.approx(3, abs=0.1)
    assert float(counts.var()) == pytest.approx(12 * 0.25 * 0.75, rel=0.1)
    assert float((counts == 0).double().mean()) == pytest.approx(0.75**12, abs=0.01)
    there = torch.stack([torch.zeros(12).index_fill(0, cohort, 1.0) for cohort in cohorts])
    assert there.mean(0).tolist() == pytest.approx([0.25] * 12, abs=0.03)
    correlations = torch.corrcoef(there.T) - torch.eye(12)
    assert float(correlations.abs().max()) < 0.07
    assert PoissonSampler().sample(0, 12, torch.ones(12), random).tolist() == list(range(12))
