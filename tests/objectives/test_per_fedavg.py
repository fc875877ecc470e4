"""Per-FedAvg: by hand, its limits, and what it refuses."""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch

from by_hand import Both, copied, moved, network, sgd, task_gradient, task_loss
from lightning_fl.callbacks import PersonalizedEvaluation
from lightning_fl.objectives import PerFedAvg
from lightning_fl.partition import IID
from lightning_fl.types import FederationError


def module(batchnorm=True, inner_lr=0.4, hessian=False):
    return PerFedAvg(network(batchnorm), inner_lr, hessian, sgd()).double()


@pytest.mark.parametrize("batchnorm", [False, True])
@pytest.mark.parametrize("hessian", [False, True])
def test_by_hand(run, batchnorm, hessian):
    """The Hessian by differentiating twice, as a matrix of its own samples."""
    a = 0.4

    def train(client, w, buffers, batches):
        for x, y in batches:
            at = [len(x) * i // (2 + hessian) for i in range(3 + hessian)]
            parts = [(x[i:j], y[i:j]) for i, j in pairwise(at)]
            adapted = moved(w, task_gradient(w, copied(buffers), parts[0]), a)
            grads = task_gradient(adapted, buffers, parts[-1])
            if hessian:
                leaves = [p.clone().requires_grad_() for p in w.values()]
                params = dict(zip(w, leaves, strict=True))
                loss = task_loss(params, copied(buffers), parts[1])
                g = torch.autograd.grad(loss, leaves, create_graph=True)
                product = sum((u * grads[n]).sum() for n, u in zip(w, g, strict=True))
                h = torch.autograd.grad(product, leaves)
                grads = {n: grads[n] - a * each for n, each in zip(w, h, strict=True)}
            w = moved(w, grads)
        return w, buffers

    scores = PersonalizedEvaluation(steps=0)
    # torch 2.14 maps the second derivative of BatchNorm wrongly, which the first step reveals.
    is_wrong = pytest.warns(UserWarning, match="one client after another")
    with is_wrong if batchnorm and hessian else nullcontext():
        both = Both(run, lambda: module(batchnorm, a, hessian), [scores], rounds=2)
    params, buffers = both.assert_trained_as(train)
    for client, row in enumerate(scores.rows):
        statistics = copied(buffers)
        batch = both.data.train.fetch(both.data.parts[client])
        one = moved(params, task_gradient(params, statistics, batch), a)
        assert row["kept"] == both.accuracy(client, one, statistics)


def test_without_an_inner_step_it_is_fedavg_on_the_last_part(run):
    def train(client, w, buffers, batches):
        for x, y in batches:
            half = len(x) // 2
            w = moved(w, task_gradient(w, buffers, (x[half:], y[half:])))
        return w, buffers

    Both(run, lambda: module(inner_lr=0.0), rounds=2).assert_trained_as(train)


def test_frozen_layers_do_not_adapt(run):
    user, other = module(), module()
    for each in (user, other):
        each.net[0].requires_grad_(False)
    before = user.net[0].weight.detach().clone()
    run(user, callbacks=[PersonalizedEvaluation(steps=0)])
    run(other, 3)
    assert torch.equal(user.net[0].weight, before)
    for one, two in zip(user.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


def test_no_batch_of_one_sample_is_left_for_the_adaptation(fit, data):
    """BatchNorm cannot train on it: client 0 has nine training samples in batches of at most 8."""
    scores = PersonalizedEvaluation(steps=0)
    datamodule = data(local_test_size=0.7, eval_batch_size=8, partition=IID(), drop_last=True)
    fit(module(), datamodule=datamodule, rounds=1, callbacks=[scores])
    assert [row["train_samples"] for row in scores.rows] == [9] * 4
    assert [len(y) for _, y in datamodule.samples_of(0)] == [5, 4]
    assert all(0 <= row["kept"] <= 1 for row in scores.rows)


def test_a_batch_that_cannot_be_divided_is_refused(fit, data):
    with pytest.raises(FederationError, match="into 3 parts, and a client has a batch of 2"):
        fit(module(hessian=True, batchnorm=False), datamodule=data(batch_size=7))
