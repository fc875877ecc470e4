"""The mathematics: pure functions of tensors, each true to one equation."""

from lightning_fl.functional.averaging import weighted_mean
from lightning_fl.functional.discrete_gaussian import (
    causal_weights,
    centred_weights,
    log_probabilities,
    normalised_axis,
)
from lightning_fl.functional.entropy import entropy, entropy_hinge
from lightning_fl.functional.proximal import proximal_penalty
from lightning_fl.functional.randomness import Purpose, derive_seed, generator

__all__ = [
    "Purpose",
    "causal_weights",
    "centred_weights",
    "derive_seed",
    "entropy",
    "entropy_hinge",
    "generator",
    "log_probabilities",
    "normalised_axis",
    "proximal_penalty",
    "weighted_mean",
]
