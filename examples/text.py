"""Text: a recurrent network completes Python code, one client per module of the standard library.

Modules differ in vocabulary, style and length, as the texts on phones do. Half of the clients train
in each round. The figure is the share of characters that are predicted in held-out passages.

    python examples/text.py

Prints (seed 1 and Python 3.11, 60 s on one core):

    next-character accuracy 0.485, with pooled training 0.556
"""

import inspect
from importlib import import_module

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fl import FederatedDataModule, FederatedLoop


class CodeCompletion(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(128, 32), nn.GRU(32, 96, batch_first=True)
        self.head = nn.Linear(96, 128)

    def forward(self, x):
        return self.head(self.gru(self.embedding(x))[0]).transpose(1, 2)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.005)


def train(callbacks, epochs):
    L.seed_everything(1)
    clients = {}
    for name in ["argparse", "ast", "difflib", "inspect", "pdb", "shutil", "statistics", "zipfile"]:
        source = inspect.getsource(import_module(name))[:20_000].encode("ascii", "replace")
        windows = torch.tensor(list(source)).unfold(0, 65, 64)  # 64 characters and the next
        clients[name] = TensorDataset(windows[:, :-1], windows[:, 1:])
    data = FederatedDataModule.from_clients(clients)
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=callbacks)
    trainer.fit(CodeCompletion(), datamodule=data)
    return trainer.callback_metrics["val_acc"]


if __name__ == "__main__":
    loop = FederatedLoop(client_fraction=0.5)
    federated, pooled = train([loop], epochs=15), train([], epochs=5)
    print(f"next-character accuracy {federated:.3f}, with pooled training {pooled:.3f}")
