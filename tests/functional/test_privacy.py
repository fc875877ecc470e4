"""What noise costs: against formulas of the papers, by quadrature, and in the limits."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from lightning_fl.functional.privacy import (
    clipped_update,
    epsilon,
    noise_beside_a_count,
    noise_multiplier,
)
from lightning_fl.types import Cohort, FederationError

EVERYONE = Cohort(size=10, clients=10)
ORDERS = [1 + x / 10.0 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024]


def exact_gaussian_delta(eps, noise):
    """Of one Gaussian release (Balle and Wang, 2018, theorem 8)."""
    a = 1 / (2 * noise)
    return stats.norm.cdf(a - eps * noise) - math.exp(eps) * stats.norm.cdf(-a - eps * noise)


def converted(rdp, delta):
    """Epsilon of Renyi bounds by order (Canonne et al., 2020, proposition 12)."""
    found = (
        rdp(a) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in ORDERS if a > 1.01
    )
    return max(0.0, min(found))


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (2.0, 10), (5.0, 300)])
def test_everyone_every_round_is_the_gaussian_mechanism(noise, rounds):
    found = epsilon([(noise, rounds)], 1e-5, EVERYONE)
    assert found == pytest.approx(converted(lambda a: rounds * a / (2 * noise**2), 1e-5), rel=0.01)
    # T rounds of noise z are one with z / sqrt(T), whose exact price is lower.
    assert exact_gaussian_delta(found, noise / math.sqrt(rounds)) < 1e-5


@pytest.mark.parametrize("rate", [0.01, 0.1])
def test_poisson_sampling_by_quadrature(rate):
    """The moments of the mixture (Mironov et al., 2019), integrated numerically."""
    noise, rounds, delta = 1.3, 50, 1e-5

    def rdp(order):
        def integrand(x):
            ratio = np.logaddexp(math.log(1 - rate), math.log(rate) + (2 * x - 1) / (2 * noise**2))
            return np.exp(stats.norm.logpdf(x, 0, noise) + order * ratio)

        moment = integrate.quad(integrand, -20, 60, limit=500, points=[0, 1, order])[0]
        return rounds * math.log(moment) / (order - 1)

    orders = [a for a in ORDERS if 1.5 < a < 40][::2]
    expected = min(rdp(a) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in orders)
    cohort = Cohort(size=int(1000 * rate), clients=1000, drawn="poisson")
    assert epsilon([(noise, rounds)], delta, cohort) == pytest.approx(expected, rel=0.02)


def test_limits_of_epsilon():
    poisson = Cohort(10, 10, "poisson")
    assert epsilon([], 1e-5, EVERYONE) == 0
    assert epsilon([(1.0, 0)], 1e-5, EVERYONE) == 0
    assert epsilon([(1.0, 3), (0.0, 1)], 1e-5, EVERYONE) == math.inf
    every = [epsilon([(1.0, 7)], 1e-5, Cohort(10, 10, drawn)) for drawn in ("other", "fixed")]
    assert {*every, epsilon([(1.0, 7)], 1e-5, poisson)} == {every[0]}  # who is sure to take part
    together = epsilon([(1.0, 3), (1.0, 4)], 1e-5, EVERYONE)
    assert together == pytest.approx(every[0])
    assert epsilon([(1.0, 3), (2.0, 4)], 1e-5, EVERYONE) < every[0]


def test_a_cohort_of_fixed_size_promises_less():
    """One client is another: a sum changes by twice the norm, and by no more noise."""
    drawn = [Cohort(50, 1000, drawn) for drawn in ("poisson", "fixed")]
    poisson, fixed = (epsilon([(4.0, 200)], 1e-5, cohort) for cohort in drawn)
    assert 2 * poisson < fixed < epsilon([(2.0, 200)], 1e-5, EVERYONE)
    # Where nearly everyone is drawn the amplified bound is the worse one.
    nearly = epsilon([(2.0, 10)], 1e-3, Cohort(999, 1000, "fixed"))
    assert nearly == epsilon([(1.0, 10)], 1e-3, EVERYONE)
    with pytest.raises(
        FederationError, match="no privacy accountant supports this sampling of 50 of 1000"
    ):
        epsilon([], 1e-5, Cohort(50, 1000, "other"))


@pytest.mark.parametrize(
    "cohort",
    [
        Cohort(20, 400, "poisson"),
        pytest.param(Cohort(20, 400, "fixed"), marks=pytest.mark.slow),
        Cohort(20, 20),
    ],
)
def test_noise_for_a_target(cohort):
    noise = noise_multiplier(3.0, 1e-4, 80, cohort)
    assert 2.9 < epsilon([(noise, 80)], 1e-4, cohort) <= 3.0 + 1e-6
    assert epsilon([(0.95 * noise, 80)], 1e-4, cohort) > 3.0


def test_a_large_target_is_refused():
    with pytest.raises(FederationError, match="epsilon 10000 requires almost no noise"):
        noise_multiplier(1e4, 1e-5, 1, EVERYONE)


def test_count_and_updates_together_cost_what_updates_alone_did():
    beside = noise_beside_a_count(1.1, count_noise=2.0)
    assert beside > 1.1
    # Two Gaussian releases are one: their inverse variances add up, over sensitivities 1 and 1/2.
    assert beside**-2 + (2.0 / 0.5) ** -2 == pytest.approx(1.1**-2)
    assert noise_beside_a_count(1.1, 1e9) == pytest.approx(1.1)
    assert noise_beside_a_count(0.0, 1.0) == 0
    with pytest.raises(FederationError, match=r"half of the noise multiplier 1.1, got 0.5"):
        noise_beside_a_count(1.1, 0.5)


def test_clipped_by_hand_and_never_longer():
    updates = torch.tensor([[3.0, 4.0], [0.3, -0.4], [0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    rows, below = zip(*(clipped_update(update, 1.0) for update in updates), strict=True)
    expected = torch.tensor([[0.6, 0.8], *updates[1:].tolist()], dtype=torch.float64)
    torch.testing.assert_close(torch.stack(rows), expected, rtol=1e-15, atol=0)
    assert [bool(is_below) for is_below in below] == [False, True, True, True]
    random = torch.Generator().manual_seed(1)
    for _ in range(50):
        long = 1e4 * torch.randn(997, generator=random)
        assert float(clipped_update(long.double(), 0.1)[0].norm()) <= 0.1 * (1 + 1e-12)


def test_without_the_library_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(FederationError, match=r'pip install "lightning_fl\[privacy\]"'):
        epsilon([(1.0, 1)], 1e-5, EVERYONE)
