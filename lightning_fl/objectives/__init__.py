"""Local objectives of clients."""

from lightning_fl.objectives.client_module import ClientModule
from lightning_fl.objectives.entropy import EntropyRegularizer
from lightning_fl.objectives.fedem import FedEM
from lightning_fl.objectives.proximal import Proximal
from lightning_fl.objectives.recorder import Recorder, Trace
from lightning_fl.objectives.representation_matching import RepresentationMatching
from lightning_fl.objectives.terms import ModelView, Term
from lightning_fl.objectives.weight_divergence import WeightDivergence

__all__ = [
    "ClientModule",
    "EntropyRegularizer",
    "FedEM",
    "ModelView",
    "Proximal",
    "Recorder",
    "RepresentationMatching",
    "Term",
    "Trace",
    "WeightDivergence",
]
