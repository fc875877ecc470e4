"""Hooks for each step: of a module, its data and the callbacks beside it."""

import pytest
import torch
from torch import nn

from lightning_fl import VectorizedClients
from lightning_fl.types import FederationError


def test_hooks_of_the_module_are_called_as_ever(train, tiny):
    class Hooked(tiny.kind):
        def __init__(self):
            super().__init__()
            self.calls = []

        def setup(self, stage):
            self.calls.append("setup")

        def on_train_epoch_start(self):
            self.calls.append("start")

        def on_client_end(self):
            self.calls.append("client end")

        def on_train_epoch_end(self):
            self.log("own", 7.0)
            self.calls.append("end")

        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = 1

    module = tiny(Hooked)
    loop = train(module, 3)
    clients = ["client end"] * 7
    assert module.calls == ["setup", *(["start", *clients, "end"] * 2)]
    assert [row["own"] for row in loop.rows] == [7.0, 7.0]


@pytest.mark.parametrize(
    "hook",
    ["on_train_batch_start", "on_before_optimizer_step", "on_after_backward"],
)
def test_a_hook_for_each_step_is_a_reason_to_train_in_the_module(train, tiny, flat, hook):
    calls = []
    kind = type("Hooked", (tiny.kind,), {hook: lambda self, *args: calls.append(1)})
    plain, module = tiny(), tiny(kind)
    train(plain)
    with pytest.warns(UserWarning, match=f"Hooked trains one client after another, .* {hook}"):
        train(module, 3)
    assert torch.equal(flat(module), flat(plain))
    assert len(calls) > 7


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer`")
def test_what_a_module_does_to_a_batch_is_done_to_a_clients_own(agree, tiny):
    class Centers(tiny.kind):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] - batch[0].mean(0), batch[1]

    with pytest.warns(match="one client after another, .* on_after_batch_transfer"):
        agree(lambda: tiny(Centers), (3,))


def test_parameters_with_hooks_are_trained_by_themselves(tiny):
    module = tiny()
    module.net[0].weight.register_hook(lambda gradient: gradient * 0)
    with pytest.warns(UserWarning, match="hooks of the parameter"):
        assert VectorizedClients(module).reason


def test_tensors_that_share_memory_are_trained_by_themselves(agree, tiny):
    def make():
        module = tiny(net=lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))))
        module.net[1].weight.data = module.net[0].weight.data
        return module

    with pytest.warns(UserWarning, match=r"net\.0\.weight and net\.1\.weight share memory"):
        agree(make)


def test_parameters_that_get_hooks_later_are_refused(train, tiny):
    class Masked(tiny.kind):
        def on_fit_start(self):
            self.net[0].weight.register_hook(lambda gradient: gradient * 0)

    train(tiny(Masked), rounds=1)
    with pytest.raises(FederationError, match=r"parameter net\.0\.weight of Masked after"):
        train(tiny(Masked), 3, rounds=1)


def test_step_hooks_of_an_optimizer_are_refused(train, tiny):
    def optimizer(params):
        def project(optimizer, args, kwargs):
            for p in optimizer.param_groups[0]["params"]:
                p.data.mul_((1 / p.data.norm()).clamp(max=1))

        made = torch.optim.SGD(params, lr=0.1)
        made.register_step_post_hook(project)
        return made

    train(tiny(tiny.kind, optimizer), rounds=1)
    with pytest.raises(FederationError, match=r"has a step hook \(.*project\)"):
        train(tiny(tiny.kind, optimizer), 3, rounds=1)


def limited(gradient):
    """Limit the norm of a gradient."""
    return gradient * (0.01 / gradient.norm()).clamp(max=1)


def after(layer):
    layer.register_full_backward_hook(lambda _, grads, __: (limited(grads[0]),))


def before(layer):
    layer.register_full_backward_pre_hook(lambda _, grads: (limited(grads[0]),))


def asks(layer):
    def hook(_, __, output):
        if output.requires_grad:  # none does under vmap
            output.register_hook(limited)

    layer.register_forward_hook(hook)


@pytest.fixture
def hooked(tiny):
    def make(register=after):
        module = tiny(optimizer=lambda params: torch.optim.SGD(params, lr=3.0))
        register(module.net[1 if register is asks else 2])
        return module

    return make


@pytest.mark.parametrize(
    ("register", "why"),
    [(after, "hooks of the layer"), (before, "hooks of the layer"), (asks, "different results")],
)
def test_layers_and_tensors_with_hooks_are_trained_one_client_after_another(
    agree, hooked, register, why
):
    with pytest.warns(UserWarning, match=f"one client after another, .*{why}"):
        agree(lambda: hooked(register))


def test_layers_that_get_hooks_later_are_refused(train, tiny):
    class Late(tiny.kind):
        def on_train_epoch_start(self):
            if self.current_epoch:
                after(self.net[2])

    with pytest.raises(FederationError, match=r"on the layer net\.2 of Late after"):
        train(tiny(Late), 3)
