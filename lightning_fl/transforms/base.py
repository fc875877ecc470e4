"""Base class of update transforms."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor


class Message(NamedTuple):
    """Size of a transmitted update.

    Args:
        values: Number of transmitted values.
        bits: Bits per value.
        extra: Additional bytes, such as indices and scales.

    Example:
        >>> Message(values=10, bits=1, extra=4).bytes
        6
    """

    values: int
    bits: int
    extra: int = 0

    @property
    def bytes(self) -> int:
        """Total size in bytes."""
        return math.ceil(self.values * self.bits / 8) + self.extra


class UpdateTransform(ABC):
    """Base class of transforms that are applied to each client update before aggregation.

    The update contains the trained parameters only, without buffers and frozen parameters. A vector
    in ``memory`` with the length of the update stays aligned with its parameters if other layers
    are trained in later rounds.

    The loop applies the transforms to one client after another, in the order of
    ``update_transforms``, after non-finite updates were dropped.
    """

    @abstractmethod
    def __call__(
        self, update: Tensor, memory: dict[str, Tensor], generator: torch.Generator
    ) -> Tensor:
        """Return the transformed update.

        Args:
            update: Update of the trained parameters of a client, ``[P]``.
            memory: Tensors by name that the client keeps between rounds; empty at first. May be
                read and modified. Saved in checkpoints.
            generator: Random generator of the client in this round, on the CPU.

        Returns:
            The update that the server receives, ``[P]``.
        """

    def message(self, numbers: int, before: Message) -> Message:
        """Return the size of the transformed update.

        Args:
            numbers: Number of trained parameters, :math:`P`.
            before: Size without this transform.
        """
        return before
