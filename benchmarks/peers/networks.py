"""The networks and synthetic samples of the benchmarks whose peer trains PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def network(shape: tuple[int, ...]) -> nn.Module:
    """The network for samples of this shape: an MLP, or the CIFAR-10 or keyword CNN."""
    torch.manual_seed(0)
    if shape == (784,):
        return nn.Sequential(
            nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)
        )
    convs: list[nn.Module] = []
    if shape == (3, 32, 32):
        for maps_in, maps in ((3, 32), (32, 64)):
            convs += [nn.Conv2d(maps_in, maps, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()]
    elif shape == (1, 32, 32):
        for i in range(4):
            convs += [nn.Conv2d(64 if i else 1, 64, 3, padding=1)]
            convs += [nn.MaxPool2d(2), nn.ReLU()] if i % 2 else [nn.ReLU()]
    else:
        raise ValueError(f"no network for samples of shape {shape}")
    return nn.Sequential(
        *convs, nn.Flatten(), nn.Linear(64 * 8 * 8, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def synthetic(clients: int, samples: int, shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Standard normal samples and labels 0-9 of every client."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients, samples, *shape, generator=generator)
    y = torch.randint(10, (clients, samples), generator=generator)
    return list(zip(x, y, strict=True))
