"""Rules that split a data set over clients, manifests of splits, and plots of splits."""

from lightning_fl.partition.base import Partition
from lightning_fl.partition.manifest import FromManifest, Manifest, checksum
from lightning_fl.partition.picture import plot
from lightning_fl.partition.rules import (
    IID,
    ByLabel,
    ByRandomLabel,
    Dirichlet,
    Natural,
    QuantitySkew,
    Shards,
)
from lightning_fl.partition.summary import label_drift, summary

__all__ = [
    "IID",
    "ByLabel",
    "ByRandomLabel",
    "Dirichlet",
    "FromManifest",
    "Manifest",
    "Natural",
    "Partition",
    "QuantitySkew",
    "Shards",
    "checksum",
    "label_drift",
    "plot",
    "summary",
]
