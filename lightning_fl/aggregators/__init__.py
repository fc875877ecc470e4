"""Aggregation rules, one per file. An aggregator is a metric over client updates."""

from lightning_fl.aggregators.adapters import AdapterRule
from lightning_fl.aggregators.afl import AFL
from lightning_fl.aggregators.asynchronous import AsynchronousAggregator
from lightning_fl.aggregators.base import Aggregator
from lightning_fl.aggregators.client_models import ClientModels
from lightning_fl.aggregators.clustered import ClusteredFL
from lightning_fl.aggregators.downpour import Downpour
from lightning_fl.aggregators.dp_fedavg import DPFedAvg
from lightning_fl.aggregators.fedala import FedALA
from lightning_fl.aggregators.fedamp import FedAMP
from lightning_fl.aggregators.fedasync import FedAsync
from lightning_fl.aggregators.fedavg import FedAvg
from lightning_fl.aggregators.fedbuff import FedBuff
from lightning_fl.aggregators.fedcm import FedCM
from lightning_fl.aggregators.feddyn import FedDyn
from lightning_fl.aggregators.fedexp import FedExP
from lightning_fl.aggregators.fednova import FedNova
from lightning_fl.aggregators.fedopt import FedAdagrad, FedAdam, FedAvgM, FedOpt, FedYogi
from lightning_fl.aggregators.flexlora import FlexLoRA
from lightning_fl.aggregators.gossip import Gossip
from lightning_fl.aggregators.heterofl import HeteroFL
from lightning_fl.aggregators.ifca import IFCA
from lightning_fl.aggregators.loss_weights import FedControl, FedCostWAvg, FedPIDAvg
from lightning_fl.aggregators.matching import PFNM, FedMA, NeuronMatching, StreamingPFNM
from lightning_fl.aggregators.power_of_choice import PowerOfChoice
from lightning_fl.aggregators.qfedavg import QFedAvg
from lightning_fl.aggregators.robust import (
    CoordinateMedian,
    GeometricMedian,
    Krum,
    NormClipping,
    RobustAggregator,
    TrimmedMean,
)
from lightning_fl.aggregators.scaffold import Scaffold
from lightning_fl.aggregators.secure_aggregation import SecureAggregation
from lightning_fl.aggregators.staged import Staged
from lightning_fl.aggregators.zero_padding import ZeroPadding

__all__ = [
    "AFL",
    "IFCA",
    "PFNM",
    "AdapterRule",
    "Aggregator",
    "AsynchronousAggregator",
    "ClientModels",
    "ClusteredFL",
    "CoordinateMedian",
    "DPFedAvg",
    "Downpour",
    "FedALA",
    "FedAMP",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedAvg",
    "FedAvgM",
    "FedBuff",
    "FedCM",
    "FedControl",
    "FedCostWAvg",
    "FedDyn",
    "FedExP",
    "FedMA",
    "FedNova",
    "FedOpt",
    "FedPIDAvg",
    "FedYogi",
    "FlexLoRA",
    "GeometricMedian",
    "Gossip",
    "HeteroFL",
    "Krum",
    "NeuronMatching",
    "NormClipping",
    "PowerOfChoice",
    "QFedAvg",
    "RobustAggregator",
    "Scaffold",
    "SecureAggregation",
    "Staged",
    "StreamingPFNM",
    "TrimmedMean",
    "ZeroPadding",
]
