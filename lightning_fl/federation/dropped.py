"""Dropped client updates and their causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fl.types import FederationError

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
    """Check the clients and causes that a callback marked as dropped.

    Args:
        dropped: Causes by client id.
        clients: Ids of the clients that may be dropped.
        taken: Reserved column names of the table of rounds.

    Raises:
        FederationError: If a client is not in ``clients``, or a cause is not a valid column name.
    """
    for client, cause in dropped.items():
        if client not in clients:
            raise FederationError(
                f"on_client_updates can only drop clients {list(clients)}, got client {client}"
            )
        if not isinstance(cause, str) or not cause.isidentifier() or cause in taken - {*CAUSES}:
            raise FederationError(
                f"on_client_updates drops client {client} with the cause {cause!r}, which cannot"
                f" be a column of the table of rounds: use one of {', '.join(CAUSES)}, or a new"
                " name of letters and underscores"
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
    """Return a text that lists clients by id and name.

    Args:
        clients: Ids of the clients.
        names: Names of all clients, if they have names.
        most: Maximum number of clients to list.

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


def describe_dropped(dropped: Mapping[int, str], names: Sequence[str] | None = None) -> str:
    """Return a text that lists the dropped clients by cause.

    Args:
        dropped: Causes by client id.
        names: Names of all clients, if they have names.

    Example:
        >>> describe_dropped({7: "late", 4: "late", 9: "non_finite"})
        'clients 4, 7 (too late), client 9 (non-finite values)'
    """
    parts = []
    for cause, count in count_causes(dropped).items():
        if count:
            clients = sorted(client for client, why in dropped.items() if why == cause)
            parts.append(f"{list_clients(clients, names)} ({describe_cause(cause)})")
    return ", ".join(parts)


def describe_losses(
    round: int, sampled: int, dropped: Mapping[int, str], names: Sequence[str] | None = None
) -> str:
    """Return the text that updates of a round were dropped.

    Args:
        round: Number of the round, from 1.
        sampled: Number of sampled clients.
        dropped: Causes by client id.
        names: Names of all clients, if they have names.
    """
    what = f"round {round}: dropped {len(dropped)} of {sampled} client updates:"
    return f"{what} {describe_dropped(dropped, names)}"


def describe_kept_model(round: int, returned: int, sampled: int, kept_by: str) -> str:
    """Return the text that the global model of a round is unchanged.

    Args:
        round: Number of the round, from 1.
        returned: Number of clients with a usable update.
        sampled: Number of sampled clients.
        kept_by: Description of the requirement that these updates did not meet.
    """
    what = f"round {round}: {returned} of {sampled} clients returned, too few for {kept_by}"
    return f"{what}: the global model is kept"


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
        self._lost = self._kept = 0
        self._sampled: Counter[int] = Counter()
        self._causes: dict[int, Counter[str]] = {}
        #: A sentence on the first tensors with non-finite values, or an empty text.
        self.non_finite = ""

    def note_non_finite(self, names: Sequence[str], initial: Collection[str]) -> None:
        """Record tensors with non-finite values.

        Args:
            names: Names of all tensors of an update with non-finite values.
            initial: Names of all tensors of which the clients have received such values.
        """
        if not names:
            return
        listed = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
        self.non_finite = f"Non-finite values are in {listed}. "
        if received := [name for name in names if name in initial]:
            self.non_finite += (
                f"Clients receive {received[0]} with such values, from which no difference is"
                " finite: set finite ones before the fit, for example by a training step. "
            )

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
        sampled = len(cohort)
        self._sampled.update(cohort)
        for client, cause in dropped.items():
            self._causes.setdefault(client, Counter())[cause] += 1
        if dropped and not self._lost:
            rank_zero_warn(
                f"{describe_losses(round, sampled, dropped, self._names)}. {self.non_finite}Later"
                " rounds are summarized at the end of the fit",
                stacklevel=2,
            )
        if kept_by is not None and not self._kept:
            rank_zero_warn(
                f"{describe_kept_model(round, sampled - len(dropped), sampled, kept_by)}. Later"
                " rounds are summarized at the end of the fit",
                stacklevel=2,
            )
        self._lost += bool(dropped)
        self._kept += kept_by is not None

    def summarize(self) -> None:
        """Warn with a summary of the fit if more than one round had dropped updates."""
        rows = self._rows[self._first :]
        if self._lost > 1:
            rank_zero_warn(". ".join([summarize_dropped(rows), *self._never_used()]))
        if self._kept > 1:
            rank_zero_warn(
                f"the global model was kept in {self._kept} of {len(rows)} rounds, in which too few"
                " clients returned"
            )
        self._lost = self._kept = 0

    def _never_used(self) -> list[str]:
        """Return a text on the clients that were dropped in each of several rounds, if any."""
        never = {
            client: "several_causes" if len(causes) > 1 else next(iter(causes))
            for client, causes in self._causes.items()
            if causes.total() == self._sampled[client] > 1
        }
        described = describe_dropped(never, self._names)
        return [f"Dropped in all rounds in which they were sampled: {described}"] if never else []


def summarize_dropped(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a text with the number of dropped updates per cause.

    Args:
        rows: Rows of the table of rounds.

    Example:
        >>> row = {"clients": 5, "dropped": 3, "late": 2, "low_battery": 1}
        >>> summarize_dropped([row, row])
        'dropped 6 of 10 client updates in 2 of 2 rounds (too late: 4, other causes: 2)'
    """
    dropped, sampled = (sum(row[name] for row in rows) for name in ("dropped", "clients"))
    rounds = sum(row["dropped"] > 0 for row in rows)
    return (
        f"dropped {dropped} of {sampled} client updates in {rounds} of {len(rows)} rounds"
        f" ({describe_causes(rows)})"
    )


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
