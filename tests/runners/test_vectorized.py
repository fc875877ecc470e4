"""The local step of all clients: mapped, one after another, and by graphs."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_fl.contracts.step_module import StepModule
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError
from linear import Linear

sgd = functools.partial(torch.optim.SGD, lr=0.1)
momentum = functools.partial(sgd, momentum=0.9)


@pytest.mark.parametrize("most_steps", [1, 3])
@pytest.mark.parametrize("lr", [0.02, 0.5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.5, "dampening": 0.3, "maximize": True},
    ],
)
def test_a_graph_has_the_clients_rate_in_every_step(
    agree, tiny, data, uncompiled, most_steps, lr, options
):
    """Also in the last one, which is made inside the optimizer's own."""
    optimizer = functools.partial(sgd, **options)
    federation = {"policy": Schedule(lr=lr, num_steps=3)}
    given = {"compile": True, "federation": federation}
    agree(lambda: tiny(optimizer=optimizer), (1, 4), most_steps, data, **given)


@pytest.mark.parametrize("optimizer", [sgd, momentum])
def test_a_graph_that_cannot_be_compiled_loses_no_update(agree, tiny, data, monkeypatch, optimizer):
    def compile(function, **options):
        def fail(*args, **kwargs):
            raise RuntimeError("there is no compiler")

        return fail

    monkeypatch.setattr(torch, "compile", compile)
    with pytest.warns(UserWarning, match="steps are not compiled: .*there is no compiler"):
        agree(lambda: tiny(optimizer=optimizer), (4,), 3, data, compile=True, steps=3)


class Remembers(Linear):
    """A buffer has the samples of the last step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(4, 6))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) + self.net(self.last).square().mean()
        self.last = batch[0][:4]
        return loss


class LogsSamples(Linear):
    def training_step(self, batch, batch_idx):
        self.log("feature", batch[0][0, 0], on_epoch=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("kind", [Remembers, LogsSamples])
def test_what_a_step_keeps_of_its_samples_outlives_the_next(
    agree, tiny, data, uncompiled, kind, compile
):
    """Samples of the steps of a Lightning batch are fetched to the same memory."""
    options = {"federation": {"buffers": "server"}, "steps": 4, "compile": compile}
    agree(lambda: tiny(kind), (1, 4), 4, data, **options)


class Decays(Linear):
    """Uses its second layer, if at all, in the first round only; unused weights must not decay."""

    def __init__(self, kind, is_used):
        super().__init__(optimizer=functools.partial(kind, lr=0.1, weight_decay=0.1))
        self.extra, self.is_used = nn.Linear(4, 3), is_used

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.is_used and not self.current_epoch:
            loss = loss + self.extra(batch[0][:, :4]).square().mean()
        return loss


@pytest.mark.filterwarnings("ignore:steps are not compiled")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("is_used", [False, True])
def test_a_layer_that_is_not_used_does_not_decay(agree, tiny, data, traced, kind, is_used):
    agree(lambda: tiny(Decays, kind, is_used), (4,), datamodule=data, steps=3, compile=True)


def test_a_step_with_another_number_in_each_step_is_not_compiled_for_long(
    agree, tiny, data, traced
):
    def make():
        return tiny(step=lambda module, loss, batch, batch_idx: loss * (1 + batch_idx))

    with pytest.warns(UserWarning, match=r"steps are not compiled: .* batch_idx") as said:
        agree(make, (4,), datamodule=data, steps=4, compile=True)
    assert sum("not compiled" in str(each.message) for each in said) <= 2  # shapes of batches


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_half_precision_is_no_reason_to_train_one_after_another(train, tiny, flat, precision):
    one, many = tiny().float(), tiny().float()
    train(one, precision=precision, steps=3)
    # It would warn that the vectorized step gives different results.
    train(many, 3, precision=precision, steps=3)
    torch.testing.assert_close(flat(many), flat(one), rtol=0, atol=0.02)


class Teacher(Linear):
    """Keeps an average of itself in frozen parameters; its batches may be padded."""

    _sample_weight = None

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(6, 3).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.teacher.weight.mul_(0.5).add_(self.net.weight, alpha=0.5)
        outputs, weight = self.net(batch[0]), self._sample_weight
        losses = F.cross_entropy(outputs, batch[1], reduction="none")
        losses = losses + (outputs - self.teacher(batch[0])).square().mean(1)
        return losses.mean() if weight is None else losses @ weight

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


@pytest.mark.parametrize("is_padded", [False, True])
def test_writes_to_frozen_parameters_are_kept_in_ragged_batches(agree, tiny, is_padded):
    kind = type("Own", (Teacher, StepModule), {"_knows_weights": is_padded})
    agree(lambda: tiny(kind), group_size=(7, "auto"))


class Forked(Linear):
    """Uses one of two layers, by the size of the batch."""

    def __init__(self, optimizer):
        super().__init__(nn.Identity(), optimizer)
        self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

    def training_step(self, batch, batch_idx):
        layer = self.one if len(batch[1]) > 7 else self.other
        return F.cross_entropy(layer(batch[0]), batch[1])


decayed = functools.partial(momentum, weight_decay=0.1)


def test_a_layer_that_only_some_clients_use_is_refused(train, tiny, ragged):
    with pytest.raises(FederationError, match=r"it uses (one|other)\.bias for some clients only"):
        train(tiny(Forked, sgd), 4, datamodule=ragged(), steps=5)


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
    def batches_of_ten():
        return data(blobs(60), batch_size=10)

    agree(lambda: tiny(Narrow, decayed), (4,), (1, 3), batches_of_ten, compile=True, steps=4)


def test_groups_of_other_sizes_train_in_the_same_memory(train, tiny, data):
    """A CUDA graph can be launched again where nothing has moved."""

    class Notes(tiny.kind):
        found = ()  # by each module, as the check of the first round has copies

        def on_client_start(self):
            self.found += (self.net[0].weight.data_ptr(),)

    module = tiny(Notes)
    train(module, 3, datamodule=data(num_clients=5), federation={"policy": Schedule()})
    assert len(set(module.found)) == 3
    assert module.found[3] == module.found[0]


def test_a_step_may_write_to_its_parameters_after_the_first(agree, tiny):
    """Clients have different rates, and the check of the first round makes first steps only."""

    class Shrinks(tiny.kind):
        def training_step(self, batch, batch_idx):
            if batch_idx:
                with torch.no_grad():
                    self.net[0].weight.mul_(0.9)
            return super().training_step(batch, batch_idx)

    agree(lambda: tiny(Shrinks))
