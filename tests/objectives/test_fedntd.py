"""FedNTD: by hand, and its limits."""

import pytest
import torch

from by_hand import Both, copied, cross_entropy, forward, gradient, module, moved
from lightning_fl.functional.distillation import not_true_divergence
from lightning_fl.objectives import FedNTD


def divergence(z, teacher, y, tau):
    """The sum over classes, written as in the paper."""
    total = 0.0
    for own, fixed, true in zip(z, teacher, y, strict=True):
        others = [c for c in range(len(own)) if c != true]
        p = (fixed[others] / tau).exp() / (fixed[others] / tau).exp().sum()
        q = (own[others] / tau).exp() / (own[others] / tau).exp().sum()
        total = total + tau**2 * (p * (p / q).log()).sum()
    return total / len(y)


@pytest.mark.parametrize("batchnorm", [False, True])
def test_by_hand(run, batchnorm):
    """The received model is in evaluation mode, with its own statistics."""

    def train(client, params, buffers, batches):
        received = params, copied(buffers)
        for x, y in batches:
            teacher = forward(*received, x, train=False)[1]

            def loss(p, x=x, y=y, teacher=teacher):
                z = forward(p, buffers, x)[1]
                return cross_entropy(z, y) + 0.8 * divergence(z, teacher, y, 2.0)

            params = moved(params, gradient(loss, params))
        return params, buffers

    both = Both(run, lambda: module(FedNTD(0.8, 2.0), batchnorm=batchnorm), rounds=2)
    both.assert_trained_as(train)


def test_two_classes_have_one_other_class():
    z, teacher = torch.randn(2, 5, 2, dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 0, 1])
    assert not_true_divergence(z, teacher, y, 1.0).tolist() == [0.0] * 5
