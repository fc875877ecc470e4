"""What a module logs in vectorized training is what it logs in sequential training."""

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torchmetrics import MetricCollection, SumMetric

from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError


def log_alone(module, loss):
    module.log("a", loss, on_step=False, on_epoch=True)
    module.log("b", 2.5, on_epoch=True)


def log_dict(module, loss):
    module.log_dict({"a": loss, "b": 2 * loss, "n": 3}, on_step=True, on_epoch=True)


def log_by_position(module, loss):
    module.log("a", loss, False, False, False, True)  # not on a step, but on an epoch


def log_with_a_size(module, loss):
    module.log("a", loss, on_step=False, on_epoch=True, batch_size=1)


def log_the_largest(module, loss):
    module.log("a", loss, on_step=False, on_epoch=True, reduce_fx="max")


def log_one_element(module, loss):
    module.log("a", loss[None], on_step=False, on_epoch=True)


def log_twice(module, loss):
    for value in (loss, 2 * loss):
        module.log("a", value, on_step=False, on_epoch=True)
        module.log("b", value, on_step=False, on_epoch=True, reduce_fx="sum")


@pytest.mark.parametrize(
    "log",
    [
        log_alone,
        log_dict,
        log_by_position,
        log_with_a_size,
        log_the_largest,
        log_one_element,
        log_twice,
    ],
)
@pytest.mark.parametrize("group_size", [1, 3])
def test_what_a_module_logs(agree, tiny, log, group_size):
    class Logs(tiny.kind):
        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            log(self, loss)
            return loss

    expected = agree(lambda: tiny(Logs), (group_size,), 2)
    assert "a" in expected.rows[0]


def test_a_value_that_is_logged_now_and_then(agree, tiny):
    class Sometimes(tiny.kind):
        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            if loss > 1:
                self.log("large", loss, on_step=False, on_epoch=True)
            return loss

    with pytest.warns(match="one client after another"):
        agree(lambda: tiny(Sometimes), (3,))


@pytest.mark.filterwarnings("ignore:.*one client after another")
def test_a_value_that_is_logged_for_some_clients_of_a_group_is_refused(train, tiny):
    class OfFullBatches(tiny.kind):
        def training_step(self, batch, batch_idx):
            if len(batch[1]) == 10:
                self.log("full", 1.0, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    with pytest.raises(FederationError, match="it logs full for some clients only"):
        train(tiny(OfFullBatches), 7)


def test_a_step_is_logged_as_the_mean_of_its_samples(train, tiny, ragged):
    """The last step of a round with a group of seven is that of the clients with most steps."""

    class Look(Callback):
        steps = ()

        def on_train_batch_end(self, trainer, module, *args):
            self.steps += (float(trainer.callback_metrics["loss_step"]),)

    plain, group_size = Look(), Look()
    federation = {"policy": train.policy(lr=False)}
    data = ragged()
    train(tiny(), datamodule=data, rounds=1, callbacks=[plain], federation=federation)
    train(tiny(), 7, datamodule=ragged(), rounds=1, callbacks=[group_size], federation=federation)
    of = {}  # [client, step]
    steps = iter(plain.steps)
    for client in range(7):
        for i in range(1 + client % 3):
            of[client, i] = next(steps)
    for i, found in enumerate(group_size.steps):
        clients = torch.tensor([c for c in range(7) if (c, i) in of])
        n = data.batch_sizes(clients, i, 1)[0]
        losses = torch.tensor([of[int(c), i] for c in clients])
        assert found == pytest.approx(float((losses * n).sum() / n.sum()), rel=1e-5)
    assert len(group_size.steps) == 3


def reads_rate(tiny, get):
    """Return a module whose loss depends on the learning rate."""

    class Reads(tiny.kind):
        def training_step(self, batch, batch_idx):
            rate = get(self.optimizers().param_groups[0])
            self.log("rate", rate, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx) * (1 + rate)

    return Reads


@pytest.mark.parametrize("steps_per_batch", [1, 3])
def test_a_step_reads_the_rate_of_its_clients(agree, tiny, steps_per_batch):
    policy = Schedule(lr=0.02, num_steps=3)  # of the optimizer: 0.1
    kind = reads_rate(tiny, lambda group: group["lr"])
    options = {"federation": {"policy": policy}}
    with pytest.warns(UserWarning, match="one client after another.* uses its optimizer"):
        loop = agree(lambda: tiny(kind), (3,), steps_per_batch, **options)
    assert loop.rows[0]["rate"] == pytest.approx(0.02)


@pytest.mark.parametrize("get", [lambda group: group["lr"], lambda group: group.get("lr", 0.0)])
def test_a_step_reads_the_rate_of_each_client(agree, tiny, get):
    with pytest.warns(UserWarning, match="one client after another.* uses its optimizer"):
        agree(lambda: tiny(reads_rate(tiny, get)), (3,), (1, 2))


class Counts:
    """Count steps and samples with metrics that are no submodules."""

    def __init__(self):
        super().__init__()
        self.counts = {"steps": SumMetric(), "all": MetricCollection({"samples": SumMetric()})}

    def training_step(self, batch, batch_idx):
        self.counts["steps"].update(1.0)
        self.counts["all"].update(float(len(batch[1])))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("steps", self.counts["steps"].compute())
        self.log_dict(self.counts["all"].compute())
        for metric in self.counts.values():
            metric.reset()


class Compared(Counts):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        """Have a hook, so that the step is repeated for a comparison."""


@pytest.mark.filterwarnings("ignore:.*one client after another")
@pytest.mark.parametrize(("kind", "group_size"), [(Counts, 1), (Counts, 3), (Compared, None)])
def test_checks_leave_no_trace_in_metrics(train, tiny, ragged, kind, group_size):
    module = tiny(type("Counting", (kind, tiny.kind), {}))
    rows = train(module, group_size).rows
    assert [row["steps"] for row in rows] == [row["num_steps"] for row in rows]
    plain = train(tiny(type("Counting", (Counts, tiny.kind), {}))).rows
    assert [row["samples"] for row in rows] == [row["samples"] for row in plain]
