"""State that clients keep from round to round."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Bytes of a piece of the file that are mapped at once; larger clients have a piece of their own.
PIECE = 2**26
#: Where a tensor in the file begins: at a multiple of this many bytes.
ALIGNED = 64

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class ClientStore:
    """Named tensors of clients: nothing until a client leaves something, one row each after.

    What clients leave during a round counts from the round's end on: a round that is cut short is
    as if it had not been. Rows are in memory while they are few, else in a file that is mapped into
    memory: the system keeps of it what is in use.

    Args:
        most: Bytes of rows that stay in memory. With more, all are in the file.
        folder: Where that is, without a name: it is gone with the process. None is the system's
            place for temporary files, which may be memory.

    Example:
        >>> store = ClientStore()
        >>> store.put(3, {"momentum": torch.ones(2)})
        >>> store.get(3)
        {}
        >>> store.commit()
        >>> store.get(3)
        {'momentum': tensor([1., 1.])}
    """

    def __init__(self, most: float = 2**30, folder: str | Path | None = None) -> None:
        self.most, self.folder = most, folder
        self._rows: dict[int, dict[str, Tensor]] = {}
        #: What clients left in the round that is not over yet.
        self.new: dict[int, dict[str, Tensor]] = {}
        self._size = 0
        #: Whose rows are in the file, and the rest of its last piece.
        self._mapped: set[int] = set()
        self._free: Bytes = np.empty(0, np.uint8)

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
        self._size += sum(map(_bytes, self.new.values()))
        self._size -= sum(_bytes(self.get(client)) for client in self.new)
        rows = self._rows | self.new  # A new dictionary: a checkpoint may hold the old.
        if self._mapped or self._size > self.most:
            for client in sorted((rows.keys() - self._mapped) | self.new.keys()):
                rows[client] = self._in_file(client, rows[client])
        self._rows, self.new = rows, {}

    def _in_file(self, client: int, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy a client's rows to its place in the file, which it gets first where it has none."""
        places = self._rows[client] if client in self._mapped else {}
        if _kinds(places) != _kinds(rows):
            places = self._place(rows)
            self._mapped.add(client)
        for name, row in rows.items():
            places[name].copy_(row)
        return places

    def _place(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors in the file like these."""
        size = sum(_aligned(row.nbytes) for row in rows.values())
        if size > len(self._free):
            self._free = self._piece(max(size, PIECE))
        places = {}
        for name, row in rows.items():
            if not row.numel():  # torch.save takes several of no size for one
                places[name] = torch.empty_like(row)
                continue
            # Each of its own storage: a checkpoint writes the whole of that.
            own = torch.from_numpy(self._free[: row.nbytes])
            places[name] = own.view(row.dtype).view(row.shape)
            self._free = self._free[_aligned(row.nbytes) :]
        return places

    def _piece(self, size: int) -> Bytes:
        """Return memory that is a file's."""
        if self.folder is not None:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            if hasattr(os, "posix_fallocate"):  # else a full disk is noticed when it is too late
                os.posix_fallocate(file.fileno(), 0, size)
            return np.memmap(file, np.uint8, "w+", shape=size)

    def discard(self) -> None:
        """Forget what clients left in a round that was cut short."""
        self.new = {}

    def state_dict(self) -> dict[int, Any]:
        """Return the rows by client. Write them before the next round ends, where they are many."""
        return self._rows

    def load_state_dict(self, state: dict[int, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self._rows, self._size, self._mapped, self.new = {}, 0, set(), dict(state)
        self.commit()


def _bytes(rows: dict[str, Tensor]) -> int:
    return sum(row.nbytes for row in rows.values())


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _kinds(rows: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (row.shape, row.dtype) for name, row in rows.items()}
