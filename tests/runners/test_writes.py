"""What a module writes to its own tensors, in its step and in a client's hooks."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_fl.aggregators import FedAvg
from lightning_fl.types import FederationError
from linear import Linear
from own_starts import OwnStarts

pytestmark = pytest.mark.filterwarnings("ignore:.* trains one client after another")


@pytest.fixture
def agrees(agree, ragged):
    """Compare with sequential training; no client has a batch of one sample, for BatchNorm."""
    return functools.partial(agree, datamodule=lambda: ragged(drop_last=True))


class Averaging(Linear):
    """A student and a teacher: a frozen copy that follows the student in ``training_step``."""

    def __init__(self, write, since=0):
        # A bias before BatchNorm would move by rounding alone, which the figures of bytes show.
        first = nn.Linear(6, 4, bias=False)
        super().__init__(nn.Sequential(first, nn.BatchNorm1d(4), nn.Linear(4, 3)))
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.write, self.since = write, since

    def training_step(self, batch, batch_idx):
        if self.current_epoch >= self.since:
            pairs = zip(self.teacher.parameters(), self.net.parameters(), strict=True)
            for target, source in pairs:
                self.write(target, source)
        outputs = self.net(batch[0])
        return F.cross_entropy(outputs, batch[1]) + F.mse_loss(outputs, self.teacher(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def assigned(target, source):
    target.data = target.data * 0.7 + source.data * 0.3


def in_place(target, source):
    target.data.mul_(0.7).add_(source.data, alpha=0.3)


@torch.no_grad()
def without_gradient(target, source):
    target.mul_(0.7).add_(source, alpha=0.3)


def copied(target, source):
    target.detach().copy_(0.7 * target + 0.3 * source.detach())


@pytest.mark.parametrize(
    ("write", "group_size", "since"),
    [
        (assigned, (1, 3, 7), 0),
        (assigned, ("auto",), 0),
        (in_place, (3,), 0),
        (without_gradient, ("auto",), 0),
        (without_gradient, (3,), 1),
        (copied, (3,), 0),
    ],
)
def test_writes_to_frozen_parameters_are_kept(agrees, tiny, write, group_size, since):
    options = {"group_size": group_size, "most_steps": 2, "rounds": 3}
    agrees(lambda: tiny(Averaging, write, since), **options)


@pytest.mark.parametrize("group_size", [1, 3])
def test_a_later_step_that_vmap_does_not_support_ends_the_run(train, tiny, ragged, group_size):
    with pytest.raises(RuntimeError, match=r"accessing `data` .*\n.* --ckpt_path=last"):
        train(tiny(Averaging, assigned, since=1), group_size, datamodule=ragged(drop_last=True))


def test_writes_to_frozen_parameters_are_kept_where_compilation_fails(agrees, tiny):
    """torch cannot compile such a step; it says so and the step stays right."""
    with pytest.warns(UserWarning, match="steps are not compiled"):
        agrees(lambda: tiny(Averaging, without_gradient), group_size=(3,), compile=True)


class Clamping(Linear):
    """Keeps its weights in bounds, before or behind the forward pass."""

    def __init__(self, clamp, is_first):
        net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
        super().__init__(net, functools.partial(torch.optim.SGD, lr=0.5))
        self.clamp, self.is_first = clamp, is_first

    def training_step(self, batch, batch_idx):
        if self.is_first:
            self.clamp(self.net[0].weight)
        loss = super().training_step(batch, batch_idx)
        if not self.is_first:
            self.clamp(self.net[0].weight)
        return loss


def clamp_data(weight):
    weight.data.clamp_(-0.2, 0.2)


def clamp_anew(weight):
    weight.data = weight.data.clamp(-0.2, 0.2)


@torch.no_grad()
def clamp_in_place(weight):
    weight.clamp_(-0.2, 0.2)


@pytest.mark.parametrize(
    ("clamp", "is_first"),
    [(clamp_data, True), (clamp_in_place, True), (clamp_data, False), (clamp_anew, False)],
)
def test_writes_to_trained_parameters_are_kept(agrees, tiny, clamp, is_first):
    with pytest.warns(UserWarning, match=r"writes to the trained parameter net\.0\.weight"):
        agrees(lambda: tiny(Clamping, clamp, is_first), group_size=(3,), most_steps=2)


class Hooked(Linear):
    """Writes to every kind of tensor when a client begins and ends, and reads what it may."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("moved", torch.zeros(()))
        self.register_buffer("clients", torch.zeros((), dtype=torch.int64))
        self.federated_global_parameters = {}

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]) * self.frozen, batch[1])

    def on_client_start(self):
        self.frozen.data = self.frozen.data + 0.25
        with torch.no_grad():
            self.net[2].bias.add_(0.01)

    def on_client_end(self):
        start = self.federated_global_parameters["net.0.weight"]
        self.moved = self.moved + (self.net[0].weight.detach() - start).norm()
        self.net[0].weight.data.clamp_(-0.3, 0.3)
        self.net[2].weight.data = self.net[2].weight.data * 0.9
        self.frozen.data.mul_(1.1)
        self.clients += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


@pytest.mark.parametrize(("rule", "steps"), [(FedAvg, 1), (FedAvg, 3), (OwnStarts, 3)])
def test_writes_of_client_hooks_are_kept(agrees, tiny, rule, steps):
    federation = {"aggregator": rule()}
    agrees(lambda: tiny(Hooked), most_steps=steps, rounds=3, federation=federation)


# --- buffers that a federation cannot manage ------------------------------------------------------


class Growing(Averaging):
    """Collects outputs in a buffer, which becomes longer."""

    change = r"seen from \(0, 3\)"

    def __init__(self):
        super().__init__(in_place)
        self.register_buffer("seen", torch.zeros(0, 3, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        self.seen = torch.cat([self.seen, self.net(batch[0]).detach()])
        return super().training_step(batch, batch_idx)


class Resizing(Growing):
    """As Growing, in place, as observers of quantization do."""

    def training_step(self, batch, batch_idx):
        self.seen.resize_(len(self.seen) + 1, 3)
        return Averaging.training_step(self, batch, batch_idx)


class Fractions(Averaging):
    """A counter that is an integer at first, and a moving average later."""

    change = "average from .*int64 to"

    def __init__(self):
        super().__init__(in_place)
        self.register_buffer("average", torch.tensor(0))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss + self.average


@pytest.mark.parametrize("kind", [Growing, Resizing, Fractions])
@pytest.mark.parametrize("group_size", [None, 1, 3])
@pytest.mark.filterwarnings("ignore")
def test_a_buffer_that_changes_its_kind_is_refused_by_name(train, tiny, ragged, kind, group_size):
    module = tiny(kind)
    memory = [p.data_ptr() for p in module.parameters()]
    with pytest.raises(FederationError, match=f"of its buffer {kind.change}") as info:
        train(module, group_size, datamodule=ragged(drop_last=True))
    assert not any("failed" in note for note in info.value.__notes__)
    assert [p.data_ptr() for p in module.parameters()] == memory  # not that of the stacks


class Late(Averaging):
    """Registers a buffer in its first step."""

    def training_step(self, batch, batch_idx):
        if not hasattr(self, "factor"):
            self.register_buffer("factor", torch.ones(()), persistent=False)
        self.factor.mul_(0.9)
        return super().training_step(batch, batch_idx) * self.factor


@pytest.mark.parametrize("group_size", [None, 3])
@pytest.mark.filterwarnings("ignore")
def test_a_buffer_that_is_registered_during_the_fit_is_named(train, tiny, ragged, group_size):
    with pytest.warns(UserWarning, match="registered the buffer factor during the fit"):
        train(tiny(Late, in_place), group_size, datamodule=ragged(drop_last=True))
