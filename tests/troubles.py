"""Modules and callbacks with state that clients share, each in a line, and harmless ones.

The loss of a step is multiplied by a factor that reads and changes such state.
"""

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import Digits
from lightning_fl.partition import ByLabel
from lightning_fl.policies import Schedule
from lightning_fl.testing import Run


class Helper:
    calls = 0


GLOBAL = Helper()


def furnish(module):
    """Give a module the attributes that the factors use."""
    module.steps, module.history, module.helper = 0, [], Helper()
    module.center, module.array, module.late = torch.zeros(()), np.zeros(1), 0.0
    module.teacher, module.drawn = [nn.Linear(1, 1)], np.random.RandomState(0)
    module.closure = in_a_closure()
    module.register_buffer("count", torch.zeros(()))


class Troubled(L.LightningModule):
    """A classifier of digits; its attributes are there for the factors."""

    seen = 0  # of the class

    def __init__(self, factor=lambda m: 1.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)
        )
        self.factor = factor
        furnish(self)

    def training_step(self, batch, batch_idx):
        self.batch_idx = batch_idx
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.loss = loss.detach()  # a tensor of a graph cannot be copied
        return loss * self.factor(self)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def counted(holder, name):
    """Return a factor that counts in an attribute of what ``holder`` returns for the module."""

    def factor(module):
        place = holder(module)
        setattr(place, name, getattr(place, name, 0) + 1)
        return 1.0 + 0.1 * getattr(place, name)

    return factor


def appended(module):
    module.history.append(0)
    return 1.0 + 0.1 * len(module.history)


def in_a_closure():
    calls = [0]

    def factor(module):
        calls[0] += 1
        return 1.0 + 0.1 * calls[0]

    return factor


def logged_loss(module):
    """Use what others have logged."""
    factor = 1 + module.trainer.callback_metrics.get("logged", 0)
    module.log("logged", module.loss.detach(), batch_size=1)
    return factor


def previous_loss(module):
    before, module.late = module.late, float(module.loss)
    return 1.0 + 0.1 * before


def of_a_mode(module):
    was_training = module.net[2].training
    module.net[2].eval()
    return 1.0 + was_training


#: Factors by which a client affects the next one.
CARRIED = {
    "attribute": counted(lambda m: m, "steps"),
    "list": appended,
    "object": counted(lambda m: m.helper, "calls"),
    "attribute of a layer": counted(lambda m: m.net[1], "calls"),
    "attribute of the class": counted(lambda m: type(m), "seen"),
    "tensor": lambda m: 1 + 0.1 * float(m.center.add_(1)),
    "array": lambda m: 1 + 0.1 * float(np.add(m.array, 1, out=m.array)[0]),
    "parameter in a list": lambda m: 1 + 0.1 * float(m.teacher[0].bias.data.add_(1)),
    "generator": lambda m: 1 + m.drawn.random_sample(),
    "previous loss": previous_loss,
    "logged loss": logged_loss,
    "mode": of_a_mode,
    "closure": lambda m: m.closure(m),
    "global": counted(lambda m: GLOBAL, "calls"),
    "begins in the second round": lambda m: appended(m) if m.current_epoch else 1.0,
}
#: Factors by which no client affects another.
HARMLESS = {
    "nothing": lambda m: 1.0,
    "buffer": lambda m: 1 + 0.1 * m.count.add_(1).detach(),
    "list of losses": lambda m: m.history.append(m.loss) or 1.0,
    "last loss": lambda m: setattr(m, "late", m.loss) or 1.0,
    "round": lambda m: 1.0 + 0.1 * m.current_epoch,
    "batch_idx": lambda m: 1.0 + 0.1 * m.batch_idx,
    "dropout": lambda m: 1.0 + torch.rand(()),
    "reset in the first step": lambda m: (
        setattr(m, "steps", 0 if m.batch_idx == 0 else m.steps + 1) or 1 + 0.1 * m.steps
    ),
}


# --- hooks of the module --------------------------------------------------------------------------


class Clips(Troubled):
    """Its hook uses a number that grows from client to client, or one that does not."""

    is_carried = True

    def configure_gradient_clipping(self, optimizer, **options):
        self.steps += self.is_carried
        self.clip_gradients(optimizer, 1e-3 / (1 + 0.1 * self.steps), "norm")


#: Modules whose hooks affect the next client: whole fits are compared, whatever the hook.
HOOKED = [Clips]


# --- callbacks ------------------------------------------------------------------------------------


class Averages(L.Callback):
    """A moving average of gradients, which goes on from client to client."""

    def __init__(self):
        self.mean = torch.zeros(())

    def on_after_backward(self, trainer, module):
        gradient = module.net[1].bias.grad
        self.mean = 0.9 * self.mean + gradient.clone()
        gradient.add_(self.mean)


class ReadsGlobalStep(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        module.late = 0.1 * trainer.global_step


class Watches(L.Callback):
    """Harmless: it only looks."""

    def __init__(self):
        self.calls, self.seen = 0, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.calls += 1
        self.seen.append(float(outputs["loss"]))


CALLBACKS_CARRY = [Averages, ReadsGlobalStep]


def made(factor=lambda m: 1.0, callbacks=(), kind=Troubled, **options):
    """Return a function that makes the federation of a factor."""

    def make():
        data = Digits(num_clients=5, partition=ByLabel(2), batch_size=16, val_size=100)
        given = {"policy": Schedule(num_steps=3), "buffers": "average", "seed": 1} | options
        watchers = [each() for each in callbacks]
        return Run(kind(factor), data, FederatedLoop(**given), watchers, {"accelerator": "cpu"})

    return make
