"""Fine-tuning with timm: a pretrained network adapts to new classes in two rounds.

The network is pretrained here, on the digits 0 to 4; with `pretrained=True`, timm would download
weights. Ten clients then have ten images of the digits 5 to 9 each. The others are for validation.

    python examples/timm_finetuning.py

Prints (seed 1, 30 s on one core; needs `pip install timm`):

    val_acc 0.628, from a random start 0.424
"""

import lightning as L
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_fl import FederatedDataModule, FederatedLoop


class Classifier(L.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net, self.accuracy = net, MulticlassAccuracy(5)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.003)


def digits(first):
    x, y = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    chosen = (y >= first) & (y < first + 5)
    x = F.interpolate(x[chosen].float().reshape(-1, 1, 8, 8) / 16, scale_factor=4)
    return TensorDataset(x, y[chosen] - first)


def finetune(net):
    data = FederatedDataModule(digits(first=5), val_size=796, num_clients=10)
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", callbacks=[FederatedLoop()])
    trainer.fit(Classifier(net), datamodule=data)
    return trainer.callback_metrics["val_acc"]


if __name__ == "__main__":
    L.seed_everything(1)
    net, fresh = (timm.create_model("test_convnext", in_chans=1, num_classes=5) for _ in range(2))
    batches = DataLoader(digits(first=0), batch_size=32, shuffle=True)
    L.Trainer(max_epochs=5, accelerator="cpu").fit(Classifier(net), batches)
    net.reset_classifier(num_classes=5)
    print(f"val_acc {finetune(net):.3f}, from a random start {finetune(fresh):.3f}")
