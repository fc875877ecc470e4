"""What the rooms say to each other: the plan of a round, its steps, and what clients send back."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

__all__ = [
    "ClientBatches",
    "ClientUpdate",
    "Cohort",
    "FederatedData",
    "FederationError",
    "Feedback",
    "RoundPlan",
    "ServerState",
    "Step",
]


class FederationError(MisconfigurationException, ValueError):
    """A mistake in a configuration, its data or a checkpoint: what was wrong, and what to do."""


def check_package(value: Any, kind: type) -> None:
    """Refuse an object of the package ``pytorch_lightning``, whose classes are not lightning's.

    Raises:
        FederationError: If it is one of them.
    """
    old = [base.__module__.partition(".")[0] for base in type(value).__mro__]
    if not isinstance(value, kind) and "pytorch_lightning" in old:
        raise FederationError(
            f"{type(value).__name__} is a class of the package pytorch_lightning, which does"
            " not work together with lightning: write `import lightning as L` instead of"
            " `import pytorch_lightning as pl`, for the module, the Trainer and its callbacks"
        )


class Cohort(NamedTuple):
    """How the clients of a round are drawn.

    Args:
        size: How many, in the mean.
        clients: Of how many.
        drawn: ``poisson``, each by a coin of its own; ``fixed``, all sets of this size with equal
            probability; ``other``, in a way that is not known.

    Example:
        >>> Cohort(size=10, clients=10, drawn="poisson").is_sampled
        False
    """

    size: int
    clients: int
    drawn: Literal["poisson", "fixed", "other"] = "fixed"

    @property
    def is_sampled(self) -> bool:
        """Whether some clients do not take part."""
        return self.size < self.clients


class Step(NamedTuple):
    """What one training batch of a round is: local steps of the clients in the lanes.

    Args:
        rows: Positions of the clients in the plan, one a lane; none in an idle step, in which a
            process waits for the others.
        start: Local steps that these clients have made before.
        steps: Local steps in this batch.
        last: Whether the clients are done after it.
    """

    rows: tuple[int, ...]
    start: int
    steps: int
    last: bool

    @property
    def first(self) -> bool:
        """Whether clients begin with it."""
        return bool(self.rows) and self.start == 0


#: A batch of a process that has no client left: all have equally many, as Lightning needs it.
IDLE = Step((), 0, 0, False)


@dataclass(frozen=True)
class RoundPlan:
    """Who trains in a round, how long and how fast.

    Args:
        seed: The run's seed. Randomness in training belongs to (seed, round, client).
        round: The round's number, counted from 0.
        clients: Ids of the participating clients, ``[k]``.
        num_steps: Local steps of each, ``[k]``, at least 1.
        lr: Learning rate of each, ``[k]``, or None for the module's own.
        hyperparameters: Further values by name, each ``[k]``. ``lr_factor`` multiplies the learning
            rate.
        lanes: Clients that train at once.
        steps_per_batch: Local steps in one training batch.
        stepwise: Whether the loader fetches a batch's first local step only, and who trains the
            others, one at a time.
        rank: Which of the processes this is. Only :attr:`schedule` and :attr:`rows` depend on it.
        world_size: Processes that share the clients.
        nobody: Whether nobody takes part: a round needs a client, whose work is thrown away.
        fixed_groups: Whether the clients that train at once are chosen from all clients of the
            round, so that they do not depend on the number of processes. A group stays whole.

    Raises:
        FederationError: If the round is empty, or the shapes or numbers of steps do not fit.

    Example:
        >>> plan = RoundPlan(seed=0, round=0, clients=torch.tensor([4, 7]),
        ...                  num_steps=torch.tensor([1, 2]))
        >>> plan.schedule[1]
        Step(rows=(1,), start=0, steps=1, last=False)
    """

    seed: int
    round: int
    clients: Tensor
    num_steps: Tensor
    lr: Tensor | None = None
    hyperparameters: Mapping[str, Tensor] = field(default_factory=dict)
    group_size: int = 1
    steps_per_batch: int = 1
    stepwise: bool = False
    rank: int = 0
    world_size: int = 1
    is_empty: bool = False
    fixed_groups: bool = False

    def __post_init__(self) -> None:
        if not len(self.clients):
            raise FederationError(f"round {self.round + 1} has no clients: it needs at least one")
        for name, value in {
            "num_steps": self.num_steps,
            "lr": self.lr,
            **self.hyperparameters,
        }.items():
            if value is not None and value.shape != self.clients.shape:
                raise FederationError(
                    f"{name} has shape {tuple(value.shape)} for {len(self.clients)} clients: "
                    "a policy returns one value for all or one for each"
                )
        if self.num_steps.is_floating_point():
            raise FederationError(
                f"num_steps must be whole numbers, got {self.num_steps}: return an integer tensor"
            )
        if (short := self.num_steps < 1).any():
            raise FederationError(
                f"client {self.clients[short][0]} would make {self.num_steps[short][0]} local steps"
                f" in round {self.round + 1}: every participating client makes at least one"
            )
        if self.lr is not None and not (self.lr.isfinite() & (self.lr >= 0)).all():
            raise FederationError(
                f"lr must be finite and at least 0, got {self.lr} in round {self.round + 1}"
            )

    @property
    def cohort(self) -> Tensor:
        """Ids of those whose work counts."""
        return self.clients[:0] if self.is_empty else self.clients

    @cached_property
    def shares(self) -> list[list[int]]:
        """Positions of each process's clients, as evenly as their steps allow."""
        return [sorted(row for group in groups for row in group) for groups in self._groups]

    @cached_property
    def _groups(self) -> list[list[tuple[int, ...]]]:
        """Groups of clients that train at once, of each process.

        Those with most steps go first, to the process that has the fewest so far.
        """
        steps = self.num_steps.tolist()
        rows = list(range(len(steps)))
        units = self._cut(rows) if self.fixed_groups else [(row,) for row in rows]
        work = {unit: max(steps[row] for row in unit) for unit in units}
        load = [0] * self.world_size
        shares: list[list[tuple[int, ...]]] = [[] for _ in load]
        for unit in sorted(units, key=lambda unit: -work[unit]):
            rank = load.index(min(load))
            shares[rank].append(unit)
            load[rank] += work[unit]
        if self.fixed_groups:
            return shares
        return [self._cut(sorted(row for unit in share for row in unit)) for share in shares]

    def _cut(self, rows: list[int]) -> list[tuple[int, ...]]:
        """Return clients in groups that differ by one in size at most, of similar work."""
        steps = self.num_steps.tolist()
        if self.group_size > 1:
            rows = sorted(rows, key=lambda row: -steps[row])
        count = -(-len(rows) // self.group_size)
        sizes = [len(rows) // count + (i < len(rows) % count) for i in range(count)]
        ends = list(accumulate(sizes))
        return [tuple(rows[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    @property
    def rows(self) -> list[int]:
        """Positions of this process's clients."""
        return self.shares[self.rank]

    @cached_property
    def schedule(self) -> list[Step]:
        """This process's steps in order, one group of clients after another.

        Clients of similar work share the lanes, and groups differ by at most one in size: no lane
        waits long for another, and none is empty. Every process has as many batches as the busiest.
        """
        schedules = [self._schedule(groups) for groups in self._groups]
        own = schedules[self.rank]
        return own + [IDLE] * (max(map(len, schedules)) - len(own))

    def _schedule(self, groups: list[tuple[int, ...]]) -> list[Step]:
        steps, schedule = self.num_steps.tolist(), []
        for group in groups:
            most = max(steps[row] for row in group)
            for start in range(0, most, self.steps_per_batch):
                count = min(self.steps_per_batch, most - start)
                schedule.append(Step(group, start, count, start + count == most))
        return schedule


class ServerState(NamedTuple):
    """What a client starts from.

    Args:
        vector: Parameters and floating buffers, flattened, ``[P]``.
        counters: Integer buffers, flattened, ``[C]``.
    """

    vector: Tensor
    counters: Tensor


class ClientBatches(list[Any]):
    """Batches of several clients and local steps, in the order ``[steps, clients]``.

    Each is what the client alone would get. None stands for a client that is done.
    """


@dataclass(frozen=True)
class ClientUpdate:
    """What clients send to the server after local training; a client is a row.

    Args:
        clients: Ids, ``[k]``.
        delta: Local models minus what the clients started from, ``[k, P]``.
        num_samples: Training samples of each, ``[k]``.
        num_steps: Local steps of each, ``[k]``; None if they are not known.
        lr: Mean learning rate of each client's local steps, ``[k]``; None if it is not known.
        extras: What the rule's :class:`~lightning_fl.federation.exchange.ClientPart` objects
            return, ``[k, ...]`` by name.

    Raises:
        FederationError: If the lengths differ.

    Example:
        >>> update = ClientUpdate(torch.tensor([3, 5]), torch.ones(2, 4), torch.tensor([10, 20]))
        >>> update.select(torch.tensor([False, True])).clients
        tensor([5])
    """

    clients: Tensor
    delta: Tensor
    num_samples: Tensor
    num_steps: Tensor | None = None
    lr: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        k = len(self.clients)
        if self.delta.ndim != 2 or len(self.delta) != k or self.num_samples.shape != (k,):
            raise FederationError(
                "an update has one row for each client: clients [k], delta [k, P], num_samples [k];"
                f" got {[tuple(t.shape) for t in (self.clients, self.delta, self.num_samples)]}"
            )
        for name, value in {"num_steps": self.num_steps, "lr": self.lr, **self.extras}.items():
            if value is not None and value.shape[:1] != (k,):
                raise FederationError(
                    f"an update of {k} clients has one row for each: {name} has the shape"
                    f" {tuple(value.shape)}"
                )

    def select(self, rows: Tensor) -> ClientUpdate:
        """Return the rows of some clients.

        Args:
            rows: A mask, ``[k]``, or positions.
        """

        def pick(value: Tensor) -> Tensor:
            return value[rows.to(value.device)]

        return ClientUpdate(
            pick(self.clients),
            pick(self.delta),
            pick(self.num_samples),
            None if self.num_steps is None else pick(self.num_steps),
            None if self.lr is None else pick(self.lr),
            {name: pick(value) for name, value in self.extras.items()},
        )


@dataclass(frozen=True)
class Feedback:
    r"""What a policy learns from a round.

    Args:
        plan: The round's plan.
        val_loss_before: The server's validation loss before the round, None if it is not known.
        val_loss: The same after the round, None if validation did not run in it.
        losses: What the clients report: the loss of the model that the round started from,
            each on its first batch and without terms, ``[k]``; NaN of a client whose update was
            not used. None for a policy that does not learn from ``client_losses``.
        weights: Each client's share of the samples of those whose updates were used, ``[k]``.
        contributions: Returns what each client has done to the server's validation loss, ``[k]``:
            :math:`p_k \langle \nabla L(w^{t+1}), w_k - w^t \rangle`, with its weight
            :math:`p_k`; NaN as above. None for a policy that does not learn from
            ``contributions``.
        metrics: Figures that were logged in the round.
    """

    plan: RoundPlan
    val_loss_before: float | None
    val_loss: float | None
    losses: Tensor | None = None
    weights: Tensor | None = None
    contributions: Callable[[], Tensor] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class FederatedData(Protocol):
    """What the loop needs of a data module (``lightning_fl.datamodules.FederatedDataModule``)."""

    #: Where the loader finds the plan of the round; set by the loop.
    plan: Callable[[], RoundPlan] | None
    #: A digest of the split, which a checkpoint keeps.
    checksum: str
    #: Whether processes share out the server's validation samples in a fit; else each reads all.
    shares_validation: bool
    #: Training samples of each client, ``[num_clients]``.
    num_samples: Tensor
    #: Batches in one pass over each client's samples, ``[num_clients]``.
    batches_per_epoch: Tensor

    #: Memory that a sample takes.
    sample_bytes: int
    #: Whether the first axis of every tensor in a batch is known to be that of the samples.
    has_samples_in_front: bool
    #: Whether it can fetch a batch's local steps one at a time.
    can_fetch_steps: bool

    def local_steps(self) -> Callable[[int, bool], Any]:
        """Return how to fetch the local steps of the next batch of a plan that is ``stepwise``.

        The function takes the step, and whether it may use memory again that it has returned.
        """

    def advance(self, round: int) -> bool:
        """Let the samples of a round arrive; say whether rounds have samples of their own."""

    def samples_of(self, client: int) -> Iterator[Any]:
        """All training samples of a client, in batches."""

    def example(self) -> Any:
        """Two training samples as the module gets them."""

    def batch_sizes(self, clients: Tensor, start: int, count: int) -> Tensor:
        """Samples in some local steps of these clients, ``[count, k]``."""


def full(value: Tensor | float, clients: Tensor) -> Tensor:
    """One value for all, or one for each of the clients, as ``[k]``."""
    value = torch.as_tensor(value)
    return value.expand(len(clients)) if value.ndim == 0 else value


def describe(rule: object) -> str:
    """Name a rule and those of its constructor's arguments that it keeps and that are plain.

    Example:
        >>> from lightning_fl.partition import Dirichlet
        >>> describe(Dirichlet(alpha=0.5))
        'Dirichlet(alpha=0.5, min_size=1)'
    """
    arguments = (f"{name}={value!r}" for name, value in plain_options(rule).items())
    return f"{type(rule).__name__}({', '.join(arguments)})"


def plain_options(rule: object) -> dict[str, Any]:
    """Return those of a rule's constructor arguments that it keeps and that are plain values.

    Example:
        >>> from lightning_fl.partition import Dirichlet
        >>> plain_options(Dirichlet(alpha=0.5))
        {'alpha': 0.5, 'min_size': 1}
    """
    kept = {name: getattr(rule, name, ...) for name in _arguments(type(rule))}
    plain = (int, float, str, bool, list, tuple, dict, type(None))
    return {name: value for name, value in kept.items() if isinstance(value, plain)}


def configuration(value: Any, depth: int = 8) -> str:
    """Return a text that is the same for values of the same configuration, in every process.

    Tensors and plain values count by value. An object counts by its class and by those of its
    constructor's arguments that it keeps; a module also by its layers and its hyperparameters; a
    function by its name. Addresses in memory are left out.

    Args:
        value: Anything.
        depth: How deep objects in objects are looked at.

    Example:
        >>> from lightning_fl.partition import Dirichlet
        >>> configuration([Dirichlet(0.5), {"b": 1, "a": 2.0}])
        "[lightning_fl.partition.rules.Dirichlet{'alpha': 0.5, 'min_size': 1}, {'a': 2.0, 'b': 1}]"
    """

    def of(part: Any) -> str:
        return configuration(part, depth - 1) if depth else "..."

    if isinstance(value, str | bytes | int | float | complex | torch.dtype | type(None)):
        return repr(value)
    if isinstance(value, Tensor):
        return f"{value.dtype}{value.tolist()}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{of(k)}: {of(v)}" for k, v in value.items())) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(of, value))}]"
    if isinstance(value, set | frozenset):
        return f"[{', '.join(sorted(map(of, value)))}]"
    if isinstance(value, partial):
        return f"{of(value.func)}{of([value.args, value.keywords])}"
    if hasattr(value, "__qualname__"):  # a function, a method, a class
        return f"{value.__module__}.{value.__qualname__}"
    found: Mapping[str, Any] = getattr(value, "__dict__", {})
    kept = {name: found[name] for name in _arguments(type(value)) if name in found}
    text = f"{of(type(value))}{of(kept)}"
    if isinstance(value, nn.Module):
        text += re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    if isinstance(value, LightningModule):
        text += of(dict(value.hparams))
    return text


def _arguments(kind: type) -> list[str]:
    """Return the names of a constructor's arguments, also of those that it only passes on."""
    found: dict[str, None] = {}
    for parent in kind.__mro__:
        if init := vars(parent).get("__init__"):
            parameters = inspect.signature(init).parameters
            found |= dict.fromkeys(list(parameters)[1:])
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                break
    return list(found)
