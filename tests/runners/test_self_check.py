"""What a client leaves behind in the module, for clients that train one after another."""

import threading
import weakref
from contextlib import nullcontext

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_fl.federation import self_check
from troubles import CARRIED, HARMLESS, furnish


@pytest.fixture
def stateful(tiny):
    """A module whose loss is multiplied by a factor of tests/troubles.py."""

    def make(factor, *kinds):
        def step(module, loss, batch, batch_idx):
            module.loss, module.batch_idx = loss.detach(), batch_idx
            return loss * factor(module)

        module = tiny(type("Stateful", (*kinds, tiny.kind), {}), step=step)
        furnish(module)
        return module.double()

    return make


def warns():
    return pytest.warns(UserWarning, match="training of the first client changes a step of the s")


#: What copies of a module in the first round cannot show: lightning-fl check finds it.
HIDDEN = (
    "attribute of the class",
    "closure",
    "global",
    "logged loss",
    "begins in the second round",
)


@pytest.mark.parametrize("name", [name for name in CARRIED if name not in HIDDEN])
def test_state_that_a_client_leaves_to_the_next_warns(train, stateful, name):
    with warns():
        train(stateful(CARRIED[name]), rounds=1)


@pytest.mark.parametrize("name", ["attribute", "list", "parameter in a list", "mode"])
def test_state_that_a_client_leaves_to_the_next_is_not_vectorized(train, stateful, flat, name):
    plain, module = stateful(CARRIED[name]), stateful(CARRIED[name])
    with warns():
        train(plain)
    with pytest.warns(UserWarning, match="one client after another, not at once"), warns():
        train(module, 3)
    assert torch.equal(flat(plain), flat(module))


@pytest.mark.parametrize("name", HARMLESS)
def test_state_on_which_no_client_depends_does_not_warn(train, stateful, name):
    train(stateful(HARMLESS[name]))


def test_state_that_is_set_for_each_client_does_not_warn(train, stateful):
    class Anew:
        def on_client_start(self):
            self.steps, self.history = 0, []

    train(stateful(lambda m: CARRIED["attribute"](m) * CARRIED["list"](m), Anew))

    class Name(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            step = trainer.callbacks[0].plan().schedule[batch_idx]
            if step.first:
                module.steps = 1 + step.rows[0]

    train(stateful(lambda m: 1 / m.steps), callbacks=[Name()])


BEFORE_STEP = (
    *("on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_zero_grad"),
    *("optimizer_zero_grad", "on_before_optimizer_step", "configure_gradient_clipping"),
    "optimizer_step",
)


def test_hooks_see_the_clients_own_global_step(train, tiny):
    seen = {}

    def noting(name):
        def hook(self, *args, **options):
            seen.setdefault(name, []).append(self.global_step)
            return getattr(tiny.kind, name)(self, *args, **options)

        return hook

    hooks = {name: noting(name) for name in (*BEFORE_STEP, "on_train_batch_end")}
    train(tiny(type("Sees", (tiny.kind,), hooks)), steps=2)
    after = seen.pop("on_train_batch_end")
    clients = len(after) // 4
    assert after == [1, 2] * clients + [3, 4] * clients
    for name in BEFORE_STEP:
        assert seen[name] == [0, 1] * clients + [2, 3] * clients, name


def test_a_client_alone_goes_on_from_what_it_left(train, stateful, data, blobs):
    train(stateful(CARRIED["attribute"]), datamodule=data(blobs(20), num_clients=1), rounds=3)


def test_what_changes_between_rounds_does_not_carry_over(train, stateful):
    class Anneals:
        def on_train_epoch_end(self):
            self.steps += 1

    one = {"clients_per_round": 1}
    train(stateful(lambda m: 1 / (1 + m.steps), Anneals), federation=one, rounds=4)


@pytest.mark.parametrize("depends", [True, False])
def test_the_check_changes_nothing(train, flat, tiny, ragged, depends):
    class Everything(tiny.kind):
        """Dropout, BatchNorm, a metric, logs, and writes to buffers, parameters and the batch."""

        def __init__(self):
            layers = [torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Dropout()]
            super().__init__(net=lambda: torch.nn.Sequential(*layers, torch.nn.Linear(5, 3)))
            self.accuracy, self.steps, self.calls = MulticlassAccuracy(3), 0, []
            self.register_buffer("count", torch.zeros(()))
            self.seen = torch.nn.Parameter(torch.zeros(()), requires_grad=False)

        def training_step(self, batch, batch_idx):
            self.count = self.count + 1
            self.seen.add_(len(batch[0]))
            self.steps += 1
            self.calls.append(self.global_step)
            outputs = self.net(batch[0].mul_(0.9))
            self.log("train_acc", self.accuracy(outputs, batch[1]), on_epoch=True)
            return F.cross_entropy(outputs, batch[1]) / (self.steps if depends else 1)

    def run(check):
        module = tiny(Everything)
        options = {"federation": {"check": check}}
        loop = train(module, datamodule=ragged(batch_size=4, drop_last=True), **options)
        values = loop.rows[-1]["train_acc"], loop.rows[-1]["val_loss"]
        return flat(module).tolist(), module.count, module.steps, module.calls, values

    with warns() if depends else nullcontext():
        checked = run(True)
    assert run(False) == checked


def images():
    layers = nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(4, 3)
    return nn.Sequential(*layers)


# With "auto", networks with 2-d convolutions train one after another.
@pytest.mark.parametrize(
    ("group_size", "compile", "steps", "extra"),
    [(None, False, 4 * 3, 2), (4, False, 3, 5), ("auto", "auto", 4 * 3, 2)],
)
def test_training_step_is_called_once_per_local_step_and_for_the_check(
    train, tiny, data, group_size, compile, steps, extra
):
    calls = []

    def count(module, loss, batch, batch_idx):
        calls.append(batch_idx)
        return loss

    net = images if group_size == "auto" else tiny.net
    for check in (True, False):
        calls.clear()
        options = {"federation": {"check": check}, "steps": 3, "compile": compile}
        train(tiny(net=net, step=count), group_size, datamodule=data(), **options)
        assert len(calls) == 2 * steps + extra * check


class Strange:
    """No truth value, no comparison, no attributes that do not exist."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __bool__(self):
        raise RuntimeError("no truth value")

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = None


ODD = {
    "strange": Strange,
    "weak": lambda: weakref.ref(nn.Linear(1, 1)),
    "lock": threading.Lock,
    "a tensor of a graph": lambda: torch.ones(1, requires_grad=True) * 2,
}


NOT_COPIED = ("lock", "a tensor of a graph", "strange")


@pytest.mark.parametrize("wrap", [None, 3])
@pytest.mark.parametrize("name", ODD)
def test_attributes_of_odd_types_do_not_end_a_fit(train, tiny, flat, caplog, name, wrap):
    """A module that cannot be copied is not checked, and so not vectorized."""
    plain, module = tiny(), tiny()
    vars(module)["odd"], module.parts = (odd := ODD[name]()), [odd]
    is_copied, said = name not in NOT_COPIED, nullcontext()
    if wrap and not is_copied:
        said = pytest.warns(UserWarning, match="it cannot be copied, to compare its steps")
    with said, caplog.at_level("INFO", "lightning.pytorch"):
        train(module, wrap)
    train(plain)
    torch.testing.assert_close(flat(module), flat(plain), rtol=0, atol=1e-12)
    for words in ("cannot be copied", "lightning-fl check"):
        assert caplog.text.count(words) == (not is_copied)


def test_a_large_module_is_not_checked(train, stateful, monkeypatch, caplog):
    monkeypatch.setattr(self_check, "MAX_BYTES", 100)
    with caplog.at_level("INFO", "lightning.pytorch"):
        train(stateful(CARRIED["attribute"]))
    assert "so it is not checked whether clients affect each other" in caplog.text


def test_an_optimizer_may_repeat_the_first_step(train, stateful):
    def lbfgs(params):
        return torch.optim.LBFGS(params, lr=0.1, max_iter=3)

    module = stateful(CARRIED["attribute"])
    module.optimizer = lbfgs
    with warns():
        train(module, federation={"policy": train.policy(lr=False)})


def test_the_check_changes_no_options_of_the_optimizer(train, tiny, flat):
    class Halves(tiny.kind):
        """Trains at half the rate of the options; the check has copies of it."""

        def on_client_start(self):
            for group in self.optimizers().param_groups:
                group["lr"] *= 0.5

    found = []
    for is_on in (True, False):
        module = tiny(Halves)
        train(module, steps=2, federation={"check": is_on})
        found.append(flat(module))
    assert torch.equal(*found)
