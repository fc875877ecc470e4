"""GAN: a small DCGAN with two optimizers draws digits, a picture per round in the run folder.

    python examples/gan.py [--fashion-mnist] [--local-generator, which stays with its client]

Prints (seed 1, 20 s on one core; the error is of the pixels' standard deviations):

    error 0.153, after the first round 0.534
"""

import sys
from itertools import pairwise

import lightning as L
import torch
from torch import nn
from torch.nn.functional import softplus
from torchvision.utils import save_image

from lightning_fl import FederatedLoop
from lightning_fl.datamodules import Digits, FashionMNIST


class DCGAN(L.LightningModule):
    def __init__(self, first, *widths):  # pictures have a side of first * 2 ** len(widths)
        super().__init__()
        self.automatic_optimization, self.drawn = False, []
        up, down = [nn.ConvTranspose2d(16, widths[0], first)], []
        for inner, outer in pairwise((*widths, 1)):
            up += [nn.BatchNorm2d(inner), nn.ReLU(), nn.ConvTranspose2d(inner, outer, 4, 2, 1)]
            down = [nn.Conv2d(outer, inner, 4, 2, 1), nn.LeakyReLU(0.2), *down]
        self.generator = nn.Sequential(*up)
        self.critic = nn.Sequential(*down, nn.Flatten(), nn.Linear(widths[0] * first**2, 1))

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), 0.002, (0.5, 0.9)) for net in self.children()]

    def training_step(self, batch, batch_idx):
        (of_generator, of_critic), real = self.optimizers(), batch[0]
        fake = self.generator(torch.randn(len(real), 16, 1, 1))
        losses = softplus(-self.critic(real)) + softplus(self.critic(fake.detach()))
        of_critic.zero_grad()
        self.manual_backward(losses.mean())
        of_critic.step()
        of_generator.zero_grad()
        self.manual_backward(softplus(-self.critic(fake)).mean())
        of_generator.step()

    def on_client_end(self):  # a row by each client
        self.drawn.append(self.generator(torch.randn(80, 16, 1, 1)).detach())

    def validation_step(self, batch, batch_idx):
        drawn, self.drawn = torch.cat(self.drawn), []
        self.log("error", (drawn.std(0) - batch[0].std(0)).abs().mean())
        save_image(drawn[::10], f"{self.trainer.log_dir}/{self.current_epoch}.png", normalize=True)


if __name__ == "__main__":
    L.seed_everything(1)
    clothes, local = "--fashion-mnist" in sys.argv, "--local-generator" in sys.argv
    model, kind = (DCGAN(7, 64, 32), FashionMNIST) if clothes else (DCGAN(4, 64), Digits)
    data = kind(num_clients=10, batch_size=64 if clothes else 16, eval_batch_size=6000)
    loop = FederatedLoop(buffers="average", local_parameters=["generator.*"] * local)
    trainer = L.Trainer(max_epochs=20, accelerator="cpu", callbacks=[loop], num_sanity_val_steps=0)
    trainer.fit(model, datamodule=data)
    print(f"error {loop.rows[-1]['error']:.3f}, after the first round {loop.rows[0]['error']:.3f}")
