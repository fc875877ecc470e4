"""A discrete Gaussian that learns: probabilities, gradients, updates, and rewards."""

import itertools
import math

import pytest
import torch

from feedback import feedback
from lightning_fl.functional.discrete_gaussian import (
    causal_weights,
    centered_weights,
    log_probabilities,
    normalized_axis,
    relative_reduction,
    score,
)
from lightning_fl.policies import DiscreteGaussianReinforce
from lightning_fl.types import FederationError

GRID = {"lr": [0.1, 0.2, 0.4], "num_steps": [1, 5]}


# --- the mathematics ------------------------------------------------------------------------------


def test_probabilities_by_hand():
    """Two axes, a precision with a correlation: the exponent is worked out for each point."""
    grid = list(itertools.product([-0.5, 0.5], [-0.5, 0.0, 0.5]))
    points, mean, a = (
        torch.tensor(x, dtype=torch.float64) for x in (grid, [0.1, -0.2], [[2, 0.5], [0.5, 1]])
    )
    mass = []
    for x, y in points.tolist():
        u, v = x - 0.1, y + 0.2
        mass.append(math.exp(-0.5 * (2 * u * u + 2 * 0.5 * u * v + v * v)))
    expected = torch.tensor([m / sum(mass) for m in mass], dtype=torch.float64)
    found = log_probabilities(points, mean, a).exp()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_scores_in_closed_form():
    """By the mean A (h - E h); by B -(d d^T - E d d^T) B, with d = h - mu."""
    torch.manual_seed(0)
    points, mean = torch.rand(12, 3).double() - 0.5, torch.rand(3).double() - 0.5
    root = torch.linalg.cholesky(torch.diag(torch.tensor([5.0, 3.0, 2.0]))).double()
    root[1, 0] = 0.7
    p = log_probabilities(points, mean, root @ root.T).exp()
    away = points - mean
    outer = away[:, :, None] * away[:, None]
    by_mean, by_root = score(points, 4, mean, root)
    torch.testing.assert_close(
        by_mean, root @ root.T @ (points[4] - p @ points), atol=1e-12, rtol=0
    )
    expected = -(outer[4] - (p[:, None, None] * outer).sum(0)) @ root
    torch.testing.assert_close(by_root, expected, atol=1e-12, rtol=0)


def test_an_axis_is_scaled_to_its_middle():
    assert normalized_axis([3]).tolist() == [0]
    assert normalized_axis([10, 20, 60]).tolist() == pytest.approx([-0.5, -0.3, 0.5])


def test_weights_subtract_the_baselines():
    assert causal_weights(torch.tensor([1.0, 2.0, 6.0])).tolist() == [-2, -1, 3]
    # Weights 1, 2, 2, 1 of the neighbors, at distances 2, 1, 1, 2.
    found = centered_weights(torch.tensor([1.0, 2.0, 9.0, 4.0, 5.0]))
    assert found.tolist() == pytest.approx([0, 0, 9 - (1 + 4 + 8 + 5) / 6, 0, 0])


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (4.0, 3.0, 0.25),  # the paper's formula, exactly
        (0.3, 0.4, (0.3 - 0.4) / 0.3),
        (-4.0, -5.0, 0.25),  # a negative loss that falls further
        (1e-9, -1.0, 10.0),  # bounded on both sides
        (-1e-9, 1.0, -10.0),
        (0.0, -1e-3, 10.0),  # the limit of a loss that leaves 0
        (0.0, 0.0, 0.0),
        (-5.0, math.nan, -10.0),
        (math.inf, -5.0, 1.0),
        (math.nan, math.nan, 0.0),
    ],
)
def test_a_reward_is_positive_exactly_where_the_loss_falls(before, after, expected):
    assert relative_reduction(before, after, 10.0) == expected


# --- a policy -------------------------------------------------------------------------------------


def test_a_draw_is_a_point_of_the_grid_and_the_same_for_all():
    policy = DiscreteGaussianReinforce(GRID, seed=3)
    seen = set()
    for round in range(60):
        drawn = policy.sample(round, torch.tensor([4, 9]))
        assert list(drawn) == ["lr", "num_steps"]
        assert drawn["num_steps"].dtype == torch.int64
        assert all(value.shape == (2,) and len(value.unique()) == 1 for value in drawn.values())
        seen.add((float(drawn["lr"][0]), int(drawn["num_steps"][0])))
    assert seen == set(itertools.product(GRID["lr"], GRID["num_steps"]))
    again = policy.sample(7, torch.tensor([1]))
    assert again["lr"][0] == policy.sample(7, torch.tensor([1, 2]))["lr"][1]


def test_updates_are_equation_7():
    """A round's score belongs to the psi it was drawn from; the baseline is the window's mean."""
    policy = DiscreteGaussianReinforce(GRID, policy_lr=0.3, window=2, learn_precision=True, seed=1)
    mean, root = policy.mean.clone(), policy.root.clone()
    losses, rewards, scores = [4.0, 3.0, 3.3, 1.0, 0.9], [], []
    for t in range(4):
        index = policy._draw(t)
        torch.testing.assert_close(policy.mean, mean, atol=1e-12, rtol=0)
        scores.append(score(policy.points, index, mean, root))
        rewards.append((losses[t] - losses[t + 1]) / losses[t])
        policy.update(feedback(t, losses[t], losses[t + 1]))
        window = range(max(0, t - 2), t + 1)
        average = sum(rewards[s] for s in window) / len(window)
        mean = mean + 0.3 * sum((rewards[s] - average) * scores[s][0] for s in window)
        mean = mean.clamp(-0.5, 0.5)
        root = root + 0.3 * sum((rewards[s] - average) * scores[s][1] for s in window)
    torch.testing.assert_close(policy.mean, mean, atol=1e-12, rtol=0)
    torch.testing.assert_close(policy.root, root, atol=1e-12, rtol=0)
    assert not torch.equal(policy.root, DiscreteGaussianReinforce(GRID).root)
    assert policy.metrics()["reward"] == pytest.approx(0.1)


def test_updates_are_equation_6_where_that_is_asked_for():
    policy = DiscreteGaussianReinforce(GRID, policy_lr=0.3, window=1, centered=True, seed=1)
    losses = [4.0, 3.0, 3.3, 1.0]
    expected = score(policy.points, policy._draw(1), policy.mean, policy.root)[0] * 0.3
    for t in range(2):
        policy.update(feedback(t, losses[t], losses[t + 1]))
        assert not policy.mean.any()
    policy.update(feedback(2, losses[2], losses[3]))
    r = [(a - b) / a for a, b in itertools.pairwise(losses)]
    torch.testing.assert_close(policy.mean, expected * (r[1] - (r[0] + r[2]) / 2))


def test_the_mean_stays_inside_and_the_precision_positive():
    policy = DiscreteGaussianReinforce(GRID, policy_lr=5.0, learn_precision=True, seed=0)
    loss = 1.0
    for t in range(50):
        after = float("nan") if t == 20 else loss * (0.2 if t % 3 else 3.0)
        policy.update(feedback(t, loss, after))
        assert policy.mean.abs().max() <= 0.5
        assert torch.linalg.eigvalsh(policy.precision).min() >= 0
        assert policy.probabilities().isfinite().all()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"grid": {}}, "grid"),
        ({"grid": {"lr": []}}, "grid"),
        ({"grid": {"lr": [0.1, 0.1]}}, "distinct"),
        ({"grid": {"num_steps": [0, 1]}}, "num_steps"),
        ({"grid": {"num_steps": [1.5]}}, "must be an integer"),
        ({"window": 0, "centered": True}, "window"),
        ({"grid": {"num_steps": [3], "local_epochs": [1, 2]}}, r"\[3\] excludes local_epochs="),
        ({"grid": {"lr": [0.0, 0.1]}}, "lr in grid must be a finite number greater than 0"),
    ],
)
def test_wrong_options_are_refused(options, named):
    with pytest.raises(FederationError, match=named):
        DiscreteGaussianReinforce(**options)


def test_a_round_without_validation_is_an_error():
    policy = DiscreteGaussianReinforce(GRID)
    with pytest.raises(FederationError, match="check_val_every_n_epoch=1"):
        policy.update(feedback(0, 1.0, None))


# --- losses that clients report -------------------------------------------------------------------


def reported(round, *losses):
    return feedback(round, losses=losses)


def test_clients_know_the_reward_of_a_round_one_round_later():
    """The same losses, measured by the server after each round, teach the same."""
    losses = [4.0, 3.0, 2.9, 1.0]
    server = DiscreteGaussianReinforce(GRID, seed=5, window=1)
    clients = DiscreteGaussianReinforce(GRID, seed=5, window=1, loss="clients")
    assert (server.learns_from, clients.learns_from) == ({"val_loss"}, {"client_losses"})
    for round, mean in enumerate(losses):
        clients.update(reported(round, mean - 1, mean + 1, math.nan))
        if round:
            server.update(feedback(round - 1, losses[round - 1], losses[round]))
            assert clients.metrics()["reward"] == server.metrics()["reward"]
            if round < 2:  # later the server's has drawn from a mean that learned one round earlier
                assert torch.equal(clients.mean, server.mean)
    assert not torch.equal(clients.mean, torch.zeros(2, dtype=torch.float64))


def test_a_round_in_which_no_client_reports_waits_for_the_next():
    policy = DiscreteGaussianReinforce(GRID, seed=5, loss="clients")
    policy.update(reported(0, 2.0))
    policy.update(reported(1, math.nan))
    assert "reward" not in policy.metrics()
    policy.update(reported(2, 1.0))
    assert policy.metrics()["reward"] == 0.5


def test_without_a_window_nothing_is_learned():
    policy = DiscreteGaussianReinforce(GRID, window=0)
    for t in range(3):
        policy.update(feedback(t, 3.0 - t, 2.0 - t))
    assert not policy.mean.any()


def test_draws_follow_the_probabilities():
    policy = DiscreteGaussianReinforce(GRID, precision=8.0, seed=0)
    counts = torch.zeros(len(policy.points))
    for round in range(4000):
        counts[policy._draw(round)] += 1
    expected = policy.probabilities() * 4000
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert chi2 < 20.5  # 5 degrees of freedom, one in a thousand


@pytest.mark.parametrize("bad", [1e4, math.inf, math.nan])
def test_one_bad_round_does_not_decide_all_later_ones(bad):
    policy = DiscreteGaussianReinforce(GRID, seed=3, learn_precision=True)
    losses = [2.3, 2.2, bad, bad, 2.1, 2.0, 1.9, 1.8]
    rewards = []
    for round, (before, after) in enumerate(itertools.pairwise(losses)):
        policy.update(feedback(round, before, after))
        rewards.append(policy.metrics()["reward"])
    assert rewards[1] == -10
    assert rewards[3] > 0  # it came back
    assert policy.probabilities().max() < 0.9
