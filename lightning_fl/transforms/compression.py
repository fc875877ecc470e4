"""Compression of client updates."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from lightning_fl.functional.compression import quantized, signs, top_k
from lightning_fl.options import check_flag, check_integer, check_number
from lightning_fl.transforms.base import Message, UpdateTransform


class Compression(UpdateTransform):
    r"""Base class of compressors :math:`C`, with optional error feedback.

    With error feedback, clients add the compression error of earlier rounds to their update:

    .. math:: e \leftarrow e + \Delta, \qquad \text{send } C(e), \qquad e \leftarrow e - C(e)

    (Seide et al., 2014; Karimireddy et al., 2019). Subclasses define :math:`C`.

    Args:
        error_feedback: Whether to use error feedback, which stores :math:`e`, one vector per
            client.
    """

    def __init__(self, error_feedback: bool) -> None:
        self.error_feedback = check_flag("error_feedback", error_feedback)

    def __call__(
        self, update: Tensor, memory: dict[str, Tensor], generator: torch.Generator
    ) -> Tensor:
        """Return the compressed update; see :class:`UpdateTransform`."""
        if not self.error_feedback:
            return self.compressed(update, generator)
        wanted = update + memory["error"] if "error" in memory else update
        sent = self.compressed(wanted, generator)
        memory["error"] = wanted - sent
        return sent

    @abstractmethod
    def compressed(self, update: Tensor, generator: torch.Generator) -> Tensor:
        """Return :math:`C(x)`, ``[P]``."""


class TopK(Compression):
    r"""Send only the entries of an update with the largest magnitude.

    See :func:`~lightning_fl.functional.compression.top_k`.

    Args:
        fraction: Fraction of the entries to send, in (0, 1]. The number is rounded up.
        error_feedback: Whether a client adds what it did not send to its next update. This stores
            one vector per client.

    Raises:
        FederationError: If ``fraction`` is out of range.

    Example:
        >>> transform, memory = TopK(0.5), {}
        >>> transform(torch.tensor([1.0, 4.0]), memory, torch.Generator())
        tensor([0., 4.])
        >>> transform(torch.tensor([2.0, 1.0]), memory, torch.Generator())  # 1 was left
        tensor([3., 0.])
    """

    def __init__(self, fraction: float = 0.1, error_feedback: bool = True) -> None:
        super().__init__(error_feedback)
        self.fraction = check_number("fraction", fraction, above=0, max=1)

    def _count(self, numbers: int) -> int:
        return max(1, math.ceil(self.fraction * numbers - 1e-9))

    def compressed(self, update: Tensor, generator: torch.Generator) -> Tensor:
        """Return the largest entries; see :class:`Compression`."""
        return top_k(update, self._count(len(update)))

    def message(self, numbers: int, before: Message) -> Message:
        """Return the size of the sent values with a 32-bit index each."""
        count = self._count(numbers)
        return Message(count, before.bits, before.extra + 4 * count)


class Quantize(Compression):
    r"""Quantize each entry to a few bits, with one scale per update.

    With two or more bits, rounding is stochastic and unbiased
    (:func:`~lightning_fl.functional.compression.quantized`). With one bit, the sign is sent
    (:func:`~lightning_fl.functional.compression.signs`), which needs error feedback to converge.

    Args:
        bits: Bits per entry, from 1 to 16.
        error_feedback: Whether a client adds the error of the quantization to its next update. This
            stores one vector per client. None enables it for one bit only.

    Raises:
        FederationError: If ``bits`` is out of range.

    Example:
        >>> Quantize(1)(torch.tensor([1.0, -5.0]), {}, torch.Generator())
        tensor([ 3., -3.])
        >>> Quantize(1).message(1000, Message(values=1000, bits=32)).bytes
        129
    """

    def __init__(self, bits: int = 8, error_feedback: bool | None = None) -> None:
        super().__init__(bits == 1 if error_feedback is None else error_feedback)
        self.bits = check_integer("bits", bits, min=1, max=16)

    def compressed(self, update: Tensor, generator: torch.Generator) -> Tensor:
        """Return the quantized update; see :class:`Compression`."""
        if self.bits == 1:
            return signs(update)
        uniform = torch.rand(len(update), generator=generator).to(update.device)
        return quantized(update, self.bits, uniform)

    def message(self, numbers: int, before: Message) -> Message:
        """Return the size of the quantized values and a 32-bit scale.

        One bit per entry has no code for zero, so signs are sent for all entries.
        """
        values = numbers if self.bits == 1 else before.values
        return Message(values, self.bits, before.extra + 4)
