"""Optional methods of a module with a personal model for each client."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class PersonalModel(Protocol):
    """Optional protocol of a module, or of its optimizer, with a personal model for each client."""

    def federated_personalize(self, batches: Iterable[Any]) -> bool:
        """Write the personal model into the parameters and buffers of the module, in place.

        Called on a copy of the module, with the received model and the tensors of the client.

        Args:
            batches: All training samples of the client, for methods that adapt to them.

        Returns:
            Whether the client has a personal model.
        """
