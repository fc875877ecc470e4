"""Plain Python attributes of a module, of which there is one for all clients."""

import random

import pytest
import torch
import torch.nn.functional as F

from lightning_fl.types import FederationError


def count(self, loss, outputs):
    self.steps += 1
    return loss * self.steps


def previous(self, loss, outputs):
    mean, before = outputs.mean(0), self.before
    self.before = mean.detach()
    return loss if before is None else loss + (mean - before).square().sum()


def history(self, loss, outputs):
    self.history.append(loss.detach())
    return loss * len(self.history)


def inside(self, loss, outputs):
    self.nested["losses"].append(0)
    return loss + len(self.nested["losses"]) * outputs.square().mean()


def child(self, loss, outputs):
    self.net[1].calls = getattr(self.net[1], "calls", 0) + 1
    return loss / self.net[1].calls


CARRIED = {
    "steps": count,
    "before": previous,
    "history": history,
    "nested": inside,
    "net.1.calls": child,
}


def outputs_of_the_epoch(self, loss, outputs):
    self.history.append(loss.detach())
    return loss


def last_loss(self, loss, outputs):
    self.before = loss.detach()
    return loss


def cached(self, loss, outputs):
    if self.before is None:
        self.before = torch.arange(3.0, dtype=torch.float64)
    return loss + outputs @ self.before @ torch.ones(len(outputs), dtype=torch.float64)


@pytest.fixture
def stateful(tiny):
    """A module whose step does something with attributes, which it sets anew for each client."""

    class Stateful(tiny.kind):
        def on_client_start(self):
            self.steps, self.before, self.history, self.nested = 0, None, [], {"losses": []}

        def training_step(self, batch, batch_idx):
            outputs = self.net(batch[0])
            return self.step(F.cross_entropy(outputs, batch[1]), outputs)

    def make(step):
        module = tiny(Stateful)
        vars(module)["step"] = step.__get__(module)
        module.on_client_start()
        return module

    return make


@pytest.mark.parametrize("name", CARRIED)
def test_what_one_step_leaves_for_the_next_is_refused(train, stateful, name):
    train(stateful(CARRIED[name]), rounds=1)  # right in sequential training
    with pytest.raises(FederationError, match=rf"an earlier step has set \({name}\).*in buffers"):
        train(stateful(CARRIED[name]), 3)


@pytest.mark.parametrize("step", [outputs_of_the_epoch, last_loss, cached])
@pytest.mark.filterwarnings("ignore:Stateful is trained one client after another")
def test_what_no_step_depends_on_is_not(agree, stateful, step):
    agree(lambda: stateful(step), (1, 3))


def test_a_buffer_is_each_clients_own(agree, tiny):
    class Counts(tiny.kind):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

        def on_client_start(self):
            self.steps.zero_()

        def training_step(self, batch, batch_idx):
            self.steps += 1
            return super().training_step(batch, batch_idx) * self.steps

    agree(lambda: tiny(Counts), (1, 3, 7), rounds=3)


def test_random_numbers_of_another_generator_carry_nothing(train, stateful):
    def noise(self, loss, outputs):
        self.before = random.SystemRandom().random()  # which no seed reaches
        return loss * self.before

    train(stateful(noise), 3, rounds=1)
