"""GAN: a small DCGAN with two optimizers draws digits, a picture per round in the run folder.

    python examples/gan.py [--local-generator, which stays with its client]

Prints (seed 1, 20 s on one core; the error is of the pixels' standard deviations):

    error 0.153, after the first round 0.534
"""

import sys

import lightning as L
import torch
from torch import nn
from torch.nn.functional import softplus
from torchvision.utils import save_image

from lightning_fl import FederatedLoop
from lightning_fl.datamodules import Digits


class DCGAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.drawn = False, []
        up = nn.ConvTranspose2d(16, 64, 4), nn.BatchNorm2d(64), nn.ReLU()
        self.generator = nn.Sequential(*up, nn.ConvTranspose2d(64, 1, 4, 2, 1))
        down = nn.Conv2d(1, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten()
        self.critic = nn.Sequential(*down, nn.Linear(1024, 1))

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
    local = ["generator.*"] * ("--local-generator" in sys.argv)
    loop = FederatedLoop(buffers="average", local_parameters=local)
    trainer = L.Trainer(max_epochs=20, accelerator="cpu", callbacks=[loop], num_sanity_val_steps=0)
    trainer.fit(DCGAN(), datamodule=Digits(num_clients=10, batch_size=16))
    print(f"error {loop.rows[-1]['error']:.3f}, after the first round {loop.rows[0]['error']:.3f}")
