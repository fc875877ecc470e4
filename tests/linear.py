"""A linear classifier, for tests of modules that do something more."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


class Linear(L.LightningModule):
    """It has six features and three classes, trains with SGD, and logs nothing.

    Args:
        net: Another network.
    """

    def __init__(self, net=None):
        super().__init__()
        self.net = nn.Linear(6, 3) if net is None else net

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        """Log nothing."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
