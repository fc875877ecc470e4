"""What a client minimises."""

from lightning_fl.objectives.client_module import ClientModule
from lightning_fl.objectives.entropy import EntropyRegularizer
from lightning_fl.objectives.fedem import FedEM
from lightning_fl.objectives.proximal import Proximal
from lightning_fl.objectives.recorder import Recorder, Trace
from lightning_fl.objectives.representation_matching import RepresentationMatching
from lightning_fl.objectives.terms import Side, Term
from lightning_fl.objectives.weight_divergence import WeightDivergence

__all__ = [
    "ClientModule",
    "EntropyRegularizer",
    "FedEM",
    "Proximal",
    "Recorder",
    "RepresentationMatching",
    "Side",
    "Term",
    "Trace",
    "WeightDivergence",
]
