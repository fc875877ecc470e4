"""What a client leaves behind in the module, for clients that train one after another."""

import copy
import random
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

from grids import diagonal
from lightning_fl.policies import Schedule
from lightning_fl.runners import attributes
from lightning_fl.runners.carried import CarriedState
from lightning_fl.types import FederationError
from scaled import multiplied, scaled_gradients


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


def warns(*names):
    return pytest.warns(
        UserWarning, match=rf"training_step depends on {' and '.join(names)}, which carries over"
    )


@pytest.mark.parametrize("lean_steps", [True, False])
@pytest.mark.parametrize("name", CARRIED)
def test_what_a_client_leaves_to_the_next_is_named(train, stateful, name, lean_steps):
    with warns(name):
        train(stateful(CARRIED[name]), rounds=2, federation={"lean_steps": lean_steps})


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("name", CARRIED)
def test_vectorized_clients_refuse_it(train, stateful, name, group_size):
    with pytest.raises(FederationError, match=rf"an earlier step has set \(.*{name}"):
        train(stateful(CARRIED[name]), group_size)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_no_other_client_depends_on_is_not(train, stateful, name):
    train(stateful(ALLOWED[name]))


def late(factor):
    """Return a factor that begins in the second round."""
    return lambda m: factor(m) if m.current_epoch else 1


@pytest.mark.parametrize("name", CARRIED)
def test_what_begins_in_a_later_round_is_named(train, stateful, name):
    with warns(name):
        train(stateful(late(CARRIED[name])), rounds=2)
    with pytest.raises(FederationError, match=rf"an earlier step has set \(.*{name}"):
        train(stateful(late(CARRIED[name])), 1, rounds=2)


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("group_size", [None, 1])
def test_what_begins_in_a_later_round_may_be_harmless(train, stateful, name, group_size):
    train(stateful(late(ALLOWED[name])), group_size, rounds=2)


@pytest.mark.parametrize("group_size", [None, 1, 3])
@pytest.mark.filterwarnings("ignore:Stateful is trained one client after another")
def test_a_module_that_fails_in_a_later_round_fails_there(train, stateful, group_size):
    seen = set()

    def factor(m):
        seen.add(m.current_epoch)
        if m.current_epoch == 2:
            raise KeyboardInterrupt
        return 1

    with pytest.raises(SystemExit):
        train(stateful(factor), group_size, rounds=4)
    assert seen == {0, 1, 2}


class Switched:
    """Begins with something by an attribute that a hook sets."""

    is_warm = False

    def on_train_epoch_start(self):
        self.is_warm = self.current_epoch == 2


@pytest.mark.parametrize("name", ["steps", "history", "center"])
def test_what_begins_by_an_attribute_is_named_in_that_round(train, stateful, name):
    def factor(m):
        return CARRIED[name](m) if m.is_warm else 1

    with warns(name):
        train(stateful(factor, Switched), rounds=3)
    train(stateful(factor, Switched), rounds=2)
    with pytest.raises(FederationError, match=rf"In round 3|an earlier step has set \(.*{name}"):
        train(stateful(factor, Switched), 1, rounds=3)


def test_what_is_set_for_each_client_may_begin_in_a_later_round(train, stateful):
    class Starts:
        def on_client_start(self):
            self.steps = 0

    train(stateful(late(CARRIED["steps"]), Starts), rounds=2)


@pytest.mark.parametrize("group_size", [None, 1])
def test_what_shows_only_between_clients_with_other_parameters(train, stateful, group_size):
    def factor(m):
        before, m.late = getattr(m, "late", m.loss), m.loss
        return before / m.loss

    carries = warns("late") if group_size is None else pytest.raises(FederationError, match="late")
    with carries:
        train(stateful(factor), group_size)


def test_several_are_named_together(train, stateful):
    with warns("steps", "history"):
        train(stateful(lambda m: CARRIED["steps"](m) * CARRIED["history"](m)))


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

    with warns(r"net\.0\.bias\.requires_grad", r"net\.0\.weight\.requires_grad"):
        train(tiny(FreezesOnce), federation={"policy": Schedule(num_steps=3)})
    for kind in (Restores, Freezes):
        module = tiny(kind)
        module.last = 2
        train(module, federation={"policy": Schedule(num_steps=3)})


def test_a_buffer_does_not_carry_over(train, stateful):
    module = stateful(lambda m: m.count.add_(1).item())
    module.register_buffer("count", torch.zeros((), dtype=torch.float64))
    train(module)


@pytest.mark.parametrize("group_size", [None, 1, 3])
def test_global_step_counts_the_steps_of_all_clients(train, stateful, group_size):
    is_alone = group_size is None
    refused = pytest.raises(FederationError, match=r"\(trainer\.global_step\).*use batch_idx")
    for factor in (
        lambda m: 1 / (1 + m.global_step),
        lambda m: min(1, m.trainer.global_step / 1000),
        lambda m: 1 + (m.global_step > 500),
    ):
        with warns(r"trainer\.global_step") if is_alone else refused:
            train(stateful(factor), group_size)


@pytest.mark.parametrize("group_size", [None, 1, 3])
@pytest.mark.filterwarnings("ignore:Stateful is trained one client after another")
def test_global_step_may_be_read_for_other_purposes(train, stateful, group_size):
    train(stateful(lambda m: m.seen.append(m.global_step) or 1 if hasattr(m, "seen") else 1))
    module = stateful(lambda m: 1)
    module.factor = lambda m: 1 if m.global_step % 2 else 1.0
    train(module, group_size)


def test_rounds_of_one_client_are_compared(train, stateful):
    with warns("steps"):
        train(stateful(CARRIED["steps"]), federation={"clients_per_round": 1}, rounds=4)


def test_a_client_alone_goes_on_from_what_it_left(train, stateful, data, blobs):
    train(stateful(CARRIED["steps"]), datamodule=data(blobs(20), num_clients=1), rounds=3)


def test_what_changes_between_rounds_does_not_carry_over(train, stateful):
    class Anneals:
        def on_train_epoch_end(self):
            self.steps += 1

    one = {"clients_per_round": 1}
    train(stateful(lambda m: 1 / (1 + m.steps), Anneals), federation=one, rounds=4)


@pytest.mark.parametrize("depends", [True, False])
def test_the_comparison_changes_nothing(train, flat, tiny, ragged, monkeypatch, depends):
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

    def run():
        module = tiny(Everything)
        loop = train(module, datamodule=ragged(batch_size=4, drop_last=True))
        values = loop.rows[-1]["train_acc"], loop.rows[-1]["val_loss"]
        return flat(module).tolist(), module.count, module.steps, module.calls, values

    with warns("steps") if depends else nullcontext():
        compared = run()
    monkeypatch.setattr(CarriedState, "_found", lambda self, batch: [])
    assert run() == compared


def test_an_optimizer_may_repeat_the_first_step(train, tiny):
    class Counts(tiny.kind):
        calls = 0

        def training_step(self, batch, batch_idx):
            self.calls += 1
            return super().training_step(batch, batch_idx) / self.calls

    def lbfgs(params):
        return torch.optim.LBFGS(params, lr=0.1, max_iter=3)

    with warns("calls"):
        train(tiny(Counts, lbfgs), federation={"policy": train.policy(lr=False)})


class OptimizerStep:
    """Lightning's own example of a warm-up."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * self.number()
        optimizer.step(closure=optimizer_closure)


class OwnOptimizer:
    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = 0.1 * self.number()


class Target:
    """Keeps a moving average of its network, which starts as an equal copy."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        share = self.number()
        for param, average in zip(self.net.parameters(), self.target.parameters(), strict=True):
            average.data.lerp_(param.detach(), share)


class Momentum:
    """Sets what the step reads."""

    def on_train_batch_start(self, batch, batch_idx):
        self.weight = self.number()

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.weight


class Backward:
    def backward(self, loss):
        (loss * self.number()).backward()


class BeforeBackward:
    def on_before_backward(self, loss):
        by = self.number()
        loss.register_hook(lambda grad: grad * by)


class AfterBackward:
    def on_after_backward(self):
        scaled_gradients(self, self.number())


class BeforeStep:
    def on_before_optimizer_step(self, optimizer):
        scaled_gradients(self, self.number())


class Clipping:
    def configure_gradient_clipping(self, optimizer, **options):
        self.clip_gradients(optimizer, 1e-3 * self.number(), "norm")


class BeforeZeroGrad:
    def on_before_zero_grad(self, optimizer):
        multiplied(self, self.number())


class ZeroGrad:
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)
        multiplied(self, self.number())


class BatchEnd:
    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert not outputs["loss"].requires_grad
        multiplied(self, self.number())


class SchedulerStep:
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()
        self.optimizers().param_groups[0]["lr"] = 0.1 * self.number()


HOOKED = [
    *(OptimizerStep, OwnOptimizer, Momentum, Backward, BeforeBackward, AfterBackward, BeforeStep),
    *(Clipping, BeforeZeroGrad, ZeroGrad, BatchEnd, SchedulerStep),
]
NUMBERS = {
    "calls": lambda m: setattr(m, "calls", vars(m).get("calls", 0) + 1) or 1 / m.calls,
    "trainer.global_step": lambda m: 1 / (1 + m.global_step),
    None: lambda m: 0.9,
    "of the client": lambda m: 1 / (2 + len(m.seen_by_client)),
}


@pytest.mark.parametrize(
    ("kind", "name"), [*diagonal(HOOKED, NUMBERS), *((Target, name) for name in NUMBERS)]
)
def test_what_hooks_of_a_step_carry_over_is_named(train, flat, tiny, monkeypatch, kind, name):
    class Numbers:
        def on_client_start(self):
            self.seen_by_client = []

        def number(self):
            self.seen_by_client.append(0)
            return NUMBERS[name](self)

    def run():
        module = tiny(type("Hooked", (kind, Numbers, tiny.kind), {}))
        train(module, rounds=2)
        return flat(module).tolist(), module.seen_by_client

    carries = name in ("calls", "trainer.global_step")
    found = pytest.warns(UserWarning, match=rf"Hooked\..* depends on {name}, which carries over")
    with found if carries else nullcontext():
        compared = run()
    monkeypatch.setattr(CarriedState, "_found", lambda self, batch: [])
    assert run() == compared


class Decays(SchedulerStep):
    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()


class KeepsGradients:
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)


class Freezes:
    """A parameter that trains in the first step of each client."""

    def on_client_start(self):
        next(self.parameters()).requires_grad = True

    def on_train_batch_end(self, outputs, batch, batch_idx):
        next(self.parameters()).requires_grad = False


@pytest.mark.parametrize("kind", [Decays, KeepsGradients, Freezes])
def test_what_hooks_change_in_a_comparison_is_restored(train, flat, tiny, monkeypatch, kind):
    def run():
        module = tiny(type("Hooked", (kind, tiny.kind), {}))
        train(module)
        return flat(module).tolist()

    compared = run()
    monkeypatch.setattr(CarriedState, "_found", lambda self, batch: [])
    assert run() == compared


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


def test_loggers_are_silent_where_hooks_are_compared(train, tiny):
    class Logged(tiny.kind):
        steps = 0

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.steps += 1
            self.logger.log_metrics({"own": 1.0}, step=batch_idx)
            self.log("logged", 1.0)

    class Logger(L.pytorch.loggers.logger.DummyLogger):
        seen = 0

        def log_metrics(self, metrics, step=None):
            self.seen += "own" in metrics

    module, logger = tiny(Logged), Logger()
    train(module, logger=logger)
    assert logger.seen == module.steps > 0


class Decay:
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.5


class OwnScheduler:
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.own = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return optimizer

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.own.step()


class OwnGenerator:
    def __init__(self, *args):
        super().__init__(*args)
        self.own = self.kind()

    def on_train_batch_start(self, batch, batch_idx):
        self.weight = float(self.draw())

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.weight


class OfTorch(OwnGenerator):
    kind = staticmethod(lambda: torch.Generator().manual_seed(0))

    def draw(self):
        return torch.rand((), generator=self.own)


class OfNumpy(OwnGenerator):
    kind = staticmethod(lambda: np.random.default_rng(0))

    def draw(self):
        return self.own.random()


class OfPython(OwnGenerator):
    kind = staticmethod(lambda: random.Random(0))

    def draw(self):
        return self.own.random()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Decay, "the optimizer's options"),
        (OwnScheduler, ".*the optimizer's options"),
        *((kind, "own") for kind in (OfTorch, OfNumpy, OfPython)),
    ],
)
def test_options_schedulers_and_generators_carry_over(train, flat, tiny, monkeypatch, kind, name):
    def run():
        module = tiny(type("Hooked", (kind, tiny.kind), {}))
        train(module)
        return flat(module).tolist(), getattr(getattr(module, "own", None), "last_epoch", 0)

    with pytest.warns(UserWarning, match=rf"Hooked\..* depends on {name}, which carries over"):
        compared = run()
    monkeypatch.setattr(CarriedState, "_found", lambda self, batch: [])
    assert run() == compared


class DecaysInStep:
    def training_step(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] = group["lr"] * 0.9
        return super().training_step(batch, batch_idx)


class SetInStep:
    def training_step(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] = 0.1 / (1 + batch_idx)
        return super().training_step(batch, batch_idx)


def test_options_that_training_step_moves_carry_over(train, tiny):
    own = {"federation": {"policy": train.policy(lr=False)}}
    with pytest.warns(UserWarning, match="training_step depends on the optimizer's options"):
        train(tiny(type("Decays", (DecaysInStep, tiny.kind), {})), **own)
    for group_size in (1, 3):
        with pytest.raises(FederationError, match="set \\(the optimizer's options\\)"):
            train(tiny(type("Decays", (DecaysInStep, tiny.kind), {})), group_size, **own)


def test_options_that_training_step_sets_anew_do_not(train, agree, tiny):
    own = {"federation": {"policy": train.policy(lr=False)}}
    agree(lambda: tiny(type("Sets", (SetInStep, tiny.kind), {})), (1, 3), **own)


def test_options_that_a_round_changes_do_not_carry_over(train, tiny, data, blobs):
    class PerRound(tiny.kind):
        def on_train_epoch_start(self):
            self.optimizers().param_groups[0]["lr"] = 0.1 / (1 + self.current_epoch)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            pass

    train(tiny(PerRound), federation={"clients_per_round": 1}, rounds=4)


def test_a_step_is_not_repeated_if_its_changes_cannot_be_undone(train, tiny, monkeypatch):
    monkeypatch.setattr(attributes, "MAX_BYTES", 100)

    class Counts(tiny.kind):
        def on_train_start(self):
            self.seen = torch.zeros(101)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen += 1

    module = tiny(Counts)
    train(module)
    assert module.seen[0] == module.trainer.global_step
