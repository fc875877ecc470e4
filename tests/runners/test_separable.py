import pytest
import torch
from torch import nn

import hidden_state as hidden
from lightning_fl.optimizers import PFedMe
from lightning_fl.runners.fresh import check_fresh
from lightning_fl.runners.optimizer_state import OptimizerState
from lightning_fl.runners.optimizer_values import restack
from lightning_fl.runners.separable import PROPORTIONAL, check_by_trial, check_separable
from lightning_fl.types import FederationError


def stacked(make):
    """The state of an optimizer of one client: of a number, a bias, a matrix and filters."""
    torch.manual_seed(0)
    shapes = ((), (4,), (5, 4), (4, 3, 3, 3))
    params = [nn.Parameter(torch.randn(1, *shape)) for shape in shapes]
    groups = [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:]}]
    return OptimizerState(make(groups))


optim = torch.optim


@pytest.mark.parametrize(
    ("make", "is_linear"),
    [
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True), True),
        (lambda p: optim.SGD(p, lr=0.1, nesterov=True, momentum=0.9, fused=True), True),
        (lambda p: optim.Adam(p, amsgrad=True), True),
        (lambda p: optim.AdamW(p, fused=True), True),
        (lambda p: optim.AdamW(p, lr=torch.tensor(0.01)), True),
        (optim.NAdam, True),
        (optim.RAdam, True),
        (lambda p: optim.RMSprop(p, centered=True, momentum=0.9), True),
        (lambda p: optim.Adagrad(p, initial_accumulator_value=0.1, lr_decay=0.1), True),
        (optim.Adadelta, True),
        (lambda p: optim.Adamax(p, weight_decay=0.1), True),
        (optim.ASGD, False),
        (optim.Rprop, True),
        (PFedMe, True),
        (hidden.Counting, True),
        (hidden.Attribute, True),
        (hidden.Lookahead, False),
    ],
)
def test_an_optimizer_that_treats_numbers_alike_is_fine(make, is_linear):
    state = stacked(make)
    before = str(state.optimizer.state_dict())
    assert check_separable(state, keep=False) is is_linear
    assert check_by_trial(state, keep=False) is is_linear  # which knows none of them
    assert str(state.optimizer.state_dict()) == before
    assert is_linear or type(state.optimizer) not in PROPORTIONAL


@pytest.mark.parametrize("kind", sorted(PROPORTIONAL, key=lambda kind: kind.__name__))
def test_a_child_of_a_known_optimizer_is_tried(kind):
    class Coupled(kind):
        """Steps by the sign of the mean of all gradients."""

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.copy_(p.grad.mean().sign().expand_as(p))
            super().step()

    with pytest.raises(FederationError, match="depends on the other clients"):
        check_separable(stacked(Coupled), keep=False)


@pytest.mark.parametrize(
    "make",
    [
        hidden.Learned,
        hidden.Matrices,
        hidden.GlobalNorm,
        hidden.Factored,
        hidden.Sharpness,
        optim.Adafactor,
        lambda p: optim.LBFGS([q for group in p for q in group["params"]]),
    ],
)
def test_an_optimizer_that_couples_clients_is_refused(make):
    with pytest.raises(
        FederationError, match=r"cannot train vectorized clients.* train the module"
    ):
        check_separable(stacked(make), keep=False)


class Extragradient(optim.Optimizer):
    """Steps by the gradient after a step if it gets a closure, otherwise by the gradient."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        starts = [p.clone() for p in params]
        if closure is not None:
            self._move(params)
            with torch.enable_grad():
                closure()
        for p, start in zip(params, starts, strict=True):
            p.copy_(start)
        self._move(params)

    def _move(self, params):
        for p in params:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


def test_an_optimizer_whose_closure_changes_its_step_is_refused_until_it_says_so():
    with pytest.raises(FederationError, match=r"differs from its step without, .* evaluations"):
        check_separable(stacked(Extragradient), keep=False)

    class Named(Extragradient):
        evaluations = 2

    check_separable(stacked(Named), keep=False)


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch 2.9 or later")
def test_an_optimizer_of_matrices_alone_is_refused_with_the_remedy():
    matrix, stack = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(1, 4, 3))
    optimizer = optim.Muon([matrix])
    restack(optimizer, {id(matrix): stack})
    state = OptimizerState(optimizer)
    check_fresh(state, keep=False)  # sequential training does not try stacks
    with pytest.raises(
        FederationError, match=r"cannot train vectorized clients.* train the module"
    ):
        check_separable(state, keep=False)


def test_a_number_that_is_learned_from_gradients_is_refused_before_it_matters():
    class Quiet(hidden.Learned):
        """Its scale has no effect yet."""

        @torch.no_grad()
        def step(self, closure=None):
            rates = [group["lr"] for group in self.param_groups]
            super().step(closure)
            for group, lr in zip(self.param_groups, rates, strict=True):
                scale = group["d"]
                for p in group["params"]:
                    p.add_(p.grad, alpha=lr * scale).sub_(p.grad, alpha=lr)

    with pytest.raises(FederationError, match=r"depends on the other clients|estimate d is one"):
        check_separable(stacked(Quiet), keep=False)


def test_a_rate_of_zero_at_the_start_of_a_warm_up_hides_nothing():
    def make(params):
        optimizer = hidden.GlobalNorm(params)
        optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        return optimizer

    with pytest.raises(FederationError, match="GlobalNorm cannot train vectorized clients"):
        check_separable(stacked(make), keep=False)


@pytest.mark.parametrize("kind", [hidden.Counting, hidden.Attribute, hidden.Lookahead])
def test_what_is_learned_outside_of_the_state_cannot_be_kept_by_vectorized_clients(kind):
    with pytest.raises(FederationError, match=r"keep. does not support .* all clients share"):
        check_separable(stacked(kind), keep=True)
