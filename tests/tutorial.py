"""A module and a Trainer as tutorials write them."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn


class Net(LightningModule):
    """Classify samples of four numbers by the sign of the first."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self.net(x).argmax(1) == y).float().mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).argmax(1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def trainer(folder, *callbacks, rounds=3, **options):
    usual = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        max_epochs=rounds,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **{**usual, **quiet, **options},
    )
