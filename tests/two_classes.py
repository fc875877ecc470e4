"""Samples of two classes that a linear model nearly separates."""

import torch
from torch.utils.data import TensorDataset

from lightning_fl.datamodules import FederatedDataModule


def samples(clients=5, seed=0, **options):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(12 * clients, 4, generator=random, dtype=torch.float64)
    y = (x[:, 0] + 0.5 * torch.randn(len(x), generator=random)).gt(0).long()
    whole = TensorDataset(x, y)
    options = {"num_clients": clients, "batch_size": 4, "seed": seed, **options}
    return FederatedDataModule(whole, whole, **options)
