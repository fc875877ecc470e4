"""What a module logs in vectorized training is what it logs in sequential training."""

import pytest
import torch.nn.functional as F

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
    class Logs(tiny.kind):
        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            log(self, loss)
            return loss

    expected = agree(lambda: tiny(Logs), (group_size,), 2)
    assert "a" in expected.rows[0]


@pytest.mark.filterwarnings("ignore:.*one client after another")
def test_a_value_that_is_logged_for_some_clients_of_a_group_is_refused(train, tiny):
    class OfFullBatches(tiny.kind):
        def training_step(self, batch, batch_idx):
            if len(batch[1]) == 10:
                self.log("full", 1.0, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    with pytest.raises(FederationError, match="it logs full for some clients only"):
        train(tiny(OfFullBatches), 7)
