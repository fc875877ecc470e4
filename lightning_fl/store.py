"""Storage of the state that clients keep between rounds."""

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

#: Number of bytes that are mapped at once; a larger client gets a mapping of its own size.
PIECE = 2**26
#: Alignment of tensors in the file, in bytes.
ALIGNED = 64

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class ClientStore:
    """Store named tensors (rows) per client.

    Tensors that are stored during a round take effect at its end, so that an interrupted round has
    no effect. Up to a size limit the tensors are in memory, beyond it in a memory-mapped file.
    Committed tensors are not overwritten before :meth:`release`, since a checkpoint may be written
    from them at any time.

    Args:
        most: Maximum bytes of tensors in memory. Beyond it, all tensors are in the file.
        folder: Folder of the file. The file has no name and disappears with the process. None is
            the system's folder for temporary files, which may be in memory.

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
        #: Tensors that were stored in the current round.
        self.new: dict[int, dict[str, Tensor]] = {}
        self._size = 0
        #: Clients with tensors in the file, and the free part of its last piece.
        self._mapped: set[int] = set()
        self._free: Bytes = np.empty(0, np.uint8)
        #: Unused places in the file: those that can be reused, by kind, and those that a checkpoint
        #: may still be written from.
        self._places: dict[Any, list[dict[str, Tensor]]] = defaultdict(list)
        self._left: list[dict[str, Tensor]] = []

    @property
    def rows(self) -> Mapping[int, Mapping[str, Tensor]]:
        """The committed tensors of each client."""
        return self._rows

    def snapshot(self) -> Callable[[], list[dict[str, Any]]]:
        """Return a function that returns the current state.

        Nothing is copied before it is called. It may be called until the next :meth:`release`.
        """
        is_large = self._size > max(self.most, PIECE)  # the packed copy would not fit either
        return partial(pack, self._rows, self._piece if is_large else None)

    def get(self, client: int) -> dict[str, Tensor]:
        """Return a client's tensors from earlier rounds, on the CPU; empty if there are none."""
        return self._rows.get(client, {})

    def put(self, client: int, rows: dict[str, Tensor]) -> None:
        """Store a copy of a client's tensors for its next round."""
        if rows:
            self.new[client] = {
                name: torch.empty_like(row, device="cpu").copy_(row) for name, row in rows.items()
            }

    def commit(self) -> None:
        """Commit the tensors of the current round."""
        self._size += sum(map(_bytes, self.new.values()))
        self._size -= sum(_bytes(self.get(client)) for client in self.new)
        rows = self._rows | self.new  # A new dictionary, since a checkpoint may hold the old one.
        if self._mapped or self._size > self.most:
            for client in sorted((rows.keys() - self._mapped) | self.new.keys()):
                rows[client] = self._in_file(client, rows[client])
        self._rows, self.new = rows, {}

    def _in_file(self, client: int, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy a client's tensors to an unused place in the file."""
        if client in self._mapped:
            self._left.append(self._rows[client])
        self._mapped.add(client)
        free = self._places[_kind(rows)]
        places = free.pop() if free else self._place(rows)
        for name, row in rows.items():
            places[name].copy_(row)
        return places

    def release(self) -> None:
        """Free the places of replaced tensors, which no checkpoint needs any more."""
        for places in self._left:
            self._places[_kind(places)].append(places)
        self._left = []

    def _place(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return new tensors in the file with the same names, shapes and dtypes."""
        size = sum(_aligned(row.nbytes) for row in rows.values())
        if size > len(self._free):
            self._free = self._piece(max(size, PIECE))
        places = {}
        for name, row in rows.items():
            if not row.numel():  # torch.save would treat several empty views as one storage
                places[name] = torch.empty_like(row)
                continue
            # One storage per tensor, since a checkpoint writes whole storages.
            own = torch.from_numpy(self._free[: row.nbytes])
            places[name] = own.view(row.dtype).view(row.shape)
            self._free = self._free[_aligned(row.nbytes) :]
        return places

    def _piece(self, size: int) -> Bytes:
        """Return memory-mapped bytes of a new temporary file."""
        if self.folder is not None:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            if hasattr(os, "posix_fallocate"):  # otherwise writes to a full disk crash later
                os.posix_fallocate(file.fileno(), 0, size)
            return np.memmap(file, np.uint8, "w+", shape=size)

    def discard(self) -> None:
        """Discard the tensors of an interrupted round."""
        self.new = {}

    def state_dict(self) -> list[dict[str, Any]]:
        """Return a copy of all tensors; see :func:`pack`."""
        return self.snapshot()()

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Load the result of :meth:`state_dict`.

        Tensors in memory are views of the loaded tensors until their clients store new ones.
        """
        self._rows, self._size, self._mapped, self.new = {}, 0, set(), unpack(state)
        self._left, self._places = [], defaultdict(list)
        self.commit()


def pack(
    rows: Mapping[int, Mapping[str, Tensor]],
    piece: Callable[[int], Bytes] | None = None,
) -> list[dict[str, Any]]:
    """Copy the tensors of clients to a few large tensors, one per name, shape and dtype.

    A file of thousands of small tensors takes a hundred times as long to write and to read.

    Args:
        rows: Tensors by client and name.
        piece: Function that returns memory of a given number of bytes for the copies. None uses
            ordinary memory.

    Example:
        >>> pack({3: {"m": torch.ones(2)}, 5: {"m": torch.zeros(2)}})
        [{'name': 'm', 'clients': tensor([3, 5]), 'rows': tensor([[1., 1.],
                [0., 0.]])}]
    """
    kinds: dict[Any, tuple[list[int], list[Tensor]]] = {}
    for client, each in rows.items():
        for name, row in each.items():
            clients, tensors = kinds.setdefault((name, row.dtype, row.shape), ([], []))
            clients.append(client)
            tensors.append(row)
    packed, free = [], np.empty(0, np.uint8)
    if piece is not None:
        sizes = (len(tensors) * _aligned(tensors[0].nbytes) for _, tensors in kinds.values())
        free = piece(sum(sizes))
    for (name, dtype, shape), (clients, tensors) in kinds.items():
        out = torch.empty(0, dtype=dtype)
        if piece is not None and (size := len(tensors) * tensors[0].nbytes):
            out = torch.from_numpy(free[:size]).view(dtype).view(len(tensors), *shape)
            free = free[_aligned(size) :]
        packed.append(
            {
                "name": name,
                "clients": torch.tensor(clients),
                "rows": torch.stack(tensors, out=out),
            }
        )
    return packed


def unpack(state: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Tensor]]:
    """Return the tensors of each client as views of the large tensors from :func:`pack`.

    Args:
        state: Result of :func:`pack`.
    """
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
