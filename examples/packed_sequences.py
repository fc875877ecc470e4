"""Sequences of different lengths: padded batches as dictionaries, packed for a recurrent network.

Ten clients have numbers of their own lengths; the module finds out whether the digits are large.

    python examples/packed_sequences.py

Prints (seed 1, 15 s on one core):

    test accuracy 0.962, with pooled training 0.950
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torchmetrics.classification import BinaryAccuracy

from lightning_fl import FederatedDataModule, FederatedLoop


class Recurrent(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed, self.gru = nn.Embedding(11, 16, padding_idx=0), nn.GRU(16, 32, batch_first=True)
        self.head, self.accuracy = nn.Linear(32, 1), BinaryAccuracy()

    def forward(self, batch):
        x, lengths = self.embed(batch["digits"]), batch["lengths"].cpu()
        return self.head(self.gru(pack_padded_sequence(x, lengths, True, False))[1][0])[:, 0]

    def training_step(self, batch, batch_idx):
        return {"loss": F.binary_cross_entropy_with_logits(self(batch), batch["is_large"])}

    def test_step(self, batch, batch_idx):
        self.accuracy(self(batch), batch["is_large"])
        self.log("test_acc", self.accuracy, batch_size=len(batch["lengths"]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def collate(rows):
    large, lengths = ([float((row - 1.0).mean() > 4.5) for row in rows], list(map(len, rows)))
    found = {"lengths": torch.tensor(lengths), "is_large": torch.tensor(large)}
    return {"digits": pad_sequence(rows, True), **found}


def train(callbacks):
    L.seed_everything(1)
    lengths = torch.randint(8, (11, 80)) + torch.arange(2, 13)[:, None]
    *clients, test = [[torch.randint(1, 11, (n,)) for n in row] for row in lengths.tolist()]
    data = FederatedDataModule.from_clients(clients, test=test, val_size=0, collate_fn=collate)
    module, trainer = Recurrent(), L.Trainer(max_epochs=15, accelerator="cpu", callbacks=callbacks)
    trainer.fit(module, datamodule=data)
    return trainer.test(module, datamodule=data)[0]["test_acc"]


if __name__ == "__main__":
    print(f"test accuracy {train([FederatedLoop()]):.3f}, with pooled training {train([]):.3f}")
