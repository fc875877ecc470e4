"""FedSAM: by hand, its limits, and what it refuses."""

import pytest
import torch

from by_hand import Both, copied, moved, network, sgd, task_gradient
from lightning_fl.functional.sharpness import ascent
from lightning_fl.objectives import FedSAM


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("batchnorm", [False, True])
def test_by_hand(run, batchnorm, adaptive):
    """The first pass leaves the running statistics; one norm over all parameters of a client."""

    def make():
        return FedSAM(network(batchnorm), 0.4, adaptive, 0.3, sgd(weight_decay=0.1)).double()

    def scale(p):
        return p.abs() + 0.3 if adaptive and p.ndim > 1 else torch.ones_like(p)

    def train(client, w, buffers, batches):
        for batch in batches:
            g = task_gradient(w, copied(buffers), batch)
            flat = torch.cat([(scale(w[n]) * g[n]).flatten() for n in w])
            near = {n: w[n] + 0.4 * scale(w[n]) ** 2 * g[n] / flat.norm() for n in w}
            g = task_gradient(near, buffers, batch)
            w = moved(w, {n: g[n] + 0.1 * w[n] for n in w})
        return w, buffers

    Both(run, make, rounds=2).assert_trained_as(train)


def test_a_gradient_of_zero_moves_nothing():
    zero = {"w": torch.zeros(2, 2)}
    for offset in (None, 0.1):
        assert torch.equal(ascent({"w": torch.ones(2, 2)}, zero, 0.5, offset)["w"], zero["w"])


def test_frozen_parameters_stay(run):
    user = FedSAM(network(True), optimizer=sgd()).double()
    user.net[0].requires_grad_(False)
    before = user.net[0].weight.detach().clone()
    run(user, rounds=1)
    assert torch.equal(user.net[0].weight, before)
