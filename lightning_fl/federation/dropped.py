"""Dropped client updates and their causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.errors import FederationError
from lightning_fl.federation.results import Results

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


def is_unusable(row: Mapping[str, Any]) -> bool:
    """Return whether a round had no usable update, from its row of the table of rounds.

    Example:
        >>> is_unusable({"clients": 4, "dropped": 4}), is_unusable({"clients": 4, "dropped": 1})
        (True, False)
    """
    return bool(row.get("kept")) or row["dropped"] == row["clients"]


class DropWarnings:
    """Warn at the first round with dropped updates, and at the first that kept the model.

    Args:
        names: Names of all clients, if they have names.
    """

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self._names = names
        #: Kinds of warnings that were given.
        self.given = set[str]()

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self.given:
            self.given.add(kind)
            rank_zero_warn(text, stacklevel=3)

    def note(self, plan: RoundPlan, results: Results, kept_by: str | None) -> None:
        """Warn of an aggregated round, once per fit.

        Args:
            plan: Plan of the round.
            results: Results of its clients.
            kept_by: Description of the requirement that too few updates did not meet, so that the
                global model is unchanged; None if the model was updated.
        """
        later, dropped = "Later rounds are in the table of rounds", results.dropped
        round, sampled = plan.round + 1, len(plan.cohort)
        if dropped:
            text = describe_losses(round, sampled, dropped, self._names)
            self._warn("dropped", f"{text}. {results.cause}{later}")
        if kept_by is not None:
            returned = f"{sampled - len(dropped)} of {sampled} clients returned"
            text = f"{returned}, too few for {kept_by}: the global model is kept. {later}"
            self._warn("kept", f"round {round}: {text}")


def describe_non_finite(tensors: Mapping[str, Tensor], loss: Tensor) -> str:
    """Return a sentence on an update with non-finite values: where, and what its loss was.

    Args:
        tensors: What the client sends or keeps, by name.
        loss: Its loss in the first local step.

    Example:
        >>> import torch
        >>> describe_non_finite({"w": torch.tensor(torch.nan)}, torch.tensor(5.0))
        'Non-finite values are in w; the loss was 5 in the first local step. '
    """
    names = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    listed = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
    return f"Non-finite values are in {listed}; the loss was {loss:.3g} in the first local step. "
