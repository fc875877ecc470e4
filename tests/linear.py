"""A linear classifier, for tests of modules that do something more."""

from functools import partial

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

SGD = partial(torch.optim.SGD, lr=0.1)


def regression(n=24, features=3):
    """Samples of a linear function with noise."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(n, features, generator=random, dtype=torch.float64)
    return TensorDataset(x, x.sum(1) + torch.randn(n, generator=random, dtype=torch.float64))


class Linear(L.LightningModule):
    """It has six features and three classes, trains with SGD, and logs nothing.

    Args:
        net: Another network.
        optimizer: Function of the parameters that are trained.
    """

    def __init__(self, net=None, optimizer=SGD):
        super().__init__()
        self.net, self.optimizer = nn.Linear(6, 3) if net is None else net, optimizer

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        """Log nothing."""

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class WithoutForward(Linear):
    """It computes its loss in ``training_step`` alone."""

    forward = L.LightningModule.forward
