"""Dropped client updates and their causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fl.errors import FederationError

#: Descriptions of the causes with a column in every table of rounds. Callbacks may add others.
CAUSES = {
    "dropped_out": "dropped out",
    "crashed": "crashed",
    "late": "too late",
    "non_finite": "non-finite values",
}


def describe_cause(cause: str) -> str:
    """Return the description of a cause.

    Example:
        >>> describe_cause("dropped_out"), describe_cause("low_battery")
        ('dropped out', 'low battery')
    """
    return CAUSES.get(cause, cause.replace("_", " "))


def check_causes(dropped: Mapping[int, str], clients: Sequence[int], taken: set[str]) -> None:
    """Check that a callback dropped clients of ``clients``, for causes that can be columns.

    Args:
        dropped: Causes by client id.
        clients: Ids of the clients that may be dropped.
        taken: Reserved column names of the table of rounds.
    """
    for client, cause in dropped.items():
        is_name = isinstance(cause, str) and cause.isidentifier() and cause not in taken - {*CAUSES}
        if client not in clients or not is_name:
            raise FederationError(
                f"on_client_updates drops client {client} with the cause {cause!r}: drop only"
                f" clients {list(clients)}, with a cause that can be a column of the table of"
                f" rounds, {', '.join(CAUSES)} or a new name of letters and underscores"
            )


def count_causes(dropped: Mapping[int, str]) -> dict[str, int]:
    """Return the number of dropped clients per cause, in the order of :data:`CAUSES`.

    Example:
        >>> count_causes({4: "late", 7: "late"})
        {'dropped_out': 0, 'crashed': 0, 'late': 2, 'non_finite': 0}
    """
    counts = Counter(dropped.values())
    return {cause: counts[cause] for cause in [*CAUSES, *sorted(counts.keys() - CAUSES.keys())]}


def list_clients(clients: Sequence[int], names: Sequence[str] | None, most: int = 10) -> str:
    """Return a text that lists up to ``most`` clients by id, and by name if they have names.

    Example:
        >>> list_clients([4, 7], None), list_clients([1], ["north", "south"])
        ('clients 4, 7', "client 1 'south'")
    """
    named = [
        f"{client}"
        if names is None or names[client] == str(client)
        else f"{client} {names[client]!r}"
        for client in clients[:most]
    ]
    more = ", ..." * (len(clients) > most)
    return f"client{'s' * (len(clients) > 1)} {', '.join(named)}{more}"


def describe_losses(
    round: int, sampled: int, dropped: Mapping[int, str], names: Sequence[str] | None = None
) -> str:
    """Return the text that updates of a round (counted from 1) were dropped, by cause.

    Example:
        >>> describe_losses(1, 9, {5: "crashed", 4: "late"})
        'round 1: dropped 2 of 9 client updates: client 5 (crashed), client 4 (too late)'
    """
    clients_of: dict[str, list[int]] = {cause: [] for cause in count_causes(dropped)}
    for client in sorted(dropped):
        clients_of[dropped[client]].append(client)
    listed = ", ".join(
        f"{list_clients(clients, names)} ({describe_cause(cause)})"
        for cause, clients in clients_of.items()
        if clients
    )
    return f"round {round}: dropped {len(dropped)} of {sampled} client updates: {listed}"


class DropWarnings:
    """Warn at the first round with dropped updates, and summarize the fit at its end.

    Args:
        rows: Rows of the table of rounds, to which the rounds of the fit are added.
        names: Names of all clients, if they have names.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], names: Sequence[str] | None = None
    ) -> None:
        self._rows, self._first, self._names = rows, len(rows), names
        self._has_lost, self._kept = False, 0
        #: A sentence on the first tensors with non-finite values, or an empty text.
        self.non_finite = ""

    def note_non_finite(self, names: Sequence[str]) -> None:
        """Record the tensors of an update with non-finite values, by name."""
        if names:
            listed = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
            self.non_finite = f"Non-finite values are in {listed}. "

    def note(
        self, round: int, cohort: Sequence[int], dropped: Mapping[int, str], kept_by: str | None
    ) -> None:
        """Record an aggregated round.

        Args:
            round: Number of the round, from 1.
            cohort: Ids of the sampled clients.
            dropped: Causes by client id.
            kept_by: Description of the requirement that too few updates did not meet, so that the
                global model is unchanged; None if the model was updated.
        """
        later = "Later rounds are summarized at the end of the fit"
        if dropped and not self._has_lost:
            self._has_lost = True
            text = describe_losses(round, len(cohort), dropped, self._names)
            rank_zero_warn(f"{text}. {self.non_finite}{later}", stacklevel=2)
        self._kept += kept_by is not None
        if kept_by is not None and self._kept == 1:
            rank_zero_warn(
                f"round {round}: {len(cohort) - len(dropped)} of {len(cohort)} clients returned,"
                f" too few for {kept_by}: the global model is kept. {later}",
                stacklevel=2,
            )

    def summarize(self) -> None:
        """Warn with a summary of the fit if more than one round had dropped updates."""
        rows = self._rows[self._first :]
        dropped, sampled = (sum(row[name] for row in rows) for name in ("dropped", "clients"))
        if (lost := sum(row["dropped"] > 0 for row in rows)) > 1:
            rank_zero_warn(
                f"dropped {dropped} of {sampled} client updates in {lost} of {len(rows)} rounds"
                f" ({describe_causes(rows)}): dropped_clients in the table of rounds names them"
            )
        if self._kept > 1:
            rank_zero_warn(
                f"the global model was kept in {self._kept} of {len(rows)} rounds, in which too few"
                " clients returned"
            )
        self._first, self._kept = len(self._rows), 0


def describe_causes(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of dropped updates per cause, in words.

    Args:
        rows: Rows of the table of rounds.

    Example:
        >>> describe_causes([{"dropped": 3, "late": 2, "low_battery": 1}])
        'too late: 2, other causes: 1'
    """
    counts = {words: sum(row.get(cause, 0) for row in rows) for cause, words in CAUSES.items()}
    counts["other causes"] = sum(row["dropped"] for row in rows) - sum(counts.values())
    return ", ".join(f"{words}: {count}" for words, count in counts.items() if count)
