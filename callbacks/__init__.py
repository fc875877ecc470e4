"""Callbacks: the federated loop, simulation of faults and attacks, evaluation and reports."""

from lightning_fl.callbacks.attacks import Attack, Backdoor, ClientAttack, DataAttack, LabelFlip
from lightning_fl.callbacks.checkpoint import AtomicCheckpointIO, RoundCheckpoint
from lightning_fl.callbacks.faults import ClientFaults, OnUpdates
from lightning_fl.callbacks.federated_loop import FederatedLoop
from lightning_fl.callbacks.personalized import PersonalizedEvaluation
from lightning_fl.callbacks.progress import RoundProgress
from lightning_fl.callbacks.report import RunReport

__all__ = [
    "AtomicCheckpointIO",
    "Attack",
    "Backdoor",
    "ClientAttack",
    "ClientFaults",
    "DataAttack",
    "FederatedLoop",
    "LabelFlip",
    "OnUpdates",
    "PersonalizedEvaluation",
    "RoundCheckpoint",
    "RoundProgress",
    "RunReport",
]
