"""A process that fits many times keeps no fit."""

import gc
import weakref

from lightning_fl.callbacks import FederatedLoop
from lightning_fl.runners import VectorizedClients
from linear import Linear

FITS = 6


def test_no_object_of_a_fit_is_alive_after_it(fit, data):
    def one(is_vectorized):
        class Module(Linear):  # made per fit, as in a notebook or a sweep
            def training_step(self, batch, batch_idx):
                loss = super().training_step(batch, batch_idx)
                self.log("loss", loss)
                return loss

            def validation_step(self, batch, batch_idx):
                self.log("val_loss", super().training_step(batch, batch_idx))

        module, loop, samples = Module().double(), FederatedLoop(), data()
        user = VectorizedClients(module, compile=False) if is_vectorized else module
        fit(user, loop, samples, rounds=1)
        return [weakref.ref(part) for part in (module, loop, samples, loop.aggregator)]

    parts = [part for i in range(FITS) for part in one(i % 2)]
    gc.collect()
    assert sum(part() is not None for part in parts) == 0
