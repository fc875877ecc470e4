"""What a client's loss may have besides the data's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Side:
    """One of the two models that a term compares.

    Args:
        params: Parameters by name.
        outputs: What the network made of the batch; None for the fixed model, which did not run.
    """

    params: dict[str, Tensor]
    outputs: Tensor | None = None


class Term(nn.Module, ABC):
    """A further term of a client's loss, listed under ``model.init_args.terms``."""

    #: Whether it looks at the samples: then lanes are not filled up with samples of weight 0.
    uses_batch = True

    @abstractmethod
    def forward(self, own: Side, fixed: Side, batch: Any) -> Tensor:
        """Return the term of a batch, a scalar.

        Args:
            own: The client's model in training.
            fixed: The server's model that the client started from; constant.
            batch: The batch, ``(x, y)``.
        """
