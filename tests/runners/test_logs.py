"""What a module logs in vectorized training is what it logs in sequential training."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback

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


LOGS = [
    *(log_alone, log_dict, log_by_position, log_with_a_size),
    *(log_the_largest, log_one_element, log_twice),
]


@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.filterwarnings("ignore:.*training_step logs a metric or logs a twice")
def test_logged_values_agree(agree, tiny, log, group_size):
    def step(module, loss, batch, batch_idx):
        log(module, loss)
        return loss

    expected = agree(lambda: tiny(step=step), (group_size,), 2)
    assert "a" in expected.rows[0]


@pytest.mark.filterwarnings("ignore:.*one client after another")
def test_a_value_that_is_logged_for_some_clients_of_a_group_is_refused(train, tiny):
    def log_full_batches(module, loss, batch, batch_idx):
        if len(batch[1]) == 10:
            module.log("full", 1.0, on_step=False, on_epoch=True)
        return loss

    with pytest.raises(FederationError, match="it logs full for some clients only"):
        train(tiny(step=log_full_batches), 7)


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
