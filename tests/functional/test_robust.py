"""Centers of updates: against loops, brute force and limit cases."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fl.functional.robust import (
    coordinate_median,
    geometric_median,
    krum_scores,
    trimmed_mean,
)


def rand(k, p, seed=0):
    return torch.randn(k, p, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 2, 5, 6])
def test_median_and_trimmed_mean_by_loops(k):
    updates = rand(k, 4)
    for p in range(4):
        column = sorted(updates[:, p].tolist())
        middle = column[k // 2] if k % 2 else (column[k // 2 - 1] + column[k // 2]) / 2
        assert float(coordinate_median(updates)[p]) == pytest.approx(middle, abs=1e-15)
        for trim in range((k + 1) // 2):
            kept = column[trim : k - trim]
            found = float(trimmed_mean(updates, trim)[p])
            assert found == pytest.approx(sum(kept) / len(kept), abs=1e-14)
    assert torch.equal(trimmed_mean(updates, 0), updates.sort(0).values.mean(0))
    torch.testing.assert_close(trimmed_mean(updates, (k - 1) // 2), coordinate_median(updates))


@pytest.mark.parametrize(("k", "f"), [(3, 0), (5, 1), (7, 2), (8, 1)])
def test_krum_scores_are_the_smallest_sums_over_neighbours(k, f):
    updates = rand(k, 3, seed=k)
    for i in range(k):
        others = [j for j in range(k) if j != i]
        sums = [
            sum(float((updates[i] - updates[j]).square().sum()) for j in chosen)
            for chosen in combinations(others, k - f - 2)
        ]
        assert float(krum_scores(updates, f)[i]) == pytest.approx(min(sums), rel=1e-12)


def test_krum_tells_near_updates_apart_in_float32():
    """Long vectors at small distances: by products of matrices all would be rounding."""
    base = torch.randn(1, 10_000, generator=torch.Generator().manual_seed(0))
    near = base + 1e-4 * rand(4, 10_000).float()
    scores = krum_scores(torch.cat([near, base + 1]), 1)
    exact = krum_scores(torch.cat([near, base + 1]).double(), 1)
    torch.testing.assert_close(scores[:4].double(), exact[:4], rtol=1e-2, atol=0)
    assert scores.argmax() == 4


@pytest.mark.parametrize("seed", range(4))
def test_the_geometric_median_has_the_smallest_distance(seed):
    torch.manual_seed(10 + seed)  # no median on an update, where iterations converge slowly
    updates, weights = rand(6, 3, seed), 0.2 + torch.rand(6, dtype=torch.float64)
    found = geometric_median(updates, weights, iterations=1000)

    def cost(v):
        return float(weights @ (updates - v).norm(dim=1))

    param = torch.nn.Parameter(updates.mean(0))
    optimizer = torch.optim.LBFGS(
        [param], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )

    def step():
        optimizer.zero_grad()
        loss = weights @ (updates - param).norm(dim=1)
        loss.backward()
        return loss

    optimizer.step(step)
    assert cost(found) <= cost(param.detach()) + 1e-6
    torch.testing.assert_close(found, param.detach(), rtol=0, atol=1e-4)


def test_the_geometric_median_leaves_an_update_that_it_starts_from():
    """The coordinate-wise median may be an update, near which all steps are short."""
    corner = torch.tensor([[0.0, 0], [1, 0], [0, 1]], dtype=torch.float64)
    found = geometric_median(corner, torch.ones(3))
    fermat = (1 - 1 / 3**0.5) / 2  # it sees the three sides under equal angles
    torch.testing.assert_close(found, torch.full_like(found, fermat), rtol=0, atol=1e-5)
    line = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    for weights, median in (([3.0, 2.0, 6.0], 3.0), ([6.0, 2.0, 3.0], 0.0)):
        found = geometric_median(line, torch.tensor(weights))
        assert float(found) == pytest.approx(median, abs=1e-4)


def test_limit_cases_of_the_geometric_median():
    same = rand(1, 4).expand(5, -1)
    torch.testing.assert_close(geometric_median(same, torch.ones(5)), same[0])
    two = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    heavy = geometric_median(two, torch.tensor([3.0, 1.0]), iterations=10_000)
    assert float(heavy) == pytest.approx(0.0, abs=1e-4)  # more than half of the weight
    # A point that is one of the updates: its distance is 0.
    star = torch.tensor([[0.0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]], dtype=torch.float64)
    assert geometric_median(star + 7, torch.ones(5)).tolist() == pytest.approx([7.0, 7.0])


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 9), st.integers(0, 10**6), st.data())
def test_a_minority_cannot_move_the_centre_far(k, seed, data):
    f = data.draw(st.integers(0, (k - 1) // 2))
    honest = rand(k - f, 3, seed)
    evil = data.draw(st.sampled_from([1e6, -1e9, 1e12])) * torch.ones(f, 3, dtype=torch.float64)
    updates = torch.cat([honest, evil])
    low, high = honest.min(0).values, honest.max(0).values
    for center in (coordinate_median(updates), trimmed_mean(updates, f)):
        assert (center >= low - 1e-9).all()
        assert (center <= high + 1e-9).all()
    if k >= 2 * f + 3:
        assert int(krum_scores(updates, f).argmin()) < k - f
    if f:
        spread = (honest - honest.mean(0)).norm(dim=1).max()
        middle = geometric_median(updates, torch.ones(k), iterations=1000)
        share = k / (k - 2 * f)
        assert float((middle - honest.mean(0)).norm()) < 4 * share * float(spread) + 1e-3
