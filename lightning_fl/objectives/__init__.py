"""Local objectives of clients."""

from lightning_fl.objectives.apfl import APFL
from lightning_fl.objectives.client_module import ClientModule
from lightning_fl.objectives.ditto import Ditto
from lightning_fl.objectives.dp_sgd import DPSGD, SampleAccountant
from lightning_fl.objectives.entropy import EntropyRegularizer
from lightning_fl.objectives.feddecorr import FedDecorr
from lightning_fl.objectives.fedem import FedEM
from lightning_fl.objectives.fedlc import FedLC
from lightning_fl.objectives.fedntd import FedNTD
from lightning_fl.objectives.fedproto import FedProto
from lightning_fl.objectives.fedrod import FedRoD
from lightning_fl.objectives.fedrs import FedRS
from lightning_fl.objectives.fedsam import FedSAM
from lightning_fl.objectives.local_network import LocalNetwork
from lightning_fl.objectives.moon import MOON
from lightning_fl.objectives.parameter_groups import ParameterGroup
from lightning_fl.objectives.per_fedavg import PerFedAvg
from lightning_fl.objectives.proximal import Proximal
from lightning_fl.objectives.recorder import Recorder, Trace
from lightning_fl.objectives.representation_matching import RepresentationMatching
from lightning_fl.objectives.terms import ModelView, Term
from lightning_fl.objectives.weight_divergence import WeightDivergence

__all__ = [
    "APFL",
    "DPSGD",
    "MOON",
    "ClientModule",
    "Ditto",
    "EntropyRegularizer",
    "FedDecorr",
    "FedEM",
    "FedLC",
    "FedNTD",
    "FedProto",
    "FedRS",
    "FedRoD",
    "FedSAM",
    "LocalNetwork",
    "ModelView",
    "ParameterGroup",
    "PerFedAvg",
    "Proximal",
    "Recorder",
    "RepresentationMatching",
    "SampleAccountant",
    "Term",
    "Trace",
    "WeightDivergence",
]
