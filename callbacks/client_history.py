"""What happened to each client in each round."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

#: Name of the file.
HISTORY = "client_losses.csv.gz"
#: Its columns.
COLUMNS = ("round", "client", "outcome", "loss", "score")
#: Outcomes of a client whose update was not dropped. Others are causes of drops.
NOT_SAMPLED, ARRIVED = "not_sampled", "arrived"


class ClientHistory:
    """Table with a row for each round of each client: its outcome, its loss and its score.

    Clients that are neither sampled nor evaluated have no row. Each round is kept as compressed
    text, and the file is the texts one after another.

    Example:
        >>> history = ClientHistory()
        >>> history.add(1, [0, 2, 3], {2: "late"}, {0: 0.5, 2: 0.25})
        >>> print(gzip.decompress(history.csv_gz()).decode())
        round,client,outcome,loss,score
        1,0,arrived,0.5,
        1,2,late,0.25,
        1,3,arrived,,
        <BLANKLINE>
        >>> history.counts()  # rounds and dropped updates of each client
        (Counter({0: 1, 2: 1, 3: 1}), Counter({2: 1}))
    """

    def __init__(self) -> None:
        self._rounds: list[bytes] = []

    def add(
        self,
        round: int,
        clients: Sequence[int],
        dropped: Mapping[int, str],
        losses: Mapping[int, float],
        scores: Mapping[int, float] | None = None,
    ) -> None:
        """Add a round.

        Args:
            round: Number of the round, from 1.
            clients: Ids of the sampled clients.
            dropped: Cause by id of the clients whose updates were dropped.
            losses: Losses by id of the clients that trained.
            scores: Scores by id of the clients that were evaluated after the round.
        """
        scores, outcomes = scores or {}, {**dict.fromkeys(clients, ARRIVED), **dropped}
        lines = [
            f"{round},{client},{outcomes.get(client, NOT_SAMPLED)},{_cell(losses.get(client))},"
            f"{_cell(scores.get(client))}\n"
            for client in sorted({*outcomes, *scores})
        ]
        self._rounds.append(_packed("".join(lines)))

    def counts(self) -> tuple[Counter[int], Counter[int]]:
        """Return the number of rounds, and of dropped updates, by client."""
        sampled, dropped = Counter[int](), Counter[int]()
        for line in gzip.decompress(b"".join(self._rounds)).decode().splitlines():
            _, client, outcome, *_ = line.split(",")
            sampled[int(client)] += outcome != NOT_SAMPLED
            dropped[int(client)] += outcome not in (NOT_SAMPLED, ARRIVED)
        return +sampled, +dropped

    def csv_gz(self) -> bytes:
        """Return the table as a compressed CSV file. The same rounds give the same bytes."""
        return b"".join([_packed(",".join(COLUMNS) + "\n"), *self._rounds])

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all rounds."""
        return {"rounds": list(self._rounds)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore all rounds."""
        self._rounds = list(state_dict["rounds"])


def _packed(text: str) -> bytes:
    # The highest level would take twenty times as long and save a sixth of the bytes.
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def _cell(value: float | None) -> str:
    """Return a value with six digits; empty if it is unknown."""
    return "" if value is None else f"{value:g}"
