"""The simplex, mixtures and draws, compared with brute force and with expectations."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from lightning_fl.functional.fairness import ascend_mixture, draw_from_mixture, project_to_simplex


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("total", [1.0, 7.5])
def test_the_projection_is_the_closest_point(seed, total):
    values = 2 * np.random.default_rng(seed).standard_normal(5)
    best = minimize(
        lambda x: ((x - values) ** 2).sum(),
        np.full(5, total / 5),
        jac=lambda x: 2 * (x - values),
        bounds=[(0, None)] * 5,
        constraints={"type": "eq", "fun": lambda x: x.sum() - total},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    found = project_to_simplex(torch.from_numpy(values), total).numpy()
    np.testing.assert_allclose(found, best.x, atol=1e-6)
    assert found.sum() == pytest.approx(total, abs=1e-13)
    assert (found >= 0).all()
    # The optimum: entries that are positive are shifted by one threshold, others lie below it.
    threshold = (values - found)[found > 0]
    assert np.ptp(threshold) < 1e-12
    assert (values[found == 0] <= threshold.max() + 1e-12).all()


def test_the_projection_of_special_points():
    inside = torch.tensor([3.0, 0.0, 2.0, 11.0], dtype=torch.float64)
    assert torch.equal(project_to_simplex(inside, 16.0), inside)
    far = torch.tensor([1e9, 1e9 - 1.0, -1e300], dtype=torch.float64)
    assert project_to_simplex(far, 3.0).tolist() == [2.0, 1.0, 0.0]
    assert project_to_simplex(far, 0.0).tolist() == [0.0] * 3
    assert project_to_simplex(torch.full((4,), -5.0)).tolist() == [0.25] * 4
    assert project_to_simplex(torch.tensor([-2.0])).tolist() == [1.0]


def test_clients_without_a_loss_keep_their_weight():
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    losses, known = torch.tensor([5.0, 1.0, 9.0, 1.0]), torch.tensor([True, True, False, False])
    moved = ascend_mixture(weights, losses, known, gamma=0.01)
    assert torch.equal(moved[2:], weights[2:])
    torch.testing.assert_close(moved[:2], torch.tensor([1.6, 1.4], dtype=torch.float64))
    for few in (known & False, torch.arange(4) == 2):
        assert torch.equal(ascend_mixture(weights, losses, few, 1.0), weights)
    assert torch.equal(ascend_mixture(weights, losses, known | True, 0.0), weights)


def test_uniform_samples_have_the_step_of_all_clients_in_expectation():
    weights = torch.full((4,), 100.0, dtype=torch.float64)
    losses = torch.tensor([1.0, 2.0, 4.0, 7.0], dtype=torch.float64)
    everybody = torch.ones(4, dtype=torch.bool)
    masks = [torch.isin(torch.arange(4), pair) for pair in torch.combinations(torch.arange(4), 2)]
    steps = [ascend_mixture(weights, losses, mask, 1e-3) for mask in masks]
    expected = ascend_mixture(weights, losses, everybody, 1e-3)
    torch.testing.assert_close(torch.stack(steps).mean(0), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(expected, weights + 0.4 * (losses - losses.mean()))


def test_draws_have_the_probabilities():
    mixture = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    draws, evaluated = zip(
        *(draw_from_mixture(mixture, 3, random) for _ in range(4000)), strict=True
    )
    mean = torch.stack(draws).double().mean(0)
    torch.testing.assert_close(mean, 3 * mixture, rtol=0, atol=0.05)
    assert mean[1] == 0
    assert {int(d.sum()) for d in draws} == {int(e.sum()) for e in evaluated} == {3}
    chosen = torch.stack(evaluated).double().mean(0)
    torch.testing.assert_close(chosen, torch.full((4,), 0.75).double(), rtol=0, atol=0.03)
