"""The federation itself, and what watches it."""

from lightning_fl.callbacks.baselines import MatchingBaselines
from lightning_fl.callbacks.checkpoint import AtomicCheckpointIO, RoundCheckpoint
from lightning_fl.callbacks.faults import ClientAttack, ClientFaults
from lightning_fl.callbacks.federated_loop import FederatedLoop
from lightning_fl.callbacks.personalized import PersonalizedEvaluation
from lightning_fl.callbacks.progress import RoundProgress
from lightning_fl.callbacks.report import RunReport

__all__ = [
    "AtomicCheckpointIO",
    "ClientAttack",
    "ClientFaults",
    "FederatedLoop",
    "MatchingBaselines",
    "PersonalizedEvaluation",
    "RoundCheckpoint",
    "RoundProgress",
    "RunReport",
]
