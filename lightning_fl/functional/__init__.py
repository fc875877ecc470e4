"""The mathematics: pure functions of tensors, each true to one equation."""

from lightning_fl.functional.averaging import weighted_mean
from lightning_fl.functional.proximal import proximal_penalty
from lightning_fl.functional.randomness import Purpose, derive_seed, generator

__all__ = ["Purpose", "derive_seed", "generator", "proximal_penalty", "weighted_mean"]
