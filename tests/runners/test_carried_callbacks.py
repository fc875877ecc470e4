"""What callbacks carry from one client to the next, for clients that train one after another."""

import threading
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from torchmetrics import MeanMetric

from grids import diagonal
from lightning_fl.runners import carried_callbacks
from lightning_fl.runners.carried_callbacks import CarriedByCallbacks
from scaled import multiplied, scaled_gradients


class BatchStart:
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        trainer.optimizers[0].param_groups[0]["lr"] = 0.1 * self.number(trainer, batch_idx)


class Attribute:
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        module.weight = self.number(trainer, batch_idx)


class Batch:
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        batch[0].mul_(self.number(trainer, batch_idx))


class BeforeZeroGrad:
    def on_before_zero_grad(self, trainer, module, optimizer):
        multiplied(module, self.number(trainer, 0))


class AfterBackward:
    def on_after_backward(self, trainer, module):
        scaled_gradients(module, self.number(trainer, 0))


class NewGradients:
    def on_before_optimizer_step(self, trainer, module, optimizer):
        by = self.number(trainer, 0)
        for param in module.parameters():
            param.grad = param.grad * by


class BatchEnd:
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        assert not outputs["loss"].requires_grad
        multiplied(module, self.number(trainer, batch_idx))


KINDS = [BatchStart, Attribute, Batch, BeforeZeroGrad, AfterBackward, BatchEnd, NewGradients]
NUMBERS = {
    "Acts.calls": lambda own, *_: setattr(own, "calls", own.calls + 1) or 1 / own.calls,
    "Acts.seen": lambda own, *_: own.seen.append(0) or 1 / len(own.seen),
    "Acts.mean": lambda own, *_: own.mean.add_(1).reciprocal().item(),
    "Acts.metric": lambda own, *_: own.metric.update(1.0) or 1 / own.metric._update_count,
    "trainer.global_step": lambda own, trainer, _: 1 / (1 + trainer.global_step),
    "batch_idx": lambda own, _, batch_idx: 1 / (1 + batch_idx),
    None: lambda own, *_: 0.9,
}


@pytest.fixture
def weighted(tiny):
    class Weighted(tiny.kind):
        weight = 1.0

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * self.weight

    return lambda: tiny(Weighted)


def acts(kind, number):
    class Acts(kind, L.Callback):
        def __init__(self):
            self.calls, self.seen, self.mean = 0, [], torch.zeros(())
            self.metric = MeanMetric()

        def number(self, trainer, batch_idx):
            return number(self, trainer, batch_idx)

    return Acts()


def warns(name):
    return pytest.warns(
        UserWarning, match=rf"local steps depend on {name} by .*Acts, which carries"
    )


@pytest.mark.parametrize(("kind", "name"), diagonal(KINDS, NUMBERS))
def test_what_a_callback_carries_over_is_named(train, flat, weighted, monkeypatch, kind, name):
    if name == "batch_idx" and kind not in (BatchStart, Attribute, Batch, BatchEnd):
        pytest.skip("a hook without batch_idx")

    def run():
        module, callback = weighted(), acts(kind, NUMBERS[name])
        train(module, callbacks=[callback])
        state = callback.calls, len(callback.seen), callback.mean, callback.metric._update_count
        return flat(module).tolist(), state

    with nullcontext() if name is None else warns(name):
        compared = run()
    monkeypatch.setattr(CarriedByCallbacks, "_found", lambda *_: [])
    assert run() == compared


def test_a_warm_up_that_ends_with_the_first_client_is_found(train, weighted):
    with warns("trainer.global_step"):
        train(
            weighted(),
            callbacks=[acts(BatchStart, lambda own, t, _: min(1.0, (1 + t.global_step) / 3))],
        )


def test_a_callback_that_only_looks_is_never_called_for_a_comparison(train, weighted):
    class Looks(L.Callback):
        steps, norms = 0, 0.0

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            Looks.steps += 1  # not of a copy
            self.norms += sum(p.detach().norm().item() for p in module.parameters())

    module = weighted()
    train(module, callbacks=[Looks()])
    assert Looks.steps == module.trainer.global_step > 0


class PerClient(L.Callback):
    """Counts the steps of each client, and knows who trains."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        step = trainer.datamodule.plan().schedule[batch_idx]
        if step.first:
            self.steps = 0
        self.steps += 1
        assert self.steps == step.start + 1
        module.weight = 1 / self.steps / (1 + step.rows[0])


def test_what_is_kept_per_client_is_not_named(train, weighted):
    train(weighted(), callbacks=[PerClient()])


def test_a_value_of_the_round_is_not_named(train, weighted):
    class Curriculum(L.Callback):
        def on_train_epoch_start(self, trainer, module):
            self.factor = 1 / (1 + trainer.current_epoch)

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            module.weight = self.factor

    train(weighted(), callbacks=[Curriculum()], rounds=3)


def test_the_modules_own_global_step_is_not_that_of_a_callback(train, tiny):
    class Own(tiny.kind):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) / (1 + self.global_step)

    with pytest.warns(UserWarning, match="which carries over") as found:
        train(tiny(Own), callbacks=[acts(BatchEnd, NUMBERS[None])])
    texts = [str(each.message) for each in found if "carries over" in str(each.message)]
    assert len(texts) == 1
    assert texts[0].startswith("Own.training_step")


@pytest.mark.parametrize("state", ["large", "lock"])
def test_a_callback_that_cannot_be_copied_is_left_alone(train, weighted, monkeypatch, state):
    monkeypatch.setattr(carried_callbacks, "MAX_BYTES", 100)
    callback = acts(BatchEnd, NUMBERS["Acts.calls"])
    callback.held = torch.zeros(101) if state == "large" else threading.Lock()
    train(weighted(), callbacks=[callback])


def test_logs_of_a_comparison_are_dropped(train, weighted, monkeypatch):
    class Logs(L.Callback):
        steps = 0

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.steps += 1
            self.log("own", float(self.steps), on_epoch=True, on_step=False)
            multiplied(module, 1 / self.steps)

    with pytest.warns(UserWarning, match=r"Logs\.steps"):
        compared = train(weighted(), callbacks=[Logs()])
    monkeypatch.setattr(CarriedByCallbacks, "_found", lambda *_: [])
    assert [row["own"] for row in train(weighted(), callbacks=[Logs()]).rows] == [
        row["own"] for row in compared.rows
    ]


class CoolsDown(L.Callback):
    def on_train_batch_end(self, trainer, *args):
        trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


def test_options_that_a_callback_leaves_to_the_next_client_are_named(train, tiny):
    with pytest.warns(UserWarning, match="the optimizer's options by .*CoolsDown, which carries"):
        train(tiny(), callbacks=[CoolsDown()])


def test_options_that_a_callback_changes_between_rounds_are_not(train, tiny):
    class Looks(L.Callback):
        def on_train_epoch_start(self, trainer, module):
            trainer.optimizers[0].param_groups[0]["lr"] = 0.1 / (1 + trainer.current_epoch)

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.lr = trainer.optimizers[0].param_groups[0]["lr"]

    train(tiny(), 3, callbacks=[Looks()])


class Averages(L.Callback):
    """A moving average of parameters, as users write it."""

    def on_train_start(self, trainer, module):
        self.mean = {name: p.detach().clone() for name, p in module.named_parameters()}

    def on_train_batch_end(self, trainer, module, *args):
        for name, p in module.named_parameters():
            self.mean[name].lerp_(p.detach(), 0.1)

    def load(self, trainer, module):
        module.load_state_dict(self.mean, strict=False)


@pytest.mark.parametrize("hook", ["on_validation_start", "on_train_epoch_end", "on_train_end"])
def test_an_average_over_steps_that_becomes_the_global_model_is_warned_of(train, tiny, hook):
    callback = type("Averaged", (Averages,), {hook: Averages.load})()
    with pytest.warns(
        UserWarning, match=rf"Averaged reads .* in on_train_batch_end .* in {hook}"
    ) as w:
        train(tiny(), callbacks=[callback])
    assert sum("Averaged" in str(each.message) for each in w) == 1


def test_parameters_may_be_looked_at_in_steps_and_written_after_the_round(train, tiny):
    class Prunes(L.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            self.norm = module.net[0].weight.detach().norm()

        def on_train_epoch_end(self, trainer, module):
            module.net[0].weight.data[0] = 0

    class AverageOfRounds(Averages):
        on_train_batch_end = L.Callback.on_train_batch_end

        def on_train_epoch_end(self, trainer, module):
            Averages.on_train_batch_end(self, trainer, module)
            self.load(trainer, module)

    train(tiny(), callbacks=[Prunes(), AverageOfRounds()])
