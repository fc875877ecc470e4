"""Storage of the state that clients keep between rounds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

_Key = TypeVar("_Key")
#: Alignment of tensors in a file, in bytes.
ALIGNED = 64
#: Largest number of files. Linux maps at most 65,530 into a process.
MOST_FILES = 10_000


class ClientStore:
    """Store named tensors (rows) per client.

    Tensors that are stored during a round take effect at its end, so that an interrupted round has
    no effect. Up to a size limit the tensors are in memory, beyond it those of each round are in a
    memory-mapped file. Committed tensors are never overwritten, since a checkpoint may be written
    from them at any time. Once the files are twice as large as the tensors, or are
    :data:`MOST_FILES`, all of them move to a new file.

    Args:
        most: Maximum bytes of tensors in memory. Beyond it, all tensors are in files.
        folder: Folder of the files. They have no names and disappear with the process. None is the
            system's folder for temporary files, which may be in memory.

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
        #: Clients with tensors in a file, and the size and number of the files.
        self._mapped, self._used, self._files = set[int](), 0, 0

    @property
    def rows(self) -> Mapping[int, Mapping[str, Tensor]]:
        """The committed tensors of each client."""
        return self._rows

    def snapshot(self) -> Callable[[], list[dict[str, Any]]]:
        """Return a function that returns the current state. Nothing is copied before its call."""
        # The packed copy of what is in files would not fit into memory either.
        return partial(pack, self._rows, self._in_file if self._mapped else None)

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
            moved = (rows.keys() - self._mapped) | self.new.keys()
            self._used += sum(_bytes(rows[client]) for client in moved)
            self._files += bool(moved)
            if self._used > 2 * self._size or self._files > MOST_FILES:
                moved, self._used, self._files = set(rows), self._size, 1
            each = {(client, name): row for client in moved for name, row in rows[client].items()}
            rows |= {client: {} for client in moved}
            for (client, name), place in (self._in_file(each) if each else {}).items():
                rows[client][name] = place.copy_(each[client, name])
            self._mapped = set(rows)
        self._rows, self.new = rows, {}

    def _in_file(self, rows: Mapping[_Key, Tensor]) -> dict[_Key, Tensor]:
        """Return tensors in a new file without a name, with the given keys, shapes and dtypes."""
        if self.folder is not None:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        size = sum(_aligned(row.nbytes) for row in rows.values())
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:
            if hasattr(os, "posix_fallocate"):  # otherwise writes to a full disk crash later
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
            free = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
        places = {}
        for name, row in rows.items():
            places[name] = free[: row.nbytes].view(row.dtype).view(row.shape)
            free = free[_aligned(row.nbytes) :]
        return places

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
        self._rows, self._size = {}, 0
        self._mapped, self._used, self._files = set(), 0, 0
        self.new = unpack(state)
        self.commit()


def pack(
    rows: Mapping[int, Mapping[str, Tensor]],
    place: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None,
) -> list[dict[str, Any]]:
    """Copy the tensors of clients to a few large tensors, one per name, shape and dtype.

    A file of thousands of small tensors takes a hundred times as long to write and to read.

    Args:
        rows: Tensors by client and name.
        place: Function that returns where to copy them, for the names, shapes and dtypes of some
            tensors. None uses ordinary memory.

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
    packed = []
    for (name, dtype, shape), (clients, tensors) in kinds.items():
        out = torch.empty(0, dtype=dtype)
        if place is not None:
            like = torch.empty(len(tensors), *shape, dtype=dtype, device="meta")
            out = place({name: like})[name]
        stacked = torch.stack(tensors, out=out)
        packed.append({"name": name, "clients": torch.tensor(clients), "rows": stacked})
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
