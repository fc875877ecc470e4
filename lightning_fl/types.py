"""Types that rules, policies, samplers and data modules work with."""

from lightning_fl.contracts.data import ClientBatches, FederatedData
from lightning_fl.contracts.feedback import Feedback
from lightning_fl.contracts.personal import PersonalModel
from lightning_fl.contracts.plan import Cohort, RoundPlan, Step
from lightning_fl.contracts.update import ClientUpdate, ServerState
from lightning_fl.errors import FederationError

__all__ = [
    "ClientBatches",
    "ClientUpdate",
    "Cohort",
    "FederatedData",
    "FederationError",
    "Feedback",
    "PersonalModel",
    "RoundPlan",
    "ServerState",
    "Step",
]
