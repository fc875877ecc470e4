"""State that clients keep from round to round."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
    memory: the system keeps of it what is in use. Rows that count are never written over, because a
    checkpoint may be written from them at any time, until :meth:`release` says that it is not.

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
        #: Places in the file that no client's rows are in any more: to be used again, by kind, and
        #: those that a checkpoint may still be written from.
        self._places: dict[Any, list[dict[str, Tensor]]] = defaultdict(list)
        self._left: list[dict[str, Tensor]] = []

    @property
    def rows(self) -> Mapping[int, Mapping[str, Tensor]]:
        """The rows of each client."""
        return self._rows

    def snapshot(self) -> Callable[[], list[dict[str, Any]]]:
        """Return a function that returns the state as of now.

        Nothing is copied before it is called. It may be called until the next :meth:`release`.
        """
        is_large = self._size > max(self.most, PIECE)  # what is too much for memory still is
        return partial(pack, self._rows, self._piece if is_large else None)

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
        """Copy a client's rows to a place in the file that nothing is in."""
        if client in self._mapped:
            self._left.append(self._rows[client])
        self._mapped.add(client)
        free = self._places[_kind(rows)]
        places = free.pop() if free else self._place(rows)
        for name, row in rows.items():
            places[name].copy_(row)
        return places

    def release(self) -> None:
        """Let places be used again whose rows were replaced: no checkpoint needs them any more."""
        for places in self._left:
            self._places[_kind(places)].append(places)
        self._left = []

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

    def state_dict(self) -> list[dict[str, Any]]:
        """Return a copy of all rows; see :func:`pack`."""
        return self.snapshot()()

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Take over what :meth:`state_dict` returned.

        Rows in memory are views of its tensors until their clients leave new ones.
        """
        self._rows, self._size, self._mapped, self.new = {}, 0, set(), unpack(state)
        self._left, self._places = [], defaultdict(list)
        self.commit()


def pack(
    rows: Mapping[int, Mapping[str, Tensor]],
    piece: Callable[[int], Bytes] | None = None,
) -> list[dict[str, Any]]:
    """Copy the rows of clients to a few large tensors, one for each name, shape and dtype.

    A file of thousands of small tensors takes a hundred times as long to write and to read.

    Args:
        rows: By client and name.
        piece: Returns memory of so many bytes, to copy them to; None is the usual one.

    Example:
        >>> pack({3: {"m": torch.ones(2)}, 5: {"m": torch.zeros(2)}})
        [{'name': 'm', 'clients': tensor([3, 5]), 'rows': tensor([[1., 1.],
                [0., 0.]])}]
    """
    kinds: dict[Any, tuple[list[int], list[Tensor]]] = {}
    for client, each in rows.items():
        for name, row in each.items():
            clients, found = kinds.setdefault((name, row.dtype, row.shape), ([], []))
            clients.append(client)
            found.append(row)
    packed, free = [], np.empty(0, np.uint8)
    if piece is not None:
        free = piece(sum(len(found) * _aligned(found[0].nbytes) for _, found in kinds.values()))
    for (name, dtype, shape), (clients, found) in kinds.items():
        out = torch.empty(0, dtype=dtype)
        if piece is not None and (size := len(found) * found[0].nbytes):
            out = torch.from_numpy(free[:size]).view(dtype).view(len(found), *shape)
            free = free[_aligned(size) :]
        packed.append(
            {
                "name": name,
                "clients": torch.tensor(clients),
                "rows": torch.stack(found, out=out),
            }
        )
    return packed


def unpack(state: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Tensor]]:
    """Return the rows of each client: views of the large tensors that :func:`pack` has made."""
    rows: dict[int, dict[str, Tensor]] = {}
    for each in state:
        for client, row in zip(each["clients"].tolist(), each["rows"].unbind(), strict=True):
            rows.setdefault(client, {})[each["name"]] = row
    return rows


def _bytes(rows: dict[str, Tensor]) -> int:
    return sum(row.nbytes for row in rows.values())


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _kind(rows: Mapping[str, Tensor]) -> frozenset[Any]:
    return frozenset((name, row.shape, row.dtype) for name, row in rows.items())
