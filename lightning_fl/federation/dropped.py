"""Dropped client updates and their causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves

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


#: Number of rounds in a row without a usable update that gives a warning.
STREAK = 5


def is_unusable(row: Mapping[str, Any]) -> bool:
    """Return whether a round had no usable update, from its row of the table of rounds.

    Example:
        >>> is_unusable({"clients": 4, "dropped": 4}), is_unusable({"clients": 4, "dropped": 1})
        (True, False)
    """
    return bool(row.get("kept")) or row["dropped"] == row["clients"]


class DropWarnings:
    """Warn at the first round with dropped updates, and summarize the fit at its end.

    Args:
        names: Names of all clients, if they have names.
    """

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self._names = names
        #: Kinds of warnings that were given.
        self.given = set[str]()
        #: Number of rounds in a row, up to the last one, without a usable update.
        self._streak = 0
        self._total = Counter[str]()

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self.given:
            self.given.add(kind)
            rank_zero_warn(text, stacklevel=3)

    def note(self, plan: RoundPlan, results: Results, kept_by: str | None) -> None:
        """Record an aggregated round. Each kind of warning is given once per fit.

        Args:
            plan: Plan of the round.
            results: Results of its clients.
            kept_by: Description of the requirement that too few updates did not meet, so that the
                global model is unchanged; None if the model was updated.
        """
        later, dropped = "Later rounds are summarized at the end of the fit", results.dropped
        round, sampled = plan.round + 1, len(plan.cohort)
        if dropped:
            text = describe_losses(round, sampled, dropped, self._names)
            self._warn("dropped", f"{text}. {results.cause}{later}")
        if kept_by is not None:
            returned = f"{sampled - len(dropped)} of {sampled} clients returned"
            text = f"{returned}, too few for {kept_by}: the global model is kept. {later}"
            self._warn("kept", f"round {round}: {text}")
        self._total.update(rounds=1, lost=bool(dropped), dropped=len(dropped), sampled=sampled)
        is_lost = kept_by is not None or len(dropped) == sampled
        self._streak = self._streak + 1 if is_lost else 0
        if self._streak == STREAK:
            self._warn(
                "streak",
                f"no update was usable in {STREAK} rounds in a row, so the model does not learn:"
                " see the first warning for the cause",
            )

    def summarize(self) -> None:
        """Warn with the total of the fit if more than one round had dropped updates."""
        total = self._total
        if total["lost"] > 1:
            self._warn(
                "total",
                f"dropped {total['dropped']} of {total['sampled']} client updates in"
                f" {total['lost']} of {total['rounds']} rounds: dropped_clients in the table of"
                " rounds names them",
            )


def loss_parts(outputs: Any) -> dict[str, Tensor]:
    """Return the loss of a local step and the terms that it contains, by name.

    Args:
        outputs: Output of ``training_step``, as Lightning passes it to hooks.
    """
    parts = {"loss": outputs["loss"]}
    if "terms" in outputs:
        parts |= {"task_loss": outputs["task_loss"], **outputs["terms"]}
    return {name: torch.as_tensor(part).detach() for name, part in parts.items()}


def describe_non_finite(
    client: int,
    tensors: Mapping[str, Tensor],
    steps: Sequence[Mapping[str, Tensor]],
    batches: Iterable[Any] | None,
) -> str:
    r"""Return sentences on an update with non-finite values: where they are, and where they began.

    Args:
        client: Id of the client.
        tensors: What the client sends or keeps, by name.
        steps: The loss and its terms in the local steps of the client, as far as they are known.
        batches: Training samples of the client; None if they cannot be read again.

    Example:
        >>> infinite, finite = torch.tensor(torch.inf), torch.tensor(5.0)
        >>> steps = [{"loss": finite}, {"loss": infinite}]
        >>> text = describe_non_finite(3, {"w": infinite}, steps, [finite])
        >>> print(text.replace(". ", "\n"), end="")
        Non-finite values are in w
        The loss of client 3 is not finite from local step 2 on (5 in local step 1)
        Its training samples are finite
    """
    names = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    text = f"Non-finite values are in {', '.join(names[:3])}{', ...' * (len(names) > 3)}. "
    at = next((i for i, step in enumerate(steps) if not step["loss"].isfinite()), len(steps))
    before = max(at - 1, 0)
    size = {name: float(part.abs().nan_to_num(torch.inf)) for name, part in steps[before].items()}
    most = f", most of it {max(list(size)[1:], key=size.__getitem__)}" if len(size) > 1 else ""
    known = f"{float(steps[before]['loss']):.3g} in local step {before + 1}{most}"
    loss = f"is not finite from local step {at + 1} on ({known})"
    text += f"The loss of client {client} {loss if at < len(steps) else f'was {known}'}. "
    if batches is None:
        return text
    samples = (part for batch in batches for part in tree_leaves(batch) if isinstance(part, Tensor))
    are = "are" if all(part.isfinite().all() for part in samples) else "are not all"
    return f"{text}Its training samples {are} finite. "
