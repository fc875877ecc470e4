"""MOON: by hand, its limits, and networks without a representation."""

import math

import pytest
import torch
from torch import nn

from by_hand import Both, copied, cross_entropy, forward, gradient, module, moved, sgd
from lightning_fl import ClientModule
from lightning_fl.functional.contrastive import model_contrastive_loss
from lightning_fl.objectives import MOON
from lightning_fl.types import FederationError
from written import Written


@pytest.mark.parametrize(("batchnorm", "point"), [(False, None), (True, "2")])
def test_by_hand(run, batchnorm, point):
    """Partners in evaluation mode, each with its own statistics; the last round of a client."""
    mu, temperature = 2.0, 0.3
    previous = {}

    def train(client, params, buffers, batches):
        received = copied(params), copied(buffers)
        last = previous.get(client, received)
        for x, y in batches:
            z_global, z_last = (forward(*model, x, train=False)[0] for model in (received, last))

            def loss(p, x=x, y=y, z_global=z_global, z_last=z_last):
                z, logits = forward(p, buffers, x)
                near, far = (
                    (z * other).sum(1) / z.norm(dim=1) / other.norm(dim=1)
                    for other in (z_global, z_last)
                )
                near, far = ((each / temperature).exp() for each in (near, far))
                return cross_entropy(logits, y) - mu * (near / (near + far)).log().mean()

            params = moved(params, gradient(loss, params))
        previous[client] = copied(params), copied(buffers)
        return params, buffers

    def make():
        return module(MOON(mu, temperature, point), batchnorm=batchnorm)

    both = Both(run, make, rounds=4)
    both.assert_trained_as(train)
    for client, (params, buffers) in previous.items():
        both.assert_kept(client, {**params, **buffers}, "previous")


def test_limits(run):
    """In the first round of all clients, it is FedAvg bit for bit."""
    plain, strong = module(), module(MOON(5.0))
    run(plain, rounds=1)
    run(strong, rounds=1)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, strong.state_dict()[name])
    z = torch.randn(4, 3, dtype=torch.float64)
    other = torch.randn(4, 3, dtype=torch.float64)
    loss = model_contrastive_loss(z, other, other, 0.5)
    torch.testing.assert_close(loss, torch.full_like(loss, math.log(2)))
    far = model_contrastive_loss(z, -z, z, 0.01)  # 200 in the exponent
    torch.testing.assert_close(far, torch.full_like(far, 200.0))


def ending_with(last, point=None):
    """A module with a functional layer before the classifier."""
    layers = {"one": nn.Linear(6, 4), "two": nn.Linear(4, 3), "last": last}
    net = Written(lambda net, x: net.last(net.two(net.one(x).relu_())), **layers)
    return ClientModule(net, [MOON(point=point)], sgd()).double()


def test_representation_is_found_or_refused(run):
    for last in (nn.Identity(), nn.LogSoftmax(1)):
        with pytest.raises(FederationError, match="set point to the name of a module"):
            run(ending_with(last), rounds=1)
    for point in ("last", "three"):
        with pytest.raises(FederationError, match="point"):
            run(ending_with(nn.LogSoftmax(1), point))
    run(ending_with(nn.Linear(3, 3)), rounds=2)
