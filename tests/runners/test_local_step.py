"""A module's training step as a function: what it is given goes in, what it makes comes out."""

import copy

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MeanMetric

from lightning_fl.runners.local_step import LocalStep
from lightning_fl.runners.step_module import StepModule


class Module(StepModule):
    """It uses everything that a step may use."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.federated_global_parameters, self._sample_weight, self.notes = {}, None, []
        self.metric = MeanMetric()

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
        self.notes.append((loss, count))


@pytest.fixture
def module():
    torch.manual_seed(0)
    return Module().double()


def given(module, k=3, b=6, fixed=None, weight=False):
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
    one = dict(module.named_parameters())
    fixed = {None: {}, "shared": {n: p.detach() + 1 for n, p in one.items()}, "own": {
        n: p + 1 for n, p in params.items()}}[fixed]  # fmt: skip
    weights = torch.rand(k, b, generator=random, dtype=torch.float64) if weight else None
    return params, buffers, fixed, batch, weights


def each(tensors, row, fixed):
    """One client of what :func:`given` returned."""
    params, buffers, start, batch, weight = tensors
    start = {n: t[row] for n, t in start.items()} if fixed == "own" else start
    params, buffers, batch = ({n: t[row] for n, t in d.items()} for d in (params, buffers, batch))
    return params, buffers, start, batch, None if weight is None else weight[row]


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


CASES = [(f, w) for f in (None, "shared", "own") for w in (False, True)]


@pytest.mark.parametrize(("k", "is_mapped"), [(1, False), (1, True), (3, True)])
@pytest.mark.parametrize(("fixed", "weight"), CASES)
def test_the_step_of_many_is_the_step_of_each(module, k, is_mapped, fixed, weight):
    tensors = given(module, k, fixed=fixed, weight=weight)
    leaves = {n: p.clone().requires_grad_() for n, p in tensors[0].items()}
    how = {"fixed_is_shared": fixed != "own", "is_mapped": is_mapped}
    found = LocalStep(module).many(leaves, *tensors[1:], **how)
    found.loss.sum().backward()
    assert found.loss.shape == (k,)
    for row in range(k):
        loss, grads, buffers = as_it_is(module, each(tensors, row, fixed))
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


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("error", [False, True])
def test_nothing_of_it_stays(module, k, error):
    tensors = given(module, k=k, fixed="own", weight=True)
    step, state = LocalStep(module), copy.deepcopy(module.state_dict())
    before = [{n: t.clone() for n, t in part.items()} for part in tensors[:3]]
    attributes, parameters = dict(vars(module)), dict(module.named_parameters())
    if error:
        tensors[3]["y"] = tensors[3]["y"].float()
        with pytest.raises(RuntimeError):
            step.many(*tensors, fixed_is_shared=False)
    else:
        step.many(*tensors, fixed_is_shared=False)
    assert all(torch.equal(module.state_dict()[name], state[name]) for name in state)
    assert vars(module).keys() == attributes.keys()
    assert module.federated_global_parameters == {}
    assert module._sample_weight is None
    assert module.notes == []
    assert module.log == attributes.get("log", module.log)
    assert all(p is parameters[n] for n, p in module.named_parameters())
    for part, then in zip(tensors[:3], before, strict=True):
        assert all(torch.equal(t, then[n]) for n, t in part.items())


def test_a_module_without_such_attributes_does_not_get_them(module):
    class Plain(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 3)

        def training_step(self, batch, batch_idx):
            assert not {"_sample_weight", "_record"} & vars(self).keys()
            return F.cross_entropy(self.net(batch["x"]), batch["y"])

    plain = Plain().double()
    params, _, _, batch, _ = given(module)
    params = {n: torch.stack([p.detach()] * 3) for n, p in plain.named_parameters()}
    found = LocalStep(plain).many(params, {}, {}, batch, None, fixed_is_shared=True)
    assert found.recorded == found.logs == found.buffers == {}
    assert found.loss.shape == (3,)


def test_options_of_what_is_logged_are_kept(module):
    step = LocalStep(module)
    step.many(*given(module), fixed_is_shared=True)
    assert step.log_options == {"loss": {"on_epoch": True}, "two": {}}
