"""Server rules, one a file; an aggregator is a metric over client updates."""

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.aggregators.fedavg import FedAvg

__all__ = ["Aggregator", "FedAvg"]
