"""Before the first round: what vmap refuses, what it gets wrong in silence, what is harmless."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import Metric

from lightning_fl.federation import self_check
from written import Written


class Total(Metric):
    """A metric that vmap does not complain of."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value):
        self.total = self.total + value

    def compute(self):
        return self.total


@pytest.fixture
def made(tiny):
    """A module with a net, and a step that a test replaces."""

    class Module(tiny.kind):
        def training_step(self, batch, batch_idx):
            outputs = self.net(batch[0])
            return self.step(outputs, F.cross_entropy(outputs, batch[1]))

    def make(net=None, step=lambda module, outputs, loss: loss):
        module = tiny(Module, net=net or mlp())
        module.step, module.metric, module.calls = step.__get__(module), Total(), 0
        vars(module)["decayed"] = list(module.parameters())
        return module

    return make


def mlp(*layers):
    return lambda: nn.Sequential(nn.Linear(6, 6), *layers, nn.Linear(6, 3))


def drop(net, x):
    """Make noise by a function instead of a layer."""
    return F.dropout(F.dropout(x, 0.3, net.training), 0.3, net.training)


class Mean(nn.Module):
    """A buffer is written to in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


def noise(function):
    return lambda module, outputs, loss: loss + function(outputs).square().mean()


NETS = {
    "in place": mlp(nn.ReLU(inplace=True)),
    "norms": mlp(nn.LayerNorm(6), nn.Dropout(0.5), nn.GELU()),
    "convolution": mlp(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 6)),
    "a buffer": mlp(Mean()),
    "noise of a net": mlp(Written(drop)),
}
STEPS = {
    "noise": noise(torch.randn_like),
    "gumbel": noise(F.gumbel_softmax),
    "permutation": noise(lambda x: x[torch.randperm(len(x))]),
    "losses": lambda m, outputs, loss: vars(m).setdefault("notes", []).append(1.0) or loss,
    "a part in float32": lambda m, outputs, loss: loss + outputs.float().square().mean().to(loss),
}


CASES = [(net, None) for net in NETS.values()] + [(None, step) for step in STEPS.values()]


@pytest.mark.parametrize(("net", "step"), CASES, ids=[*NETS, *STEPS])
def test_supported_steps_are_vectorized(train, made, net, step):
    train(made(net, **({} if step is None else {"step": step})), 3, rounds=1)  # no warning


def test_a_step_that_does_not_support_float64_is_vectorized(train, made):
    def casts():
        return Written(lambda net, x: net.layer(x.float()), layer=nn.Linear(6, 3))

    train(made(casts).float(), 3, rounds=1)


def recurrent():
    layers = {"rnn": nn.LSTM(6, 4), "head": nn.Linear(4, 3)}
    return Written(lambda net, x: net.head(net.rnn(x)[0]), **layers)


def words(**options):
    """Return a net with padding by the function, which vmap gets wrong, or by the layer."""

    def forward(net, x):
        x = x.abs().clamp(max=4).long()
        return net.head(F.embedding(x, net.words.weight, padding_idx=0).mean(1))

    return Written(forward, words=nn.Embedding(5, 4, **options), head=nn.Linear(4, 3))


def branch(module, outputs, loss):
    return loss * 2 if loss > 1 else loss


def metric(module, outputs, loss):
    module.metric.update(loss.detach())
    return loss


def in_a_list(module, outputs, loss):
    return loss + sum(p.square().sum() for p in module.decayed)


def counts(module, outputs, loss):
    module.calls += 1
    return loss / module.calls


def keeps(module, outputs, loss):
    module.last = outputs.detach()
    return loss


REFUSED = {
    "LSTM": (recurrent, None, "RuntimeError: .*lstm"),
    "padding by the layer": (lambda: words(padding_idx=0), None, "an Embedding with max_norm or p"),
    "padding by the function": (words, None, "uses aten.embedding, whose gradients"),
    "item": (mlp(), lambda m, o, x: x * (2 if x.item() > 1 else 1), "RuntimeError: .*item"),
    "a branch": (mlp(), branch, "RuntimeError: .*data-dependent control flow"),
    "a metric": (mlp(), metric, "training_step updates the metric Total"),
    "no loss": (mlp(), lambda m, outputs, loss: None, "no loss"),
    "parameters in a list": (mlp(), in_a_list, "its vectorized step gives different results"),
    "a list and noise": (mlp(nn.Dropout()), in_a_list, "vectorized step gives different results"),
    "bernoulli": (
        mlp(),
        lambda module, outputs, loss: loss * torch.bernoulli(outputs.detach().sigmoid()).mean(),
        "same randomness",
    ),
    "a distribution": (
        mlp(),
        noise(lambda x: torch.distributions.Normal(x, x.exp()).rsample()),
        "different inplace randomness|data-dependent control flow",  # the second: torch 2.6
    ),
    "Python": (mlp(), lambda m, o, loss: loss * random.random(), "numbers with Python or NumPy"),
    "NumPy": (mlp(), lambda m, o, loss: loss * np.random.rand(), "numbers with Python or NumPy"),
    "a counter": (mlp(), counts, "depends on what an earlier step has left"),
    "a tensor in an attribute": (mlp(), keeps, "stores tensors in the attribute last"),
}


def padded(x):
    words = (x.detach()[:, 0].cumsum(0) - 1).clamp(0, 1).long()
    return F.embedding(words, x, padding_idx=0).square().sum()


#: Operations that are wrong under vmap if entries are equal, or are those of padding.
WRONG = {
    "embedding": padded,
    **{name: getattr(torch, name) for name in ("max", "min", "median", "nanmedian")},
}


@pytest.mark.parametrize("name", WRONG)
def test_operations_that_are_known_to_be_wrong_are_so_in_this_version(name):
    """If one is right, remove it from _WRONG_UNDER_VMAP."""
    x = torch.ones(2, 2, 3, dtype=torch.float64).requires_grad_()
    stacked, *_ = torch.autograd.grad(torch.func.vmap(WRONG[name])(x).sum(), x)
    each, *_ = torch.autograd.grad(sum(map(WRONG[name], x)), x)
    assert not torch.allclose(stacked, each)
    known = {str(op.overloadpacket) for op in self_check._WRONG_UNDER_VMAP}
    assert known == {f"aten.{wrong}" for wrong in WRONG}


@pytest.mark.parametrize("name", WRONG)
def test_an_operation_that_is_wrong_for_other_values_only_is_not_vectorized(train, made, name):
    def step(module, outputs, loss):
        with torch.no_grad():
            outputs.max()  # without a gradient
        return loss + WRONG[name](outputs[1:3])

    with pytest.warns(UserWarning, match=f"not at once: training_step uses aten.{name}, whose gra"):
        train(made(step=step), 3, rounds=1)


@pytest.mark.filterwarnings("ignore:the training of the first client|.*returned `None`|.*is none:")
@pytest.mark.parametrize(("net", "step", "why"), REFUSED.values(), ids=REFUSED)
def test_what_trains_one_client_after_another_and_why(train, made, net, step, why):
    options = {} if step is None else {"step": step}
    with pytest.warns(UserWarning, match=f"one client after another, not at once: .*({why})"):
        train(made(net, **options), 3, rounds=1)


def test_what_on_client_start_sets_is_there(train, made):
    class Begins:
        def on_client_start(self):
            self.scale = 0.5

    module = made(step=lambda module, outputs, loss: loss * module.scale)
    module.__class__ = type("Begins", (Begins, type(module)), {})
    train(module, 3, rounds=1)  # a warning would be an error


def test_the_check_changes_nothing(train, tiny, flat):
    ends = []
    for check in (True, False):
        module = tiny(net=mlp(nn.Dropout(), Mean()))
        train(module, 3, federation={"check": check})
        ends.append([*flat(module).tolist(), *module.net[2].mean.tolist()])
    assert ends[0] == ends[1]


def test_a_large_module_is_vectorized_unchecked(train, made, monkeypatch, caplog):
    monkeypatch.setattr("lightning_fl.federation.vectorize.MAX_BYTES", 100)
    monkeypatch.setattr(self_check, "VectorizedCheck", None)
    with caplog.at_level("INFO", "lightning.pytorch"):
        train(made(), 3)
    assert "too large to check vectorized steps" in caplog.text
