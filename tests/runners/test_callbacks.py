"""Callbacks that access the module inside the VectorizedClients that they are given."""

import pytest
import torch
from lightning.pytorch import Callback

from lightning_fl.runners import VectorizedClients
from lightning_fl.types import FederationError

#: A callback may look at stacked gradients.
pytestmark = pytest.mark.filterwarnings("ignore:.*hooks of the backward pass get the stacked")


class Reaches(Callback):
    """Reads and writes the module between rounds, and its plain attributes in training."""

    def __init__(self):
        self.norms = []

    def on_train_start(self, trainer, pl_module):
        pl_module.scale = 1.0

    def on_train_epoch_start(self, trainer, pl_module):
        with torch.no_grad():
            pl_module.net[0].weight.mul_(0.9)
        pl_module.net[0].bias.requires_grad_(trainer.current_epoch != 1)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.scale = 1.0 + trainer.current_epoch

    def on_train_epoch_end(self, trainer, pl_module):
        self.norms.append(pl_module.norm().item())


@pytest.fixture
def scaled(tiny):
    class Scaled(tiny.kind):
        def norm(self):
            return self.net[0].weight.norm()

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * self.scale

    return lambda: tiny(Scaled)


def test_what_a_callback_reads_and_writes_is_the_modules(agree, scaled):
    found = []

    class Noted(Reaches):
        def setup(self, trainer, pl_module, stage):
            self.norms = []
            found.append(self.norms)

    agree(scaled, (3,), rounds=3, callbacks=[Noted()])
    plain, group_size = found
    assert len(plain) == 3
    assert group_size == pytest.approx(plain, abs=1e-12)


@pytest.mark.parametrize("name", ["net", "norm"])
def test_what_each_client_has_its_own_of_is_refused_in_training(train, scaled, name):
    class Early(Reaches):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            getattr(pl_module, name)

    with pytest.raises(FederationError, match=rf"Scaled\.{name} while 3 clients train at once"):
        train(scaled(), 3, callbacks=[Early()])


@pytest.mark.parametrize("name", ["parameters", "named_parameters", "buffers", "named_buffers"])
def test_the_servers_tensors_are_not_taken_for_a_clients(train, scaled, name):
    class Asks(Reaches):
        def on_train_epoch_end(self, trainer, pl_module):
            list(getattr(pl_module, name)())  # between rounds they are the model's

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            list(getattr(pl_module, name)())

    kind = name.removeprefix("named_")
    with pytest.raises(FederationError, match=rf"Scaled\.{kind}\(\) while 3 clients train at once"):
        train(scaled(), 3, callbacks=[Asks()])


def test_what_nobody_has_is_an_attribute_error(scaled):
    group_size = VectorizedClients(scaled())
    with pytest.raises(AttributeError, match="nothing"):
        group_size.nothing  # noqa: B018  # that it is asked for is the test
    group_size.beta = 0.5
    assert group_size.module.beta == group_size.beta == 0.5
    assert "beta" not in vars(group_size)


class Logs(Callback):
    """Counts its calls, and logs each of them."""

    def __init__(self):
        self.calls = [0, 0]

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        pl_module.log("cleared", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.calls[trainer.current_epoch] += 1
        pl_module.log("called", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")


def test_what_callbacks_log_in_each_local_step_is_counted(train, tiny):
    callback = Logs()
    rows = train(tiny(), 3, steps_per_batch=4, callbacks=[callback]).rows
    assert min(callback.calls) > 5
    for name in ("cleared", "called"):
        assert [row[name] for row in rows] == callback.calls


class Clips(Callback):
    """Changes gradients, and counts its calls."""

    def __init__(self, clip):
        self.clip, self.calls = clip, 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.calls += 1
        pl_module.log("calls", float(self.calls))
        trainer.should_stop = self.calls > 1000
        self.clip([p for group in optimizer.param_groups for p in group["params"]])


def by_rows(params):
    """Clip the gradients of each client."""
    for param in params:
        norms = param.grad.flatten(1).norm(dim=1).view(-1, *[1] * (param.grad.ndim - 1))
        param.grad *= (0.1 / norms).clamp(max=1)
        param.data.mul_(0.999)


def by_norm(params):
    torch.nn.utils.clip_grad_norm_(params, 0.5)


@pytest.mark.parametrize("clip", [by_norm, by_rows])
def test_callbacks_that_get_the_gradients_of_all_clients_are_warned_of(train, tiny, clip):
    with pytest.warns(UserWarning, match=r"Clips: hooks .* stacked gradients of 3 clients"):
        train(tiny(), 3, callbacks=[Clips(clip)])
    train(tiny(), None, callbacks=[Clips(clip)] if clip is by_norm else [])
    train(tiny(), 1, callbacks=[Clips(clip)])
