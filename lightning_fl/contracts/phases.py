"""Phases of local training, in which clients train some of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.errors import FederationError
from lightning_fl.options import check_exclusive, check_integer, check_number, check_that, is_list

KINDS = ("local", "shared", "all")


@dataclass(frozen=True)
class Phase:
    """Train some of the parameters in a part of a client's local steps.

    The others do not change in this phase: they have no gradient, so that neither momentum nor
    weight decay moves them, and they do not count in the norm of clipped gradients. Buffers are not
    trained: they change in every phase in which the forward pass changes them.

    The policy sets the local steps of all phases together. One phase has no amount and takes the
    steps that the other phases leave. A client with fewer steps than the other phases need runs the
    phases in order until its steps are used up.

    Args:
        train: ``local`` trains the client-local parameters, ``shared`` the others, ``all`` both.
            Parameters of loss terms, such as the personal model of
            :class:`~lightning_fl.objectives.Ditto`, are client-local. A list of patterns trains the
            parameters that match one of them, without those that match a pattern after ``!``; see
            ``local_parameters`` of :class:`~lightning_fl.callbacks.FederatedLoop`.
        num_steps: Number of local steps.
        local_epochs: Number of epochs over the client's samples, instead of ``num_steps``.

    Raises:
        FederationError: If a value is out of range, or both amounts are given.

    Example:
        >>> fedrep = [Phase("local", local_epochs=5), Phase("shared")]
        >>> phase_ends(fedrep, torch.tensor([60, 12]), torch.tensor([10, 2]))
        tensor([[50, 60],
                [10, 12]])
    """

    train: str | list[str] = "all"
    num_steps: int | None = None
    local_epochs: float | None = None

    def __post_init__(self) -> None:
        check_integer("num_steps of a phase", self.num_steps, min=1, optional=True)
        check_number("local_epochs of a phase", self.local_epochs, above=0, optional=True)
        check_exclusive(num_steps=self.num_steps, local_epochs=self.local_epochs)
        is_patterns = is_list(self.train) and len(self.train) > 0
        is_patterns = is_patterns and all(isinstance(p, str) for p in self.train)
        wanted = f"{', '.join(KINDS)} or a list of patterns"
        check_that("train of a phase", self.train, self.train in KINDS or is_patterns, wanted)

    @property
    def is_open(self) -> bool:
        """Whether the phase takes the steps that the others leave."""
        return self.num_steps is None and self.local_epochs is None

    def length(self, batches_per_epoch: Tensor) -> Tensor:
        """Return the number of steps of a phase with an amount, ``[k]``.

        Args:
            batches_per_epoch: Number of batches per local epoch of each client, ``[k]``.
        """
        if self.num_steps is not None:
            return torch.full_like(batches_per_epoch, self.num_steps)
        epochs = 0.0 if self.local_epochs is None else self.local_epochs
        return (epochs * batches_per_epoch).round().clamp(min=1).long()


def check_phases(phases: Sequence[Phase]) -> None:
    """Check the phases of a run.

    Raises:
        FederationError: If not exactly one phase has no amount.
    """
    count = sum(phase.is_open for phase in phases)
    if phases and count != 1:
        raise FederationError(
            f"one phase takes the local steps that the others leave, got {count} phases without"
            " num_steps and local_epochs: set an amount in all phases except one. The policy sets"
            " the total"
        )


def steps_left(phases: Sequence[Phase], num_steps: Tensor, batches_per_epoch: Tensor) -> Tensor:
    """Return the number of steps of the phase without an amount, ``[k]``; negative if too few.

    Args:
        phases: The phases.
        num_steps: Number of local steps of each client, ``[k]``.
        batches_per_epoch: Number of batches per local epoch of each client, ``[k]``.
    """
    fixed = [phase.length(batches_per_epoch) for phase in phases if not phase.is_open]
    return num_steps - sum(fixed, torch.zeros_like(num_steps))


def phase_ends(phases: Sequence[Phase], num_steps: Tensor, batches_per_epoch: Tensor) -> Tensor:
    """Return the local step at which each phase ends, ``[k, phases]``.

    Args:
        phases: The phases.
        num_steps: Number of local steps of each client, ``[k]``.
        batches_per_epoch: Number of batches per local epoch of each client, ``[k]``.
    """
    left = steps_left(phases, num_steps, batches_per_epoch).clamp(min=0)
    lengths = [left if phase.is_open else phase.length(batches_per_epoch) for phase in phases]
    return torch.stack(lengths, dim=1).cumsum(1).minimum(num_steps[:, None])
