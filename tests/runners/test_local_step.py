"""A module's training step as a function: what it is given goes in, what it makes comes out."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_fl.runners.local_step import LocalStep
from lightning_fl.runners.step_module import StepModule


class Module(StepModule):
    """It uses everything that a step may use."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.federated_global_parameters, self._sample_weight = {}, None

    def training_step(self, batch, batch_idx):
        self.seen = self.seen + 1
        losses = F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")
        weight, start = self._sample_weight, self.federated_global_parameters
        loss = losses.mean() if weight is None else losses @ weight
        if start:
            loss = loss + (self.net[0].weight - start["net.0.weight"]).square().sum()
        self.log("loss", loss, on_epoch=True)
        self.log("two", 2.0)
        self._record(loss, len(losses))
        return {"loss": loss, "extra": 1}

    def _record(self, loss, count):
        pass


@pytest.fixture
def module():
    torch.manual_seed(0)
    return Module().double()


def given(module, k, fixed, weight, b=6):
    """Tensors of k clients: parameters and buffers that differ, samples, and the rest."""
    random = torch.Generator().manual_seed(1)

    def stack(tensors):
        return {
            n: torch.stack([t * (1 + i / 8) if t.is_floating_point() else t + i for i in range(k)])
            for n, t in tensors
        }

    params = {n: p.detach() for n, p in stack(module.named_parameters()).items()}
    buffers = stack(module.named_buffers())
    batch = {
        "x": torch.randn(k, b, 4, generator=random, dtype=torch.float64),
        "y": torch.randint(3, (k, b), generator=random),
    }
    fixed = {n: p + 1 for n, p in params.items()} if fixed else {}
    weights = torch.rand(k, b, generator=random, dtype=torch.float64) if weight else None
    return params, buffers, fixed, batch, weights


def each(tensors, row):
    """One client of what :func:`given` returned."""
    *stacks, weight = tensors
    own = [{n: t[row] for n, t in stack.items()} for stack in stacks]
    return *own, None if weight is None else weight[row]


def as_it_is(module, tensors):
    """The step of the module itself, with these tensors in it."""
    params, buffers, fixed, batch, weight = tensors
    copied = copy.deepcopy(module)
    copied.load_state_dict({**params, **buffers})
    copied.federated_global_parameters, copied._sample_weight = fixed, weight
    copied.log = lambda *args, **options: None
    loss = copied.training_step(batch, 0)["loss"]
    loss.backward()
    grads = {n: p.grad for n, p in copied.named_parameters()}
    return loss.detach(), grads, dict(copied.named_buffers())


@pytest.mark.parametrize(("k", "is_mapped"), [(1, False), (1, True), (3, True)])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("weight", [False, True])
def test_the_step_of_many_is_the_step_of_each(module, k, is_mapped, fixed, weight):
    tensors = given(module, k, fixed, weight)
    leaves = {n: p.clone().requires_grad_() for n, p in tensors[0].items()}
    found = LocalStep(module).many(leaves, *tensors[1:], is_mapped=is_mapped)
    found.loss.sum().backward()
    assert found.loss.shape == (k,)
    for row in range(k):
        loss, grads, buffers = as_it_is(module, each(tensors, row))
        close = {"atol": 1e-12, "rtol": 0}
        torch.testing.assert_close(found.loss[row].detach(), loss, **close)
        torch.testing.assert_close(found.logs["loss"][0][row], loss, **close)
        torch.testing.assert_close(found.recorded["loss"][row], loss, **close)
        for name, grad in grads.items():
            torch.testing.assert_close(leaves[name].grad[row], grad, **close)
        assert found.buffers.keys() == buffers.keys()
        for name, buffer in buffers.items():
            torch.testing.assert_close(found.buffers[name][row], buffer, **close)
    assert found.logs["two"][0].tolist() == [2.0] * k
