"""An optimizer is proven to start fresh for each client, or refused."""

import pytest
import torch

import hidden_state as hidden
from lightning_fl.runners.fresh import check_fresh
from lightning_fl.types import FederationError


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    "kind", [*hidden.LEARNERS, hidden.Matrices, hidden.GlobalNorm, hidden.Sharpness]
)
def test_an_optimizer_that_can_be_made_fresh_is_left_alone(kind, keep):
    learner = hidden.state_of(kind)
    before = [p.detach().clone() for g in learner.optimizer.param_groups for p in g["params"]]
    check_fresh(learner, keep)
    after = [p for g in learner.optimizer.param_groups for p in g["params"]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert learner.optimizer.state == {}
    assert all("step" not in group for group in learner.optimizer.param_groups)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (hidden.SlowCopy, "SlowCopy cannot be reset .* slow, a copy of its parameters"),
        (hidden.AnchorAttribute, "AnchorAttribute cannot be reset .* slow, a copy of its"),
        (hidden.Closed, "Closed cannot be reset .* hidden state .* Choose another optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_made_fresh_is_refused(kind, why):
    with pytest.raises(FederationError, match=why):
        check_fresh(hidden.state_of(kind), keep=False)


def test_an_optimizer_that_cannot_be_tried_is_refused():
    class Broken(hidden.Counting):
        def update(self, p, group):
            raise KeyError("hessian")

    with pytest.raises(FederationError, match=r"that Broken can be reset .*KeyError: 'hessian'"):
        check_fresh(hidden.state_of(Broken), keep=False)


def test_what_is_not_a_tensor_or_a_number_cannot_be_kept():
    class Named(hidden.Counting):
        def update(self, p, group):
            group["phase"] = f"step {group['step']}"
            return p.grad

    check_fresh(hidden.state_of(Named), keep=False)
    with pytest.raises(FederationError, match=r"keep. does not support Named.* phase"):
        check_fresh(hidden.state_of(Named), keep=True)


def test_a_rate_that_the_optimizer_changes_itself_goes_with_no_scheduler():
    class Decaying(hidden.Counting):
        def update(self, p, group):
            group["lr"] *= 0.9
            return p.grad

    learner = hidden.state_of(Decaying)
    check_fresh(learner, keep=False)
    torch.optim.lr_scheduler.ExponentialLR(learner.optimizer, 0.9)
    with pytest.raises(
        FederationError, match=r"both Decaying .* change lr .* Remove the scheduler"
    ):
        check_fresh(learner, keep=False)
