"""The local step of all clients: mapped, one after another, and by graphs."""

import functools

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_fl import ClientModule
from lightning_fl.policies import Schedule
from lightning_fl.runners.step_module import StepModule
from lightning_fl.types import FederationError
from linear import Linear

sgd = functools.partial(torch.optim.SGD, lr=0.1)


momentum = functools.partial(sgd, momentum=0.9)


@pytest.mark.parametrize("steps_per_batch", [1, 3])
@pytest.mark.parametrize("lr", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "nesterov": True}])
def test_a_graph_has_the_clients_rate_in_every_step(
    agree, tiny, data, monkeypatch, steps_per_batch, lr, options
):
    """Also in the last one, which is made inside the optimizer's own; not compiled, for speed."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    agree(
        lambda: tiny(tiny.kind, lambda params: torch.optim.SGD(params, lr=0.1, **options)),
        group_size=(4,),
        steps_per_batch=steps_per_batch,
        datamodule=data,
        compile=True,
        federation={"policy": Schedule(lr=lr, num_steps=3)},
    )


@pytest.mark.parametrize("optimizer", [sgd, momentum])
def test_a_graph_that_cannot_be_compiled_loses_no_update(agree, tiny, data, monkeypatch, optimizer):
    def compile(function, **options):
        def fail(*args, **kwargs):
            raise RuntimeError("there is no compiler")

        return fail

    monkeypatch.setattr(torch, "compile", compile)
    with pytest.warns(UserWarning, match="steps are not compiled: .*there is no compiler"):
        agree(
            lambda: tiny(tiny.kind, optimizer),
            group_size=(4,),
            steps_per_batch=3,
            datamodule=data,
            compile=True,
            federation={"policy": Schedule(num_steps=3)},
        )


@pytest.fixture
def uncompiled(monkeypatch):
    """Graphs that are not compiled, for speed: what they compute is the same."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


class Unused(Linear):
    """Has a layer that its step does not use."""

    def __init__(self, kind, **options):
        super().__init__()
        self.extra = nn.Linear(4, 3)
        self.kind, self.options = kind, options

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=0.1, weight_decay=0.1, **self.options)


@pytest.mark.filterwarnings("ignore:steps are not compiled")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_what_has_no_gradient_does_not_decay_in_a_graph(agree, tiny, data, uncompiled, kind):
    federation = {"policy": Schedule(num_steps=3)}
    agree(
        lambda: tiny(Unused, kind),
        group_size=(4,),
        datamodule=data,
        compile=True,
        federation=federation,
    )


class FirstRound(Unused):
    """Uses its second layer in the first round only."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return (
            loss + self.extra(batch[0][:, :4]).square().mean() if not self.current_epoch else loss
        )


@pytest.fixture
def traced(monkeypatch):
    """Graphs that torch makes but does not compile, for speed."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile(f, backend="eager", dynamic=False))


@pytest.mark.filterwarnings("ignore:steps are not compiled")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_layer_that_later_steps_do_not_use_does_not_decay(agree, tiny, data, traced, kind):
    federation = {"policy": Schedule(num_steps=3)}
    agree(
        lambda: tiny(FirstRound, kind), (4,), datamodule=data, federation=federation, compile=True
    )


class Damp(Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.1)


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.filterwarnings("ignore:.*hooks of the backward pass get the stacked")
def test_callbacks_that_change_gradients_do_so_in_every_step(
    agree, tiny, data, uncompiled, compile
):
    agree(
        tiny,
        group_size=(4,),
        steps_per_batch="auto",
        datamodule=data,
        compile=compile,
        callbacks=[Damp()],
        federation={"policy": Schedule(num_steps=4)},
    )


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_half_precision_is_no_reason_to_train_one_after_another(train, tiny, flat, precision):
    one, many = tiny().float(), tiny().float()
    train(one, precision=precision, federation={"policy": Schedule(num_steps=3)})
    # It would warn that the vectorized step gives different results.
    train(many, 3, precision=precision, federation={"policy": Schedule(num_steps=3)})
    torch.testing.assert_close(flat(many), flat(one), rtol=0, atol=0.02)


class Teacher(Linear):
    """Keeps an average of itself in frozen parameters, which its step writes to."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(6, 3).requires_grad_(False)

    def losses(self, batch):
        with torch.no_grad():
            self.teacher.weight.mul_(0.5).add_(self.net.weight, alpha=0.5)
        near = (self.net(batch[0]) - self.teacher(batch[0])).square().mean(1)
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none") + near

    def training_step(self, batch, batch_idx):
        return self.losses(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Weighs(StepModule):
    """Knows weights, so that it is asked whether it mixes samples."""

    _knows_weights, _sample_weight = True, None

    def training_step(self, batch, batch_idx):
        losses, weight = self.losses(batch), self._sample_weight
        return losses.mean() if weight is None else losses @ weight


class WeighingTeacher(Weighs, Teacher):
    """The same, in padded batches."""


@pytest.mark.parametrize("kind", [Teacher, WeighingTeacher])
@pytest.mark.parametrize("group_size", [7, "auto"])
def test_frozen_parameters_that_a_step_writes_to_are_kept_in_ragged_batches(
    agree, tiny, kind, group_size
):
    agree(lambda: tiny(kind), group_size=(group_size,))


class Centerd(nn.Module):
    """Takes the mean over the samples of a batch, and is no BatchNorm."""

    def forward(self, x):
        return x - x.mean(0)


def test_a_net_that_mixes_samples_is_not_filled_up(agree):
    def make():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 5), Centerd(), nn.Linear(5, 3))
        return ClientModule(net, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).double()

    agree(make, group_size=(3, 7))


class Listed(Linear):
    """Reaches its parameters by a list."""

    def __init__(self):
        super().__init__()
        self.decayed = list(self.net.parameters())

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * sum(p.square().sum() for p in self.decayed)


def test_parameters_that_are_reached_by_a_list_train_one_client_after_another(agree, tiny, ragged):
    with pytest.warns(UserWarning, match="gives different results"):
        agree(lambda: tiny(Listed), group_size=(4,), datamodule=ragged)


class Forked(Linear):
    """Uses one of two layers, by the labels of the batch."""

    def __init__(self, optimizer):
        super().__init__(nn.Identity())
        self.optimizer = optimizer
        self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

    def chosen(self, batch):
        return self.one if batch[1].double().mean() > 1 else self.other

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.chosen(batch)(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class ForkedBySize(Forked):
    """Uses one of two layers, by the size of the batch."""

    def chosen(self, batch):
        return self.one if len(batch[1]) > 7 else self.other


decayed = functools.partial(momentum, weight_decay=0.1)


def test_a_layer_that_only_some_clients_use_is_refused(train, tiny, ragged):
    federation = {"policy": Schedule(num_steps=5)}
    with pytest.raises(FederationError, match=r"it uses (one|other)\.bias for some clients only"):
        train(tiny(ForkedBySize, sgd), 4, datamodule=ragged(), federation=federation)


def test_a_layer_that_is_chosen_by_the_samples_trains_one_client_after_another(agree, tiny, ragged):
    with pytest.warns(UserWarning, match="one client after another, .*control flow"):
        agree(lambda: tiny(Forked, momentum), (4,), datamodule=ragged)


class Narrow(Forked):
    """Uses both layers, but for small batches only one."""

    def training_step(self, batch, batch_idx):
        out = self.one(batch[0])
        if len(out) > 7:
            out = out + self.other(batch[0])
        return F.cross_entropy(out, batch[1])


@pytest.mark.filterwarnings("ignore:steps are not compiled")
def test_a_graph_for_smaller_batches_leaves_out_what_they_do_not_use(
    agree, tiny, data, blobs, uncompiled
):
    agree(
        lambda: tiny(Narrow, decayed),
        group_size=(4,),
        steps_per_batch=(1, 3),
        datamodule=lambda: data(blobs(60), num_clients=4, batch_size=10),
        compile=True,
        federation={"policy": Schedule(num_steps=4)},
    )


class Addresses(Linear):
    """Notes where the first parameter of each client lies."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_client_start(self):
        self.found.append(self.net.weight.data_ptr())


def test_groups_of_other_sizes_train_in_the_same_memory(train, tiny, data):
    """A CUDA graph can be launched again where nothing has moved."""
    module = tiny(Addresses)
    train(module, 3, datamodule=data(num_clients=5), federation={"policy": Schedule()})
    assert len(set(module.found)) == 3
    assert module.found[3] == module.found[0]
