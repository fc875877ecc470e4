"""Event simulation of asynchronous rounds on a virtual clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from lightning_fl.errors import FederationError


class Flush(NamedTuple):
    """Aggregation of a full buffer, which turns one version of the global model into the next.

    Args:
        time: Virtual time of the flush, in seconds.
        clients: Ids of the clients in the buffer, in order of arrival.
        started: Version from which each of these clients started.
        in_use: Versions from which the clients that train after the flush started, in ascending
            order, without the version that the flush creates.
    """

    time: float
    clients: tuple[int, ...]
    started: tuple[int, ...]
    in_use: tuple[int, ...]


class VirtualClock:
    """Simulate when clients start and finish, with a fixed number of clients in training.

    ``concurrency`` clients start at time 0 from version 0. A client that finishes enters the
    buffer, and a free client takes its place at once. The arrival that fills the buffer flushes it:
    the version increases by 1, and the place of this client is taken by one that starts from the
    new version. A client is free if it neither trains nor is in the buffer. If no client is free, a
    place stays empty until the next flush.

    Clients that finish at the same time arrive in the order of their ids, before any client starts
    at this time. At version ``v`` free clients start in the order of ``order(v)``.

    The simulation is a function of the arguments. It is extended from flush to flush when asked,
    and repeated from the start if an old flush is asked for, so it needs no saved state.

    Args:
        num_clients: Number of clients :math:`N`.
        concurrency: Maximum number of clients in training, at most :math:`N`.
        buffer_size: Number of finished clients that flush the buffer, at most :math:`N`.
        order: Maps a version to the ids of all clients, in the order in which free ones start.
        seconds: Maps a client and the version from which it starts to the duration of its work in
            seconds.

    Raises:
        FederationError: If a duration is negative or not finite.

    Example:
        Client 0 takes 1 second, client 1 takes 3, client 2 takes 2. Two train at a time, and each
        arrival is a flush:

        >>> seconds = (1.0, 3.0, 2.0)
        >>> clock = VirtualClock(3, 2, 1, lambda v: range(3), lambda c, v: seconds[c])
        >>> [(f.time, f.clients, f.started) for f in map(clock.flush, range(4))]
        [(1.0, (0,), (0,)), (2.0, (0,), (1,)), (3.0, (0,), (2,)), (3.0, (1,), (0,))]
    """

    def __init__(
        self,
        num_clients: int,
        concurrency: int,
        buffer_size: int,
        order: Callable[[int], Iterable[int]],
        seconds: Callable[[int, int], float],
    ) -> None:
        self.num_clients, self.concurrency = num_clients, concurrency
        self.buffer_size, self._order, self._seconds = buffer_size, order, seconds
        self._reset()

    def _reset(self) -> None:
        self._version = 0
        self._time: float = 0  # an integer, so that durations may be exact fractions
        #: Finish time, client and start version of the clients in training, as a heap.
        self._training: list[tuple[float, int, int]] = []
        #: Client and start version of those that finished since the last flush.
        self._buffer: list[tuple[int, int]] = []
        #: Clients that are not free.
        self._busy: set[int] = set()
        self._next: Iterator[int] = iter(self._order(0))
        #: The last two flushes: callbacks ask for the last round after the next one is planned.
        self._recent: deque[Flush] = deque(maxlen=2)

    def flush(self, version: int) -> Flush:
        """Return the flush that ends a version.

        Args:
            version: The version, from 0. It is the index of a round.
        """
        if version < self._version - len(self._recent):
            self._reset()
        while self._version <= version:
            self._recent.append(self._advance())
        return self._recent[version - self._version]

    def _advance(self) -> Flush:
        """Simulate until the buffer is full."""
        while len(self._buffer) < self.buffer_size:
            # Clients start after the last arrival of a moment, so that they get the newest version.
            if not self._training or self._training[0][0] > self._time:
                self._start_clients()
            self._time, client, version = heappop(self._training)
            self._buffer.append((client, version))
        clients, started = zip(*self._buffer, strict=True)
        self._busy -= set(clients)
        self._buffer = []
        self._version += 1
        self._next = iter(self._order(self._version))
        in_use = sorted({version for _, _, version in self._training})
        return Flush(self._time, clients, started, tuple(in_use))

    def _start_clients(self) -> None:
        """Let free clients start from the current version until all places are taken.

        No client becomes free before the next flush, so the order is never read from its start
        again.
        """
        while len(self._training) < self.concurrency:
            client = next((client for client in self._next if client not in self._busy), None)
            if client is None:
                return
            duration = self._seconds(client, self._version)
            if not 0 <= duration < math.inf:
                raise FederationError(
                    f"the duration of client {client} in round {self._version + 1} is"
                    f" {duration} seconds: it must be finite and at least 0"
                )
            self._busy.add(client)
            heappush(self._training, (self._time + duration, client, self._version))
