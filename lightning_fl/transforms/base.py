"""What every transform of updates is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor


class Message(NamedTuple):
    """What an update takes on its way.

    Args:
        values: Numbers that are sent.
        bits: Of each.
        extra: Bytes beside them.

    Example:
        >>> Message(values=10, bits=1, extra=4).bytes
        6
    """

    values: int
    bits: int
    extra: int = 0

    @property
    def bytes(self) -> int:
        """All bytes."""
        return math.ceil(self.values * self.bits / 8) + self.extra


class UpdateTransform(ABC):
    """Change what a client sends: the update of the parameters that it trains.

    Buffers and frozen parameters are not passed to it. A vector in ``memory`` of the length of the
    update follows its parameters when other layers are trained in later rounds.

    The loop calls it for one client after another, in the order of its ``transforms``, after
    updates that are not finite were dropped.
    """

    @abstractmethod
    def __call__(
        self, update: Tensor, memory: dict[str, Tensor], generator: torch.Generator
    ) -> Tensor:
        """Return what the server gets.

        Args:
            update: A client's move of the trained parameters, ``[P]``.
            memory: What this client has left in its last round, to be read and written: tensors by
                name, empty at first. It is in the checkpoint.
            generator: The client's own of this round, on the CPU.

        Returns:
            ``[P]``.
        """

    def message(self, numbers: int, before: Message) -> Message:
        """Return what an update takes on its way.

        Args:
            numbers: Trained parameters, :math:`P`.
            before: What it takes without this transform.
        """
        return before
