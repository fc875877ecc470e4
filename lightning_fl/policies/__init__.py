"""Hyper-parameter policies, one a file."""

from lightning_fl.policies.base import HyperParameterPolicy, RandomPolicy
from lightning_fl.policies.discrete_gaussian import DiscreteGaussianReinforce
from lightning_fl.policies.personalized import PersonalizedPolicyGradient
from lightning_fl.policies.schedule import Schedule
from lightning_fl.policies.staged import StagedPolicy
from lightning_fl.policies.stragglers import Stragglers

__all__ = [
    "DiscreteGaussianReinforce",
    "HyperParameterPolicy",
    "PersonalizedPolicyGradient",
    "RandomPolicy",
    "Schedule",
    "StagedPolicy",
    "Stragglers",
]
