"""Which parameters clients train in each local step."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fl.contracts.phases import Phase
from lightning_fl.errors import FederationError
from lightning_fl.runners.local_tensors import matched_tensors


def trained_parameters(
    phase: Phase, module: LightningModule, local: Collection[str]
) -> frozenset[str]:
    """Return the names of the parameters that a phase trains.

    Args:
        phase: The phase.
        module: The user's module.
        local: Names of the client-local tensors.

    Raises:
        FederationError: If a pattern matches nothing, or the phase trains nothing.
    """
    params = [name for name, _ in module.named_parameters()]
    names = set(params)
    if phase.train == "local":
        names &= set(local)
    elif phase.train == "shared":
        names -= set(local)
    elif phase.train != "all":
        without = [p.removeprefix("!") for p in phase.train if p.startswith("!")]
        chosen = [p for p in phase.train if not p.startswith("!")]
        if chosen:
            names &= set(matched_tensors(module, chosen, "phases"))
        names -= set(matched_tensors(module, without, "phases"))
    if not names:
        hint = ": name client-local ones in local_parameters" if phase.train == "local" else ""
        raise FederationError(f"a phase with train={phase.train!r} trains no parameter{hint}")
    return frozenset(names)


class PhasedTraining:
    """Which parameters the clients in training train in each local step.

    Args:
        names: Names of the trained parameters of each phase. Empty if there are no phases.
        parameters: Names of all parameters.
    """

    def __init__(
        self, names: Sequence[frozenset[str]] = (), parameters: Collection[str] = ()
    ) -> None:
        self.names, self.parameters = names, parameters
        self._trained = frozenset[str]().union(*names)
        self._ends = torch.zeros(1, len(names), dtype=torch.int64)
        self._longest = self._ends[0].tolist()

    def __bool__(self) -> bool:
        """Return whether there are phases."""
        return bool(self.names)

    def start(self, ends: Tensor) -> None:
        """Start clients.

        Args:
            ends: Local steps at which their phases end, ``[k, phases]``.
        """
        self._ends = ends
        self._longest = ends[ends[:, -1].argmax()].tolist() if self.names else []

    def is_trained(self, name: str) -> bool:
        """Return whether a phase trains a parameter."""
        return not self.names or name in self._trained

    @property
    def is_aligned(self) -> bool:
        """Whether clients that train in the same step are always in the same phase."""
        # A client that is done makes no step, so ends at its last step do not count.
        longest = torch.tensor(self._longest)
        return bool((self._ends == longest.minimum(self._ends[:, -1:])).all())

    def held(self, step: int) -> list[str]:
        """Return the parameters that the clients do not train in a local step.

        Args:
            step: Index of the local step.
        """
        if not self.names:
            return []
        phase = min(sum(step >= end for end in self._longest), len(self.names) - 1)
        return [name for name in self.parameters if name not in self.names[phase]]
