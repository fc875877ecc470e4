"""Hyperparameter policies, one per file."""

from lightning_fl.policies.adaptive_mu import AdaptiveMu
from lightning_fl.policies.base import HyperparameterPolicy, RandomPolicy
from lightning_fl.policies.discrete_gaussian import DiscreteGaussianReinforce
from lightning_fl.policies.personalized import PersonalizedPolicyGradient
from lightning_fl.policies.schedule import Schedule
from lightning_fl.policies.staged import StagedPolicy
from lightning_fl.policies.stragglers import Stragglers

__all__ = [
    "AdaptiveMu",
    "DiscreteGaussianReinforce",
    "HyperparameterPolicy",
    "PersonalizedPolicyGradient",
    "RandomPolicy",
    "Schedule",
    "StagedPolicy",
    "Stragglers",
]
