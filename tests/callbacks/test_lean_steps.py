"""Steps without calls of hooks that nobody overrides are Lightning's own steps."""

import copy
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_fl.callbacks import FederatedLoop
from lightning_fl.policies import Schedule
from lightning_fl.runners import Phase
from lightning_fl.types import FederationError
from recorded import CALLBACK_HOOKS, recorded, steps_by_lightning

#: Hooks of a module that keep its steps ordinary.
NOTICES = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "training_step",
    "configure_gradient_clipping",
    "lr_scheduler_step",
)


class Logged(DummyLogger):
    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))


@pytest.fixture
def steps_of_lightning(monkeypatch):
    """Count the steps that Lightning makes itself."""
    made = []
    run = _AutomaticOptimization.run

    def counted(self, *args):
        made.append(args)
        return run(self, *args)

    monkeypatch.setattr(_AutomaticOptimization, "run", counted)
    return made


class Net(L.LightningModule):
    """Options of a training step, by name."""

    def __init__(self, *options):
        super().__init__()
        self.options = options
        self.net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        if "log" in self.options:
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("size", float(len(x)), reduce_fx="sum", on_step=False, on_epoch=True)
        if "skip" in self.options and batch_idx % 2:
            return None
        return {"loss": loss, "extra": batch_idx} if "dict" in self.options else loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        if "lbfgs" in self.options:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        if "scheduler" not in self.options:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Plain(Net):
    def training_step(self, batch):
        return super().training_step(batch, 0)


class Moved(Net):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return 2 * batch[0], batch[1]


class Optimized(Net):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=0.1)


class Graded(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        loss = closure()
        super().step()
        return loss


def federation(fit, module, lean, *callbacks, policy=None, phases=(), **options):
    """Return all that a fit leaves: parameters, progress, logged values, the table, callbacks."""
    torch.manual_seed(0)
    module = module().double()
    loop = FederatedLoop(
        policy=policy or Schedule(num_steps=4, lr=0.02, phases=phases), buffers="average", seed=1
    )
    logger = Logged()
    options |= {"logger": logger, "log_every_n_steps": 3, "callbacks": callbacks}
    with nullcontext() if lean else steps_by_lightning():
        fit(module, loop, rounds=2, **options)
    trainer = module.trainer
    progress = copy.deepcopy(trainer.fit_loop.state_dict())
    tensors = {name: t.tolist() for name, t in module.state_dict().items()}
    rows = [{k: v for k, v in row.items() if "seconds" not in k} for row in loop.rows]
    seen = [vars(callback).get("seen") for callback in callbacks]
    return tensors, progress, logger.rows, rows, trainer.global_step, seen


def both(fit, make, *callbacks, **options):
    """Compare Lightning's steps with lean ones, with new callbacks for each; return what is left.

    Of a callback, that is what it has ``seen``.
    """
    by_lightning, lean = (
        federation(fit, make, lean, *(each() for each in callbacks), **options)
        for lean in (False, True)
    )
    assert by_lightning == lean
    return lean


class Sees(L.Callback):
    """It has a list for what its hooks see."""

    def __init__(self):
        self.seen = []


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (lambda: Net(), {}),
        (lambda: Net("log", "scheduler"), {"gradient_clip_val": 0.1}),
        (lambda: Net("dict", "log"), {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"}),
        (lambda: Net("skip"), {}),
        (lambda: Net("lbfgs", "log"), {}),
        (lambda: Optimized(Graded), {"gradient_clip_val": 0.1}),
        (lambda: Plain("scheduler"), {"enable_progress_bar": True}),
        (lambda: Moved("log"), {}),
        (lambda: Net("log"), {"phases": [Phase(["net.0.*"], num_steps=2), Phase(["net.2.*"])]}),
    ],
    ids=[
        *("plain", "scheduler", "dict", "skip", "lbfgs", "without gradients", "without batch_idx"),
        *("transfer", "phases"),
    ],
)
@pytest.mark.filterwarnings("ignore:You have overridden .on_after_batch_transfer")
@pytest.mark.filterwarnings("ignore:.*training_step.* returned .None.")
def test_lean_steps_equal_those_of_lightning(fit, steps_of_lightning, module, options):
    both(fit, module, **options)
    assert len(steps_of_lightning) == 2 * 4 * 4  # of one of the two


@pytest.mark.parametrize("clip", [0.1, None])
@pytest.mark.parametrize("who", ["callback", "module", "both"])
def test_overridden_hooks_are_called_in_the_same_order(fit, steps_of_lightning, who, clip):
    found = []
    for lean in (False, True):
        calls, steps_of_lightning[:] = [], []
        watch = L.Callback()
        if who != "module":
            recorded(watch, CALLBACK_HOOKS, calls, "callback", 2)

        def module(names=NOTICES if who != "callback" else (), calls=calls):
            return recorded(Net("log", "scheduler"), names, calls, "module", 0)

        found.append((calls, federation(fit, module, lean, watch, gradient_clip_val=clip)))
        assert bool(steps_of_lightning) != lean
    assert len(found[0][0]) > 200
    for expected, call in zip(found[0][0], found[1][0], strict=True):
        assert call == expected
    assert found[0][1] == found[1][1]


def test_a_module_that_clips_by_itself_needs_no_option_of_the_trainer(fit):
    class Clipped(Net):
        def configure_gradient_clipping(self, optimizer, *args, **kwargs):
            self.clip_gradients(optimizer, 0.01, "norm")

    assert both(fit, Clipped)[0] != federation(fit, Net, True)[0]


def test_a_hook_that_is_added_in_the_fit_is_called_from_the_next_round_on(fit):
    class Late(Sees):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                self.on_after_backward = lambda *args: self.seen.append(1)

    *_, (seen,) = federation(fit, Net, True, Late())
    assert len(seen) == 4 * 4


def test_a_hook_that_logs_is_known_by_its_name(fit):
    class Log(L.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            module.log("of_a_callback", 1.0)

    class OfAModule(Net):
        def on_train_batch_end(self, *args):
            self.log("of_a_module", 2.0)

    _, _, rows, *_ = both(fit, OfAModule, Log)
    assert any("of_a_callback" in row and "of_a_module" in row for _, row in rows)


class Lazy(torch.optim.SGD):
    def step(self, closure=None):
        return super().step()


@pytest.mark.parametrize("lean", [False, True])
def test_an_optimizer_that_does_not_call_the_closure_is_refused_as_by_lightning(fit, lean):
    with pytest.raises(MisconfigurationException, match="closure hasn't been"):
        federation(fit, lambda: Optimized(Lazy), lean)


class Overwritten(Net):
    """Returns the same memory in every step."""

    def __init__(self):
        super().__init__()
        self.memory = torch.zeros((), dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.memory = self.memory.detach().zero_()
        return self.memory.add_(loss)


def test_a_callback_may_keep_a_loss_whose_memory_is_written_again(fit):
    class Keeps(Sees):
        def on_train_batch_end(self, trainer, module, outputs, *args):
            self.seen.append(outputs["loss"])

    *_, (losses,) = both(fit, Overwritten, Keeps)
    assert len(set(map(float, losses))) > 20


@pytest.mark.parametrize("first", [0, 2])
def test_values_that_are_logged_in_some_steps_only(fit, first):
    class Module(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx >= first and self.current_epoch:
                self.log("late", loss, on_step=True, prog_bar=True)
            return loss

    class Reads(Sees):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.seen.append({k: v.item() for k, v in trainer.callback_metrics.items()})
            self.seen.append({k: float(v) for k, v in trainer.progress_bar_metrics.items()})
            self.seen.append(trainer.fit_loop.epoch_loop._batches_that_stepped)
            self.seen.append(trainer._logger_connector._first_loop_iter)

    *_, (seen,) = both(fit, Module, Reads)
    assert len(seen) == 2 * 4 * 4 * 4


@pytest.mark.parametrize("stops", [False, True])
def test_a_module_that_ends_a_round(fit, stops):
    class Ends(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                self.trainer.should_stop = stops
                return -1
            return None

    if stops:
        both(fit, Ends)
        return
    for lean in (False, True):
        with pytest.raises(FederationError, match="must not return -1"):
            federation(fit, Ends, lean)


class Halved(Net):
    def backward(self, loss):
        (loss / 2).backward()


class Twice(Net):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        optimizer.step(closure=optimizer_closure)


class Kept(Net):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        pass


class Fetched(Net):
    def __init__(self):
        super().__init__()
        self.backward = lambda loss: loss.backward()


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Halved, {}),
        (Twice, {}),
        (Kept, {}),
        (Fetched, {}),
        (Net, {"precision": "bf16-mixed"}),
        (Net, {"profiler": "simple"}),
    ],
    ids=["backward", "optimizer_step", "zero_grad", "instance", "precision", "profiler"],
)
def test_other_steps_are_left_to_lightning(fit, steps_of_lightning, module, options):
    both(fit, module, **options)
    assert len(steps_of_lightning) == 2 * 2 * 4 * 4
