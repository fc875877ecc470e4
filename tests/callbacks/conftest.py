"""Fits of a linear classifier."""

import pytest
import torch
from torch import nn

from lightning_fl import ClientModule
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.policies import Schedule


@pytest.fixture
def train(fit, data):
    """Fit a linear classifier, or another module; return it, the loop and the data."""

    def run(*callbacks, rounds=2, loop=None, module=None, datamodule=None, **options):
        torch.manual_seed(0)
        module = ClientModule(nn.Linear(6, 3)).double() if module is None else module
        loop = loop or FederatedLoop(policy=Schedule(lr=0.5, num_steps=2), seed=0)
        datamodule = datamodule or data()
        callbacks = [*callbacks, *options.pop("callbacks", [])]
        fit(module, loop, datamodule, rounds=rounds, callbacks=callbacks, **options)
        return module, loop, datamodule

    return run
