"""FedDecorr: by hand, and its limits."""

import pytest
import torch
from torch import nn

from by_hand import Both, cross_entropy, forward, gradient, module, moved, sgd
from lightning_fl import ClientModule
from lightning_fl.functional.decorrelation import correlation_penalty
from lightning_fl.objectives import FedDecorr
from lightning_fl.types import FederationError


def penalty(f):
    """The mean over pairs of features, from torch's matrix of correlations."""
    size, d = f.shape
    squares = torch.corrcoef(f.T).square()
    pairs = [squares[i, j] for i in range(d) for j in range(d) if i != j]
    return (size - 1) ** 2 / size * sum(pairs) / len(pairs)


def test_by_hand(run):
    def train(client, params, buffers, batches):
        for x, y in batches:

            def loss(p, x=x, y=y):
                z, logits = forward(p, buffers, x)
                return cross_entropy(logits, y) + 0.2 * penalty(z)

            params = moved(params, gradient(loss, params))
        return params, buffers

    both = Both(run, lambda: module(FedDecorr(0.2)), rounds=2)
    both.assert_trained_as(train, rtol=1e-6, atol=1e-7)  # eps is 1e-8 of the variance


def test_constant_features_and_single_samples_add_nothing():
    f = torch.randn(6, 3, dtype=torch.float64)
    f[:, 0] = 2.0
    f.requires_grad_()
    correlation_penalty(f).backward()
    assert f.grad.isfinite().all()
    assert correlation_penalty(f.detach()[:, [0, 1]]) == 0
    assert correlation_penalty(f.detach()[:1]) == 0
    assert correlation_penalty(f.detach()[:, :1]) == 0


def test_a_network_without_a_linear_top_is_refused(run):
    with pytest.raises(FederationError, match="does not end with a linear layer"):
        run(ClientModule(nn.Sequential(nn.Tanh()), [FedDecorr()], sgd()).double(), rounds=1)
