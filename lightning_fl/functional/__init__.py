"""Pure functions of tensors that implement the equations of the papers."""

from lightning_fl.functional.averaging import weighted_mean
from lightning_fl.functional.discrete_gaussian import (
    causal_weights,
    centered_weights,
    log_probabilities,
    normalized_axis,
)
from lightning_fl.functional.entropy import entropy, entropy_hinge
from lightning_fl.functional.proximal import proximal_penalty
from lightning_fl.functional.randomness import RandomStream, derive_seed, generator

__all__ = [
    "RandomStream",
    "causal_weights",
    "centered_weights",
    "derive_seed",
    "entropy",
    "entropy_hinge",
    "generator",
    "log_probabilities",
    "normalized_axis",
    "proximal_penalty",
    "weighted_mean",
]
