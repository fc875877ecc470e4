"""Callbacks whose hooks of a batch are called once for several clients and local steps."""

import lightning as L
import pytest


class WarmsUp(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        trainer.optimizers[0].param_groups[0]["lr"] = 0.01 * (1 + batch_idx)


class CoolsDown(L.Callback):
    def on_train_batch_end(self, trainer, *args):
        trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


def by_function():
    return L.pytorch.callbacks.LambdaCallback(on_train_batch_end=CoolsDown().on_train_batch_end)


@pytest.mark.parametrize("steps_per_batch", [1, 3])
@pytest.mark.parametrize("make", [WarmsUp, CoolsDown, by_function])
def test_options_that_a_callback_changes_for_clients_at_once_are_warned_of(
    train, tiny, make, steps_per_batch
):
    callback = make()
    hook = "on_train_batch_start" if make is WarmsUp else "on_train_batch_end"
    with pytest.warns(
        UserWarning, match=rf"{type(callback).__name__}: {hook} changes the optimizer's lr"
    ):
        train(tiny(), 3, steps_per_batch, callbacks=[callback])


class Bounds(L.Callback):
    """Bounds the norms of parameters, which are those of all clients in vectorized training."""

    def on_train_batch_end(self, trainer, *args):
        for param in trainer.optimizers[0].param_groups[0]["params"]:
            param.data.div_(param.data.norm().clamp(min=1))


@pytest.mark.parametrize("steps_per_batch", [1, 3])
def test_parameters_that_a_callback_changes_for_clients_at_once_are_warned_of(
    train, tiny, steps_per_batch
):
    with pytest.warns(
        UserWarning, match=r"Bounds: on_train_batch_end changes the clients' parameters\. It is"
    ):
        train(tiny(), 3, steps_per_batch, callbacks=[Bounds()])


class Sets(L.Callback):
    """Sets attributes of the module in each batch."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        module.scale, module.noted = 1 + batch_idx, batch_idx


def test_attributes_that_a_callback_sets_for_clients_at_once_are_warned_of(train, tiny):
    class Scales(tiny.kind):
        scale, noted = 1, 0

        def training_step(self, batch, batch_idx):
            return self.scale * super().training_step(batch, batch_idx)

    with pytest.warns(UserWarning, match=r"Sets: on_train_batch_start changes Scales\.scale\. It"):
        train(tiny(Scales), 3, 2, callbacks=[Sets()])


def test_attributes_that_no_method_reads_may_be_set(train, tiny):
    train(tiny(), 3, 2, callbacks=[Sets()])
