"""A linear classifier, for tests of modules that do something more, and one that does much."""

from functools import partial

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

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


class Foreign(L.LightningModule):
    """Written without knowledge of this library: BatchNorm, dropout, Adam, a metric, logging."""

    def __init__(self, features=6, classes=3, batchnorm=True, dropout=0.2, optimizer="adam"):
        super().__init__()
        norm = nn.BatchNorm1d(8) if batchnorm else nn.Identity()
        self.net = nn.Sequential(
            nn.Linear(features, 8), norm, nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, classes)
        )
        self.accuracy = MulticlassAccuracy(classes)
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        self.accuracy(scores, y)
        self.log("val_loss", F.cross_entropy(scores, y))
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self):
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)]
