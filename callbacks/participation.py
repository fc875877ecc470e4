"""Record of the outcome of every client in every round."""

from __future__ import annotations

import gzip
import io
import string
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lightning_fl.federation.dropped import CAUSES

#: Characters of the outcomes, in order.
CODES = string.digits + string.ascii_letters
#: Outcomes that every record knows: the update of a client arrives, or is dropped for a cause.
OUTCOMES = ("not_sampled", "arrived", *CAUSES)


class Participation:
    """Outcome of every client in every round: not sampled, arrived, or the cause of its drop.

    A round is a text with one character per client, which is kept compressed: about a bit per
    client if clients are sampled at random, and next to nothing if all of them participate.

    Args:
        num_clients: Number of clients.

    Example:
        >>> participation = Participation(4)
        >>> participation.add([0, 2, 3], {2: "late"})
        >>> participation.counts().tolist()  # rounds and dropped updates of each client
        [[1, 0, 1, 1], [0, 0, 1, 0]]
        >>> gzip.decompress(participation.csv_gz()).decode().splitlines()[1]
        '1,1041'
    """

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self.outcomes = list(OUTCOMES)
        self._rounds: list[bytes] = []

    def add(self, clients: Sequence[int], dropped: Mapping[int, str]) -> None:
        """Add a round.

        Args:
            clients: Ids of the sampled clients.
            dropped: Cause by id of the clients whose updates were dropped.
        """
        row = np.full(self.num_clients, ord(CODES[0]), np.uint8)
        row[list(clients)] = ord(CODES[1])
        for client, cause in dropped.items():
            row[client] = ord(self._code(cause))
        self._rounds.append(zlib.compress(row.tobytes()))

    def _code(self, cause: str) -> str:
        if cause not in self.outcomes:
            self.outcomes.append(cause)
        return CODES[self.outcomes.index(cause)]

    def _texts(self) -> Iterator[bytes]:
        """Return the texts of the rounds."""
        return map(zlib.decompress, self._rounds)

    def counts(self) -> np.ndarray[Any, Any]:
        """Return the number of rounds and of dropped updates of each client, ``[2, n]``."""
        counts = np.zeros((2, self.num_clients), np.int64)
        for text in self._texts():
            row = np.frombuffer(text, np.uint8)
            sampled = row != ord(CODES[0])
            counts += sampled, sampled & (row != ord(CODES[1]))
        return counts

    def csv_gz(self) -> bytes:
        """Return the rounds as a compressed CSV file. The same rounds give the same bytes.

        The columns are ``round`` and the outcomes, with one character per client. The name of the
        second column explains the characters: ``0=not_sampled 1=arrived 2=dropped_out ...``.
        """
        head = " ".join(f"{code}={name}" for code, name in zip(CODES, self.outcomes, strict=False))
        file = io.BytesIO()
        # The highest level would take twenty times as long and save a sixth of the bytes.
        with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
            packed.write(f"round,{head}\n".encode())
            for number, text in enumerate(self._texts(), 1):
                packed.write(f"{number},".encode() + text + b"\n")
        return file.getvalue()

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all rounds."""
        return {
            "clients": self.num_clients,
            "outcomes": list(self.outcomes),
            "rounds": list(self._rounds),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore all rounds."""
        self.num_clients = state_dict["clients"]
        self.outcomes, self._rounds = list(state_dict["outcomes"]), list(state_dict["rounds"])
