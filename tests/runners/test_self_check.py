"""What a client leaves behind in the module, for clients that train one after another."""

import queue
import threading
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_fl.callbacks import FederatedLoop
from lightning_fl.policies import HyperparameterPolicy, Schedule
from lightning_fl.runners import self_check
from recorded import steps_by_lightning


class Helper:
    def __init__(self):
        self.calls = 0


@dataclass(slots=True)
class Slotted:
    calls: int = 0


#: How a step changes an attribute, and the number that depends on it, by name of the attribute.
CARRIED = {
    "steps": lambda m: setattr(m, "steps", m.steps + 1) or m.steps,
    "history": lambda m: m.history.append(0) or len(m.history),
    "nested": lambda m: m.nested["losses"].append(0) or len(m.nested["losses"]),
    "helper": lambda m: setattr(m.helper, "calls", m.helper.calls + 1) or m.helper.calls,
    "slotted": lambda m: setattr(m.slotted, "calls", m.slotted.calls + 1) or m.slotted.calls,
    "center": lambda m: m.center.add_(1).item(),
    "array": lambda m: np.add(m.array, 1, out=m.array)[0],
    "recent": lambda m: m.recent.append(0) or len(m.recent),
    "teacher": lambda m: m.teacher[0].bias.data.add_(1).item(),
    "drawn": lambda m: m.drawn.random_sample(),
    "late": lambda m: setattr(m, "late", vars(m).get("late", 0) + 1) or m.late,
    "net.1.calls": lambda m: (
        setattr(m.net[1], "calls", vars(m.net[1]).get("calls", 0) + 1) or m.net[1].calls
    ),
}
CARRIED |= {
    "net.1.training": lambda m: 1 + (m.net[1].training, m.net[1].eval())[0],
    "net.1._forward_hooks": lambda m: (
        m.net[1].register_forward_hook(lambda *_: None) and len(m.net[1]._forward_hooks)
    ),
}
#: Steps that change attributes on which no other client depends.
ALLOWED = {
    "losses": lambda m: m.history.append(m.loss) or 1,
    "last loss": lambda m: setattr(m, "late", m.loss) or 1,
    "cache": lambda m: vars(m).setdefault("late", 0.5),
    "mode of each step": lambda m: 1 + m.net[1].eval().training,
    "resets": lambda m: setattr(m, "steps", 0 if m.batch_idx == 0 else m.steps + 1) or 1 + m.steps,
}


@pytest.fixture
def stateful(tiny):
    """A module whose loss is multiplied by a number that may depend on attributes."""

    class Stateful(tiny.kind):
        def training_step(self, batch, batch_idx):
            self.batch_idx = batch_idx
            loss = super().training_step(batch, batch_idx)
            self.loss = loss.detach()
            return loss * self.factor(self)

    def make(factor, kind=None):
        module = tiny(Stateful if kind is None else type("Stateful", (kind, Stateful), {}))
        module.factor, module.steps, module.history, module.nested = factor, 0, [], {"losses": []}
        module.helper, module.slotted = Helper(), Slotted()
        module.center, module.array = torch.zeros(()), np.zeros(1)
        module.recent, module.drawn = deque(maxlen=99), np.random.RandomState(0)
        module.teacher = [nn.Linear(1, 1)]  # no submodule
        return module

    return make


def warns():
    return pytest.warns(UserWarning, match="training of the first client changes a step of the s")


@pytest.mark.parametrize("steps", [nullcontext, steps_by_lightning])
@pytest.mark.parametrize("name", CARRIED)
def test_what_a_client_leaves_to_the_next_is_warned_of(train, stateful, name, steps):
    with warns(), steps():
        train(stateful(CARRIED[name]), rounds=2)


@pytest.mark.parametrize("name", CARRIED)
def test_with_it_clients_are_not_vectorized(train, stateful, flat, name):
    plain, module = stateful(CARRIED[name]), stateful(CARRIED[name])
    with warns():
        train(plain)
    with pytest.warns(UserWarning, match="one client after another, not at once"), warns():
        train(module, 3)
    assert torch.equal(flat(plain), flat(module))


@pytest.mark.parametrize("name", ALLOWED)
def test_what_no_other_client_depends_on_is_not(train, stateful, name):
    train(stateful(ALLOWED[name]))


def late(factor):
    """Return a factor that begins in the second round."""
    return lambda m: factor(m) if m.current_epoch else 1


@pytest.mark.parametrize("name", ALLOWED)
def test_what_begins_in_a_later_round_may_be_harmless(train, stateful, name):
    train(stateful(late(ALLOWED[name])), rounds=2)


def test_what_is_set_for_each_client_may_begin_in_a_later_round(train, stateful):
    class Starts:
        def on_client_start(self):
            self.steps = 0

    train(stateful(late(CARRIED["steps"]), Starts), rounds=2)


def test_what_shows_only_between_clients_with_other_parameters(train, stateful):
    def factor(m):
        before, m.late = getattr(m, "late", m.loss), m.loss
        return before / m.loss

    with warns():
        train(stateful(factor))


def test_what_is_set_for_each_client_does_not_carry_over(train, stateful):
    class Anew:
        def on_client_start(self):
            self.steps, self.history = 0, []

    train(stateful(lambda m: CARRIED["steps"](m) * CARRIED["history"](m), Anew))

    class Name(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            step = trainer.callbacks[0].plan().schedule[batch_idx]
            if step.first:
                module.steps = 1 + step.rows[0]

    train(stateful(lambda m: 1 / m.steps), callbacks=[Name()])


def test_what_a_step_freezes_carries_over(train, tiny):
    class Freezes(tiny.kind):
        def training_step(self, batch, batch_idx):
            self.net[0].requires_grad_(batch_idx < self.last)
            return super().training_step(batch, batch_idx)

    class FreezesOnce(tiny.kind):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                self.net[0].requires_grad_(False)
            return super().training_step(batch, batch_idx)

    class Restores(FreezesOnce):
        def on_client_start(self):
            self.net[0].requires_grad_(True)

    with warns():
        train(tiny(FreezesOnce), federation={"policy": Schedule(num_steps=3)})
    for kind in (Restores, Freezes):
        module = tiny(kind)
        module.last = 2
        train(module, federation={"policy": Schedule(num_steps=3)})


def test_a_buffer_does_not_carry_over(train, stateful):
    module = stateful(lambda m: m.count.add_(1).item())
    module.register_buffer("count", torch.zeros((), dtype=torch.float64))
    train(module)


#: Factors that depend on the count of optimizer steps.
OF_STEPS = (
    lambda m: 1 / (1 + m.global_step),
    lambda m: min(1, m.trainer.global_step / 1000),
    lambda m: 1 + (m.global_step > 500),
    lambda m: 1 + (m.global_step > 3),
)


@pytest.mark.parametrize("group_size", [None, 1, 3])
@pytest.mark.parametrize("factor", OF_STEPS)
@pytest.mark.filterwarnings("ignore:Stateful trains one client after another")
def test_global_step_is_the_clients_own(train, flat, stateful, factor, group_size):
    def run(factor, group_size=None):
        module = stateful(factor)
        train(module, group_size, rounds=3, federation={"policy": Uneven()})
        return flat(module)

    class Counts:
        """The same count, written as a client would: rounds go on from the longest client."""

        done = 0

        def __init__(self, module):
            self.global_step = self.done + module.batch_idx
            self.trainer = self

    def expected(module):
        Counts.done = sum(4 + round for round in range(module.current_epoch))
        return factor(Counts(module))

    torch.testing.assert_close(run(factor, group_size), run(expected), atol=1e-12, rtol=0)


class Uneven(HyperparameterPolicy):
    """At most 4 + round steps."""

    def sample(self, round, clients):
        return {"num_steps": 4 + round - clients % 3}


def test_hooks_of_a_step_see_the_clients_own_global_step(train, tiny):
    seen = {}

    class Sees(tiny.kind):
        def note(self, name):
            seen.setdefault(name, []).append(self.global_step)

        def on_train_batch_start(self, batch, batch_idx):
            self.note("on_train_batch_start")

        def on_before_backward(self, loss):
            self.note("on_before_backward")

        def on_after_backward(self):
            self.note("on_after_backward")

        def on_before_zero_grad(self, optimizer):
            self.note("on_before_zero_grad")

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            self.note("optimizer_zero_grad")
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

        def on_before_optimizer_step(self, optimizer):
            self.note("on_before_optimizer_step")

        def configure_gradient_clipping(self, optimizer, **options):
            self.note("configure_gradient_clipping")

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.note("after")

    train(tiny(Sees), rounds=2, federation={"policy": Schedule(num_steps=2)})
    clients = len(seen["after"]) // 4
    after = seen.pop("after")
    assert after == [1, 2] * clients + [3, 4] * clients
    for name, steps in seen.items():
        assert steps == [0, 1] * clients + [2, 3] * clients, name


@pytest.mark.parametrize("factor", OF_STEPS)
def test_global_step_of_one_client_is_lightnings(fit, flat, stateful, data, trainer, factor):
    alone, plain = stateful(factor), stateful(factor)
    samples = data(num_clients=1)
    fit(alone, FederatedLoop(buffers="average", seed=samples.seed), samples, rounds=3)
    trainer(False, rounds=3).fit(plain, datamodule=data(num_clients=1))
    torch.testing.assert_close(flat(alone), flat(plain), atol=1e-12, rtol=0)


def test_global_step_resumes(train, flat, stateful, tmp_path):
    def run(rounds, **options):
        module = stateful(OF_STEPS[0])
        loop = train(module, rounds=rounds, federation={"policy": Uneven()}, **options)
        return flat(module), loop

    whole, _ = run(3)
    _, loop = run(2)
    loop.fit.trainer.save_checkpoint(tmp_path / "two.ckpt")
    assert torch.equal(run(3, ckpt_path=tmp_path / "two.ckpt")[0], whole)


def test_a_client_alone_goes_on_from_what_it_left(train, stateful, data, blobs):
    train(stateful(CARRIED["steps"]), datamodule=data(blobs(20), num_clients=1), rounds=3)


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


class Images(nn.Sequential):
    def __init__(self):
        layers = nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(4, 3)
        super().__init__(*layers)


# With "auto", networks with 2-d convolutions train one after another. Whether it pays to compile
# their steps is known after a step of which the operations are counted.
@pytest.mark.parametrize(
    ("group_size", "compile", "steps", "extra"),
    [(None, False, 4 * 3, 2), (4, False, 3, 5), ("auto", False, 4 * 3, 2), ("auto", "auto", 12, 3)],
)
def test_training_step_is_called_once_per_local_step_and_for_the_check(
    train, tiny, data, group_size, compile, steps, extra
):
    calls = []

    class Counts(tiny.kind):
        def training_step(self, batch, batch_idx):
            calls.append(batch_idx)
            return super().training_step(batch, batch_idx)

    four = {"clients_per_round": 4, "policy": Schedule(num_steps=3)}
    for check in (True, False):
        calls.clear()
        options = {"federation": {**four, "check": check}, "datamodule": data(num_clients=4)}
        options["compile"] = compile
        net = Images if group_size == "auto" else None
        train(tiny(Counts, net=net), group_size, rounds=2, **options)
        assert len(calls) == 2 * steps + extra * check


def test_a_module_that_cannot_be_copied_is_not_checked(train, stateful, caplog):
    module = stateful(CARRIED["steps"])
    module.lock, module.queue = threading.Lock(), queue.Queue()
    with caplog.at_level("INFO", "lightning.pytorch"):
        train(module)
    assert "cannot be copied" in caplog.text
    assert "lightning-fl check" in caplog.text


def test_a_large_module_is_not_checked(train, stateful, monkeypatch, caplog):
    monkeypatch.setattr(self_check, "MAX_BYTES", 100)
    with caplog.at_level("INFO", "lightning.pytorch"):
        train(stateful(CARRIED["steps"]))
    assert "so it is not checked whether clients affect each other" in caplog.text


def test_an_optimizer_may_repeat_the_first_step(train, tiny):
    class Counts(tiny.kind):
        calls = 0

        def training_step(self, batch, batch_idx):
            self.calls += 1
            return super().training_step(batch, batch_idx) / self.calls

    def lbfgs(params):
        return torch.optim.LBFGS(params, lr=0.1, max_iter=3)

    with warns():
        train(tiny(Counts, lbfgs), federation={"policy": train.policy(lr=False)})


def test_a_late_stop_does_not_come_early(train, tiny):
    class Stops(tiny.kind):
        def training_step(self, batch, batch_idx):
            self.stop_late()
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.stop_late()

        def stop_late(self):
            if self.global_step > 10_000:
                self.trainer.should_stop = True

    assert len(train(tiny(Stops), rounds=3).rows) == 3


class Writes:
    """Writes losses by a thread, and reads numbers from an iterator and a generator of its own."""

    def open(self, kind):
        self.kind, self.written, self.stream = kind, [], iter(range(1000))
        if kind == "thread":
            self.queue = queue.Queue()
            self.writer = threading.Thread(target=self.write, daemon=True)
            self.writer.start()
        if kind == "generator":
            self.stream = (number for number in range(1000))

    def write(self):
        while (item := self.queue.get()) is not None:
            self.written.append(item)

    def training_step(self, batch, batch_idx):
        number = next(self.stream)
        if self.kind == "thread":
            self.queue.put(number)
        else:
            self.written.append(number)
        return super().training_step(batch, batch_idx) * (1 + number / 1000)

    def close(self):
        if self.kind == "thread":
            self.queue.put(None)
            self.writer.join()
        return self.written


@pytest.mark.filterwarnings("ignore:the training of the first client|.* after another, not at once")
@pytest.mark.parametrize("kind", ["iterator", "thread", "generator"])
@pytest.mark.parametrize("wrap", [None, 3])
def test_streams_and_threads_of_a_module_are_those_of_lightning(
    trainer, train, tiny, flat, data, kind, wrap
):
    own = type("Own", (Writes, tiny.kind), {})
    plain, module = tiny(own), tiny(own)
    for each in (plain, module):
        each.open(kind)
    samples = data(num_clients=1)
    trainer(False, rounds=2).fit(plain, datamodule=data(num_clients=1))
    federation = {"policy": None, "seed": samples.seed}
    train(module, wrap, datamodule=samples, federation=federation, rounds=2)
    assert module.close() == plain.close() == list(range(len(module.written)))
    torch.testing.assert_close(flat(module), flat(plain), atol=1e-12, rtol=0)
