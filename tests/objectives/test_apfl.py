"""APFL: by hand, its limits, and what it refuses."""

import pytest
import torch

from by_hand import LR, Both, copied, local, module, moved, start, task_gradient, task_loss
from lightning_fl.callbacks import PersonalizedEvaluation
from lightning_fl.objectives import APFL


@pytest.mark.parametrize(("batchnorm", "alpha", "decay"), [(False, 0.97, 0.0), (True, 0.5, 0.1)])
def test_by_hand(run, batchnorm, alpha, decay):
    """From 0.97 alpha reaches its bound, so that its next step begins at 1. It does not decay."""

    def make():
        return module(APFL(alpha), batchnorm=batchnorm, weight_decay=decay)

    scores = PersonalizedEvaluation(steps=0)
    both = Both(run, make, [scores])
    personal, bounded = {}, 0

    def train(client, w, buffers, batches):
        nonlocal bounded
        new = w, copied(buffers), torch.tensor(alpha, dtype=torch.float64)
        v, statistics, a = personal.get(client, new)
        for batch in batches:
            v_, w_ = (
                {n: p.detach().clone().requires_grad_() for n, p in model.items()}
                for model in (v, w)
            )
            a_ = a.clone().requires_grad_()
            mixture = {n: a_ * v_[n] + (1 - a_) * w_[n] for n in v_}
            loss = task_loss(mixture, statistics, batch)
            *grads, slope = torch.autograd.grad(loss, [*v_.values(), a_])
            grads = {n: g + decay * v[n] for n, g in zip(v, grads, strict=True)}
            v = moved(v, grads)
            grads = task_gradient(w, buffers, batch)
            w = moved(w, {n: g + decay * w[n] for n, g in grads.items()})
            bounded += not 0 <= a - LR * slope <= 1
            a = (a - LR * slope).clamp(0, 1)
        personal[client] = v, statistics, a
        return w, buffers

    params, _ = both.assert_trained_as(train)
    assert bounded or alpha < 0.9
    for client, (v, statistics, a) in personal.items():
        both.assert_kept(client, {**v, **statistics})
        for loop in (both.loop, both.vectorized):
            weight = loop.store.get(client)["buffer.terms.0.weight"]
            torch.testing.assert_close(weight, a, rtol=0, atol=1e-12)
        mixture = {n: a * v[n] + (1 - a) * params[n] for n in v}
        assert scores.rows[client]["kept"] == both.accuracy(client, mixture, statistics)


def test_limits(run):
    """A constant alpha of 1 is local training."""
    shared, alone = module(APFL(0.0, False)), module(APFL(1.0, False))
    v, statistics = start(alone.net)
    unused, rounds, _ = run(shared)
    loop, _, _ = run(alone)
    client = next(c for c in rounds[0] if c in rounds[1])
    for name, value in v.items():
        assert torch.equal(local(unused, client)[name], value)  # alpha is a factor of its steps
    for clients in rounds:
        for batch in clients.get(client, ()):
            v = moved(v, task_gradient(v, statistics, batch))
    for name, value in v.items():
        torch.testing.assert_close(local(loop, client)[name], value, rtol=0, atol=1e-12)
    assert loop.store.get(client)["buffer.terms.0.weight"] == 1
