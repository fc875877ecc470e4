"""Policies with a buffer that grows from round to round."""

import torch

from lightning_fl.policies import Schedule


class Growing(Schedule):
    """Remembers the losses of all rounds."""

    learns_from = frozenset({"val_loss"})

    def __init__(self):
        super().__init__()
        self.register_buffer("losses", torch.zeros(0, dtype=torch.float64))

    def update(self, feedback):
        self.losses = torch.cat([self.losses, torch.tensor([feedback.val_loss]).double()])


class Resizing(Growing):
    """Gives the buffer the shape of a checkpoint."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.losses = torch.zeros_like(state_dict[f"{prefix}losses"])
        super()._load_from_state_dict(state_dict, prefix, *args)
