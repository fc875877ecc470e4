"""Entropy regularization and weight divergence, by hand."""

import math

import pytest
import torch

from lightning_fl.functional.entropy import entropy, entropy_hinge
from lightning_fl.objectives import EntropyRegularizer, ModelView, Proximal, WeightDivergence
from lightning_fl.types import FederationError


def test_entropies_by_hand():
    p = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]], dtype=torch.float64)
    found = entropy(p.log())
    assert found.tolist() == pytest.approx([1.5 * math.log(2), 0])
    assert entropy(torch.zeros(10)).item() == pytest.approx(math.log(10))


def test_the_penalty_is_of_each_sample_or_of_their_mean():
    logits = torch.tensor([[0.0, 0.0], [50.0, 0.0]], dtype=torch.float64)
    # Entropies log 2 and 0: below 0.5 by 0 and 0.5; their mean 0.35 by 0.15.
    assert entropy_hinge(logits, 0.5).item() == pytest.approx(0.25)
    assert entropy_hinge(logits, 0.5, of_mean=True).item() == pytest.approx(0.5 - math.log(2) / 2)


def test_gradients_are_those_of_differences():
    torch.manual_seed(0)
    logits = (3 * torch.randn(5, 4, dtype=torch.float64)).requires_grad_()
    term = EntropyRegularizer(min_entropy=1.0, coefficient=0.7)
    assert 0 < (entropy(logits) < 1.0).sum() < 5
    assert torch.autograd.gradcheck(
        lambda x: term(ModelView({}, outputs=x), ModelView({}), None), logits
    )


def test_a_certain_class_has_finite_gradients():
    logits = torch.tensor([[0.0, -torch.inf]], requires_grad=True)
    entropy_hinge(logits, 0.5).backward()
    assert logits.grad[0, 0].isfinite()


def test_weight_divergence_is_twice_the_proximal_term():
    own = ModelView({"w": torch.tensor([1.0, 2.0])})
    fixed = ModelView({"w": torch.tensor([0.0, 4.0])})
    assert WeightDivergence()(own, fixed, None) == 5
    assert WeightDivergence(0.3)(own, fixed, None) == Proximal(0.6)(own, fixed, None)


def test_a_bound_that_no_prediction_reaches_is_refused():
    views = ModelView({}, torch.zeros(4, 3)), ModelView({})
    assert EntropyRegularizer(min_entropy=math.log(3))(*views, None) < 1e-6
    with pytest.raises(FederationError, match="maximum entropy of 3 classes is ln 3 ="):
        EntropyRegularizer(min_entropy=1.2)(*views, None)
