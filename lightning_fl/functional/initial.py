"""Other initial parameters of a network."""

from __future__ import annotations

from torch import nn

from lightning_fl.functional.randomness import seeded_rng


def draw_parameters(network: nn.Module, seed: int) -> None:
    """Initialize the parameters of a network anew, in place.

    Calls ``reset_parameters`` of each module that has it, as the layers of torch do. Frozen
    parameters keep their values.

    Args:
        network: The network.
        seed: Seed of the parameters.

    Example:
        >>> one, other = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> draw_parameters(one, 0), draw_parameters(other, 0)
        (None, None)
        >>> bool((one.weight == other.weight).all())
        True
    """
    with seeded_rng(seed):
        frozen = [(p, p.clone()) for p in network.parameters() if not p.requires_grad]
        for part in network.modules():
            for name in ("_reset_parameters", "reset_parameters"):  # attention has the first
                if callable(reset := getattr(part, name, None)):
                    reset()
        for param, value in frozen:
            param.copy_(value)
