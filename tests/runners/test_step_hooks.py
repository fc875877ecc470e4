"""Hooks for each step: of a module, its parts, its data and the callbacks beside it."""

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_fl import VectorizedClients
from lightning_fl.types import FederationError

# --- hooks of the module --------------------------------------------------------------------------


def test_hooks_of_a_round_are_called_in_order(train, tiny):
    class Hooked(tiny.kind):
        calls = ()

        def setup(self, stage):
            self.calls += ("setup",)

        def on_train_epoch_start(self):
            self.calls += ("start",)

        def on_client_end(self):
            self.calls += ("client end",)

        def on_train_epoch_end(self):
            self.log("own", 7.0)
            self.calls += ("end",)

    module = tiny(Hooked)
    loop = train(module, 3)
    assert module.calls == ("setup", *(("start", *["client end"] * 7, "end") * 2))
    assert [row["own"] for row in loop.rows] == [7.0, 7.0]


@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_before_optimizer_step", "on_after_backward"]
)
def test_a_module_with_a_hook_for_each_step_is_not_vectorized(train, tiny, flat, hook):
    calls = []
    kind = type("Hooked", (tiny.kind,), {hook: lambda self, *args: calls.append(1)})
    plain, module = tiny(), tiny(kind)
    train(plain)
    with pytest.warns(UserWarning, match=f"Hooked trains one client after another, .* {hook}"):
        train(module, 3)
    assert torch.equal(flat(module), flat(plain))
    assert len(calls) > 7


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer`")
def test_a_module_that_changes_batches_is_not_vectorized(agree, tiny):
    class Centers(tiny.kind):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] - batch[0].mean(0), batch[1]

    with pytest.warns(match="one client after another, .* on_after_batch_transfer"):
        agree(lambda: tiny(Centers), (3,))


def test_tensors_that_share_memory_are_not_vectorized(agree, tiny):
    def make():
        module = tiny(net=lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))))
        memory = torch.randn(9, 6, dtype=torch.float64)
        module.net[0].weight.data, module.net[1].weight.data = memory[:6], memory[3:]
        return module

    with pytest.warns(UserWarning, match=r"net\.0\.weight and net\.1\.weight share memory"):
        agree(make)


# --- hooks of layers, parameters and the optimizer ------------------------------------------------


def limited(gradient):
    """Limit the norm of a gradient."""
    return gradient * (0.01 / gradient.norm()).clamp(max=1)


def of_parameter(module):
    module.net[0].weight.register_hook(limited)


def of_layer(module):
    module.net[2].register_full_backward_hook(lambda _, grads, __: (limited(grads[0]),))


def of_output(module):
    def hook(_, __, output):
        if output.requires_grad:  # none does under vmap
            output.register_hook(limited)

    module.net[1].register_forward_hook(hook)


def of_optimizer(module):
    def project(optimizer, args, kwargs):
        for p in optimizer.param_groups[0]["params"]:
            p.data.mul_((1 / p.data.norm()).clamp(max=1))

    optimizer = module.optimizer(module.parameters())
    optimizer.register_step_post_hook(project)
    module.optimizer = lambda params: optimizer


@pytest.mark.parametrize(
    ("register", "why"),
    [
        (of_parameter, r"hooks of net\.0\.weight"),
        (of_layer, r"hooks of net\.2"),
        (of_output, "different results"),
        (of_optimizer, "SGD has a step hook"),
    ],
)
def test_modules_with_hooks_of_their_parts_are_not_vectorized(agree, tiny, register, why):
    def make():
        module = tiny(optimizer=lambda params: torch.optim.SGD(params, lr=3.0))
        register(module)
        return module

    with pytest.warns(UserWarning, match=f"one client after another, .*{why}"):
        agree(make)


@pytest.mark.parametrize(
    ("register", "place"),
    [
        (of_parameter, r"hooks of net\.0\.weight"),
        (of_layer, r"hooks of net\.2"),
        (lambda m: m.trainer.callbacks.append(Clips()), "hooks of Clips"),
        (
            lambda m: m.trainer.optimizers[0].register_step_post_hook(lambda *_: None),
            "SGD has a step hook",
        ),
    ],
)
def test_hooks_that_are_registered_in_the_fit_are_refused(train, tiny, register, place):
    class Late(tiny.kind):
        def on_train_epoch_start(self):
            if self.current_epoch:
                register(self)

    train(tiny(Late))
    with pytest.raises(FederationError, match=f"trains many clients at once, and now .*{place}"):
        train(tiny(Late), 3)


# --- callbacks ------------------------------------------------------------------------------------


class Reaches(Callback):
    """Reads and writes the module between rounds, and its plain attributes in training."""

    def on_train_start(self, trainer, pl_module):
        self.norms, pl_module.scale = [], 1.0

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

    return lambda: tiny(Scaled, step=lambda module, loss, *_: loss * module.scale)


def test_a_callback_reads_and_writes_the_module_between_rounds(agree, scaled):
    found = []

    class Noted(Reaches):
        def on_train_end(self, trainer, pl_module):
            found.append(self.norms)

    agree(scaled, (3,), rounds=3, callbacks=[Noted()])
    plain, vectorized = found
    assert len(plain) == 3
    assert vectorized == pytest.approx(plain, abs=1e-12)


TENSORS = ("parameters", "named_parameters", "buffers", "named_buffers")


@pytest.mark.parametrize("name", ["net", "norm", *TENSORS])
def test_tensors_of_a_client_are_refused_to_callbacks_in_training(train, scaled, name):
    def read(module):
        found = getattr(module, name)
        if name in TENSORS:
            list(found())

    class Early(Reaches):
        def on_train_epoch_end(self, trainer, pl_module):
            read(pl_module)  # between rounds they are the model's

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            read(pl_module)

    called = rf"{name.removeprefix('named_')}\(\)" if name in TENSORS else name
    with pytest.raises(FederationError, match=rf"Scaled\.{called} while 3 clients train at once"):
        train(scaled(), 3, callbacks=[Early()])


def test_attributes_of_vectorized_clients_are_the_modules(scaled):
    vectorized = VectorizedClients(scaled())
    with pytest.raises(AttributeError, match="nothing"):
        vectorized.nothing  # noqa: B018  # that it is asked for is the test
    vectorized.beta = 0.5
    assert vectorized.module.beta == vectorized.beta == 0.5
    assert "beta" not in vars(vectorized)


class Doubles(Callback):
    """Changes the samples of each batch, as mixup and normalization do."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        batch[0].mul_(2)


def test_callback_that_changes_batches_changes_every_local_step(agree, tiny, data):
    agree(tiny, (50,), 50, data, callbacks=[Doubles()], steps=6)


class Clips(Callback):
    """Changes gradients."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 0.5)


def test_callbacks_that_see_gradients_see_those_of_a_client(agree, tiny):
    with pytest.warns(UserWarning, match="one client after another, .* hooks of Clips see the"):
        agree(tiny, most_steps=50, callbacks=[Clips()])
