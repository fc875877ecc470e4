"""The networks and samples of the benchmarks whose peer trains PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count, islice

import torch
from samples import drawn, tested
from torch import Tensor, nn


def lenet() -> nn.Module:
    """The small CNN of BlazeFL's and torch's examples for CIFAR-10, 62,006 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def simple_cnn(channels: int, size: int, classes: int) -> nn.Module:
    """The CNN of pfl-research for CIFAR-10 and FEMNIST, with dropout."""
    features = 64 * ((size - 4) // 2) ** 2
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()),
        *(nn.Linear(features, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, classes)),
    )


#: Networks of workloads that others publish, by the name of the workload.
PUBLISHED = {
    "blazefl": lenet,
    "pfl": partial(simple_cnn, 3, 32, 10),
    "femnist": partial(simple_cnn, 1, 28, 62),
}


def network(shape: tuple[int, ...], workload: str = "") -> nn.Module:
    """The network of a workload: one of ``PUBLISHED``, an MLP, or the CIFAR-10 or keyword CNN."""
    torch.manual_seed(0)
    if workload in PUBLISHED:
        return PUBLISHED[workload]()
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


def synthetic(
    clients: int, samples: int, shape: tuple[int, ...], classes: int = 10
) -> list[tuple[Tensor, Tensor]]:
    """Samples and labels of every client."""
    x, y = map(torch.from_numpy, drawn(clients * samples, shape, classes))
    return list(zip(x.split(samples), y.split(samples), strict=True))


def batches(samples: int, batch_size: int, steps: int) -> Iterator[Tensor]:
    """Indices of each step's samples, shuffled anew for each pass."""
    epochs = (torch.randperm(samples).split(batch_size) for _ in count())
    return islice((batch for epoch in epochs for batch in epoch), steps)


@torch.no_grad()
def accuracy(net: nn.Module, shape: tuple[int, ...], classes: int) -> float:
    """Return the accuracy of a network on the test samples."""
    x, y = map(torch.from_numpy, tested(shape, classes))
    net.eval()
    return float((torch.cat([net(some) for some in x.split(100)]).argmax(1) == y).double().mean())
