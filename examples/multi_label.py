"""Multi-label classification: pictures show any number of shapes, in other shares on each client.

    python examples/multi_label.py

Prints (seed 1, 20 s on one core):

    mean average precision 0.970, with pooled training 0.973
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MultilabelAveragePrecision

from lightning_fl import FederatedDataModule, FederatedLoop
from lightning_fl.policies import Schedule

SHAPES = [torch.eye(5), torch.eye(5).flip(0), torch.ones(5, 5), torch.zeros(5, 5)]
SHAPES[2][1:4, 1:4], SHAPES[3][2], SHAPES[3][:, 2] = 0, 1, 1  # two diagonals, a box and a cross


class Pictures(L.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten()]
        self.net, self.map = nn.Sequential(*layers, nn.Linear(16, 4)), MultilabelAveragePrecision(4)

    def training_step(self, batch, batch_idx):
        return F.binary_cross_entropy_with_logits(self.net(batch["image"]), batch["labels"].float())

    def test_step(self, batch, batch_idx):
        self.map(self.net(batch["image"]), batch["labels"])
        self.log("test_map", self.map, batch_size=len(batch["labels"]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def picture(frequency):
    labels, image = (torch.rand(4) < frequency).long(), 0.3 * torch.randn(1, 16, 16)
    for shape in (SHAPES[kind] for kind in labels.nonzero()[:, 0]):
        top, left = torch.randint(12, (2,)).tolist()
        image[0, top : top + 5, left : left + 5] += shape
    return {"image": image, "labels": labels}


def train(callbacks):
    L.seed_everything(1)
    *clients, test = [[picture(often) for _ in range(60)] for often in 0.7 * torch.rand(11, 4)]
    data = FederatedDataModule.from_clients(clients, test=test, val_size=0)
    module, trainer = Pictures(), L.Trainer(max_epochs=20, accelerator="cpu", callbacks=callbacks)
    trainer.fit(module, datamodule=data)
    return trainer.test(module, datamodule=data)[0]["test_map"]


if __name__ == "__main__":
    found = [train([FederatedLoop(policy=Schedule(local_epochs=4))]), train([])]
    print("mean average precision {:.3f}, with pooled training {:.3f}".format(*found))
