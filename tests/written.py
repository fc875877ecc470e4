"""A network whose layers and forward are given by a test."""

from torch import nn


class Written(nn.Module):
    """Its forward gets the network and a batch."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)
