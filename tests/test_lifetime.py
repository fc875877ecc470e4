"""A process that fits many times keeps no fit."""

import gc
import weakref

import lightning as L
import torch
from torch import nn

from lightning_fl.callbacks import FederatedLoop
from lightning_fl.runners import VectorizedClients

FITS = 6


def test_no_object_of_a_fit_is_alive_after_it(fit, data):
    def one(is_vectorized):
        class Module(L.LightningModule):  # made per fit, as in a notebook or a sweep
            def __init__(self):
                super().__init__()
                self.net = nn.Linear(6, 3).double()

            def training_step(self, batch, batch_idx):
                loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
                self.log("loss", loss)
                return loss

            def validation_step(self, batch, batch_idx):
                self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        module, loop, samples = Module(), FederatedLoop(), data()
        user = VectorizedClients(module, compile=False) if is_vectorized else module
        fit(user, loop, samples, rounds=1)
        return [weakref.ref(part) for part in (module, loop, samples, loop.aggregator)]

    parts = [part for i in range(FITS) for part in one(i % 2)]
    gc.collect()
    assert sum(part() is not None for part in parts) == 0
