"""Regression: clients with low and high targets, of scikit-learn's diabetes data.

`Dirichlet` splits real-valued targets by their deciles, so that each of ten clients has its own
proportions of mild and severe cases. `IID` gives all clients the same ones.

    python examples/regression.py

Prints (seed 1, 15 s on one core):

    R2 0.476 with skewed clients, 0.539 with equal ones
"""

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.regression import R2Score

from lightning_fl import FederatedDataModule, FederatedLoop, policies
from lightning_fl.partition import IID, Dirichlet


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
        self.r2 = R2Score()

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.r2(self.net(batch[0]), batch[1])
        self.log("test_r2", self.r2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train(partition):
    L.seed_everything(1)
    x, y = (torch.as_tensor(array).float() for array in load_diabetes(return_X_y=True))
    x, y = x / x.std(0), (y - y.mean()) / y.std()
    is_test = torch.rand(len(y)) < 0.2
    data = FederatedDataModule(
        TensorDataset(x[~is_test], y[~is_test]),
        test=TensorDataset(x[is_test], y[is_test]),
        partition=partition,
        val_size=0,
    )
    loop = FederatedLoop(policy=policies.Schedule(num_steps=20))
    module, trainer = Regression(), L.Trainer(max_epochs=20, accelerator="cpu", callbacks=[loop])
    trainer.fit(module, datamodule=data)
    return trainer.test(module, datamodule=data)[0]["test_r2"]


if __name__ == "__main__":
    print(f"R2 {train(Dirichlet(0.1)):.3f} with skewed clients, {train(IID()):.3f} with equal ones")
