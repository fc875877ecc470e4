"""Plain Python attributes of a module, of which there is one for all clients."""

import random
from dataclasses import dataclass, field

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lightning_fl.runners.attributes import MAX_BYTES, Attributes
from lightning_fl.types import FederationError


def count(self, loss, outputs):
    self.steps += 1
    return loss * self.steps


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
            self.steps, self.before, self.history = 0, None, []

        def training_step(self, batch, batch_idx):
            outputs = self.net(batch[0])
            return self.step(F.cross_entropy(outputs, batch[1]), outputs)

    def make(step):
        module = tiny(Stateful)
        vars(module)["step"] = step.__get__(module)
        module.on_client_start()
        return module

    return make


def test_what_one_step_leaves_for_the_next_is_refused(train, stateful):
    train(stateful(count), rounds=1)  # right in sequential training
    with pytest.raises(FederationError, match=r"an earlier step has set \(steps\).*in buffers"):
        train(stateful(count), 3)


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

    with pytest.warns(UserWarning, match="two equal steps of a client give different results"):
        train(stateful(noise), 3, rounds=1)


class Annealed:
    """A helper with a counter of its own."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.calls / 4


@dataclass(slots=True)
class Slotted:
    """A helper that holds its counter in a slot."""

    calls: int = 0
    empty: int = field(init=False)

    def __call__(self):
        self.calls += 1
        return self.calls / 4


def test_what_a_class_holds_is_looked_at(train, tiny):
    class Counts(tiny.kind):
        def training_step(self, batch, batch_idx):
            self.seen.append(0)
            return super().training_step(batch, batch_idx) / len(self.seen)

    Counts.seen = []
    with pytest.raises(FederationError, match=r"an earlier step has set \(seen\)"):
        train(tiny(Counts), 3)


def test_a_number_of_a_class_is_looked_at(train, tiny):
    class Counts(tiny.kind):
        steps = 0

        def training_step(self, batch, batch_idx):
            Counts.steps += 1
            return super().training_step(batch, batch_idx) / Counts.steps

    with pytest.raises(FederationError, match=r"an earlier step has set \(steps\)"):
        train(tiny(Counts), 3)


def test_state_that_begins_anew_with_the_first_batch_is_refused(train, tiny):
    class Truncated(tiny.kind):
        """The state goes on from batch to batch, as a hidden state in truncated backpropagation."""

        def training_step(self, batch, batch_idx):
            outputs = self.net(batch[0])
            hidden = 0 if batch_idx == 0 else self.hidden
            self.hidden = hidden + outputs.detach().mean()
            return F.cross_entropy(outputs, batch[1]) + (outputs.mean() - hidden).square()

    train(tiny(Truncated), rounds=1)
    with pytest.raises(FederationError, match=r"an earlier step has set \(hidden\)"):
        train(tiny(Truncated), 3)


def test_a_snapshot_is_restored_and_leaves_the_trainer_alone(tiny):
    module = tiny()
    module.helper, module.center, module.array = Annealed(), torch.zeros(2), np.zeros(2)
    module.trainer = trainer = L.Trainer(logger=False, enable_checkpointing=False)
    attributes = Attributes(module)
    for _ in range(2):  # also after the first restore
        module.helper()
        module.center.add_(1)
        module.array += 1
        trainer.note = 1
        assert attributes.changed() == ["helper", "center", "array"]
        attributes.restore()
        assert module.helper.calls == 0
        assert module.center.tolist() == module.array.tolist() == [0, 0]
        assert attributes.changed() == []
    assert trainer.note == 1


def test_a_snapshot_has_slots_and_the_attributes_of_classes(tiny):
    class Counts(tiny.kind):
        steps = 0

    module = tiny(Counts)
    module.helper, module.nested = Annealed(), Slotted(calls=[0])
    module.helper.inside = Slotted()
    attributes = Attributes(module)
    for _ in range(2):
        module.helper.inside()
        module.nested.calls.append(1)
        module.nested.empty = 3
        Counts.steps, Counts.new = 1, 2
        assert attributes.changed() == ["helper", "nested", "steps", "new"]
        attributes.restore()
        assert module.helper.inside.calls == 0
        assert module.nested.calls == [0]
        assert not hasattr(module.nested, "empty")
        assert Counts.steps == 0
        assert not hasattr(Counts, "new")
        assert attributes.changed() == []


def test_a_snapshot_takes_any_tensor_and_any_depth(tiny):
    module, last = tiny(), Annealed()
    module.chain = last
    for _ in range(2000):  # more than Python's limit of recursion
        last.next = last = Annealed()
    module.sparse, module.meta = torch.eye(3).to_sparse(), torch.zeros(3, device="meta")
    module.large = torch.zeros(MAX_BYTES + 1, dtype=torch.uint8)
    attributes = Attributes(module)
    last.calls = 1
    module.large += 1
    assert attributes.changed() == ["chain", "large"]
    attributes.restore()
    assert last.calls == 0
    assert attributes.changed() == ["large"]  # it is not copied
