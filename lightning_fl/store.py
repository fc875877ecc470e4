"""State that clients keep from round to round."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ClientStore:
    """Named tensors of clients: nothing until a client leaves something, one row each after.

    What clients leave during a round counts from the round's end on: a round that is cut short is
    as if it had not been.

    Example:
        >>> store = ClientStore()
        >>> store.put(3, {"momentum": torch.ones(2)})
        >>> store.get(3)
        {}
        >>> store.commit()
        >>> store.get(3)
        {'momentum': tensor([1., 1.])}
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Tensor]] = {}
        #: What clients left in the round that is not over yet.
        self.new: dict[int, dict[str, Tensor]] = {}

    def get(self, client: int) -> dict[str, Tensor]:
        """Return what a client left in earlier rounds, on the CPU; empty if nothing."""
        return self._rows.get(client, {})

    def put(self, client: int, rows: dict[str, Tensor]) -> None:
        """Leave a copy of a client's tensors for its next round."""
        if rows:
            self.new[client] = {
                name: torch.empty_like(row, device="cpu").copy_(row) for name, row in rows.items()
            }

    def commit(self) -> None:
        """End a round: what clients left in it counts from now on."""
        self._rows = self._rows | self.new  # A new dictionary: a checkpoint may hold the old.
        self.new = {}

    def discard(self) -> None:
        """Forget what clients left in a round that was cut short."""
        self.new = {}

    def state_dict(self) -> dict[int, Any]:
        """Return the rows by client."""
        return self._rows

    def load_state_dict(self, state: dict[int, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self._rows, self.new = dict(state), {}
