"""Client samplers."""

from lightning_fl.samplers.asynchronous import AsynchronousSampler
from lightning_fl.samplers.base import ClientSampler
from lightning_fl.samplers.synchronous import (
    AFLSampler,
    HighLossSampler,
    PoissonSampler,
    RoundRobinSampler,
    UniformSampler,
    WeightedSampler,
    how_drawn,
)

__all__ = [
    "AFLSampler",
    "AsynchronousSampler",
    "ClientSampler",
    "HighLossSampler",
    "PoissonSampler",
    "RoundRobinSampler",
    "UniformSampler",
    "WeightedSampler",
    "how_drawn",
]
