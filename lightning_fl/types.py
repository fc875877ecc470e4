"""Types shared by the packages: the plan of a round, its steps and the client updates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

__all__ = [
    "ClientBatches",
    "ClientUpdate",
    "Cohort",
    "FederatedData",
    "FederationError",
    "Feedback",
    "PersonalModel",
    "RoundPlan",
    "ServerState",
    "Step",
]


class FederationError(MisconfigurationException, ValueError):
    """Error in the configuration, the data or a checkpoint of a federation."""


def check_package(value: Any, kind: type) -> None:
    """Check that an object does not come from the package ``pytorch_lightning``.

    The classes of ``pytorch_lightning`` are not compatible with those of ``lightning``.

    Args:
        value: The object.
        kind: The expected base class.

    Raises:
        FederationError: If the object comes from ``pytorch_lightning``.
    """
    old = [base.__module__.partition(".")[0] for base in type(value).__mro__]
    if not isinstance(value, kind) and "pytorch_lightning" in old:
        raise FederationError(
            f"{type(value).__name__} comes from the package pytorch_lightning, which is not"
            " compatible with lightning: use `import lightning as L` instead of"
            " `import pytorch_lightning as pl` for the module, the Trainer and its callbacks"
        )


class Cohort(NamedTuple):
    """Number of clients sampled per round, and how they are sampled.

    Args:
        size: Expected number of sampled clients.
        clients: Number of clients in the federation.
        drawn: Sampling scheme. ``poisson``: each client is sampled independently. ``fixed``: a
            uniformly random set of ``size`` clients. ``other``: any other scheme.

    Example:
        >>> Cohort(size=10, clients=10, drawn="poisson").is_sampled
        False
    """

    size: int
    clients: int
    drawn: Literal["poisson", "fixed", "other"] = "fixed"

    @property
    def is_sampled(self) -> bool:
        """Whether a round samples fewer than all clients."""
        return self.size < self.clients


class Step(NamedTuple):
    """One training batch of a round: local steps of the clients that train at once.

    Args:
        rows: Positions of the clients in the plan. Empty in an idle step, in which the process
            waits for the others.
        start: Number of local steps that these clients have completed before.
        steps: Number of local steps in this batch.
        last: Whether the clients finish with this batch.
    """

    rows: tuple[int, ...]
    start: int
    steps: int
    last: bool

    @property
    def first(self) -> bool:
        """Whether this is the first batch of the clients."""
        return bool(self.rows) and self.start == 0


#: Batch of a process without clients left. Lightning needs the same number on all processes.
IDLE = Step((), 0, 0, False)


@dataclass(frozen=True)
class RoundPlan:
    """Clients of a round with their numbers of local steps and hyperparameters.

    Args:
        seed: Seed of the run. Random numbers in training depend on (seed, round, client).
        round: Index of the round, from 0.
        clients: Ids of the participating clients, ``[k]``.
        num_steps: Number of local steps per client, ``[k]``, at least 1.
        lr: Learning rate per client, ``[k]``; None uses the learning rate of the module's
            optimizer.
        hyperparameters: Further hyperparameters by name, each ``[k]``. ``lr_factor`` multiplies the
            learning rate.
        group_size: Maximum number of clients that train at once.
        steps_per_batch: Maximum number of local steps in one training batch.
        stepwise: Whether the loader fetches only the first local step of a batch. The runner then
            fetches the other steps one at a time.
        rank: Rank of this process. Only :attr:`schedule` and :attr:`rows` depend on it.
        world_size: Number of processes that share the clients.
        is_empty: Whether no client was sampled. Such a round trains one placeholder client and
            discards its update.
        fixed_groups: Whether groups are formed from all clients of the round before they are
            assigned to processes, so that groups do not depend on the number of processes.
        is_reversed: Whether the clients of each process train in reverse order, which must not
            change results (:func:`lightning_fl.testing.check_federation`).

    Raises:
        FederationError: If there are no clients, a shape differs from that of ``clients``, or a
            number of steps or a learning rate is out of range.

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
    is_reversed: bool = False

    def __post_init__(self) -> None:
        if not len(self.clients):
            raise FederationError(f"round {self.round + 1} has no clients: sample at least one")
        for name, value in {
            "num_steps": self.num_steps,
            "lr": self.lr,
            **self.hyperparameters,
        }.items():
            if value is not None and value.shape != self.clients.shape:
                raise FederationError(
                    f"{name} has shape {tuple(value.shape)} for {len(self.clients)} clients: a"
                    " policy must return a scalar or one value per client"
                )
        if self.num_steps.is_floating_point():
            raise FederationError(f"num_steps must be an integer tensor, got {self.num_steps}")
        if (short := self.num_steps < 1).any():
            raise FederationError(
                f"num_steps must be at least 1, got {self.num_steps[short][0]} for client"
                f" {self.clients[short][0]} in round {self.round + 1}"
            )
        if self.lr is not None and not (self.lr.isfinite() & (self.lr >= 0)).all():
            raise FederationError(
                f"lr must be finite and at least 0, got {self.lr} in round {self.round + 1}"
            )

    @property
    def cohort(self) -> Tensor:
        """Ids of the sampled clients; empty if ``is_empty``."""
        return self.clients[:0] if self.is_empty else self.clients

    @cached_property
    def shares(self) -> list[list[int]]:
        """Positions of the clients of each process, balanced by local steps."""
        return [sorted(row for group in groups for row in group) for groups in self._groups]

    @cached_property
    def _groups(self) -> list[list[tuple[int, ...]]]:
        """Groups of clients that train at once, per process.

        Groups are assigned in decreasing order of steps, each to the process with the fewest steps.
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
        if not self.fixed_groups:
            shares = [self._cut(sorted(row for unit in each for row in unit)) for each in shares]
        return [share[::-1] for share in shares] if self.is_reversed else shares

    def _cut(self, rows: list[int]) -> list[tuple[int, ...]]:
        """Split clients into groups of similar work. Group sizes differ by at most one."""
        steps = self.num_steps.tolist()
        if self.group_size > 1:
            rows = sorted(rows, key=lambda row: -steps[row])
        count = -(-len(rows) // self.group_size)
        sizes = [len(rows) // count + (i < len(rows) % count) for i in range(count)]
        ends = list(accumulate(sizes))
        return [tuple(rows[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    @property
    def rows(self) -> list[int]:
        """Positions of the clients of this process."""
        return self.shares[self.rank]

    @cached_property
    def schedule(self) -> list[Step]:
        """Training batches of this process in order, one group of clients after another.

        A group contains clients with similar numbers of steps, and group sizes differ by at most
        one, which keeps idle time short. Idle steps are added until all processes have the same
        number of batches.
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
    """Model state of the server, from which clients start.

    Args:
        vector: Parameters and floating-point buffers, flattened, ``[P]``.
        counters: Integer buffers, flattened, ``[C]``.
    """

    vector: Tensor
    counters: Tensor


class ClientBatches(list[Any]):
    """Batches of several clients and local steps, in the order ``[steps, clients]``.

    Each entry is the batch of one client, as in sequential training; None if the client has
    finished.
    """


#: Fields of a client update with one row per client, besides its extras.
_FIELDS = ("clients", "delta", "num_samples", "num_steps", "lr")


@dataclass(frozen=True)
class ClientUpdate:
    """Client updates after local training, one row per client.

    Args:
        clients: Ids of the clients, ``[k]``.
        delta: Local models minus the models from which the clients started, ``[k, P]``.
        num_samples: Number of training samples per client, ``[k]``.
        num_steps: Number of local steps per client, ``[k]``; None if unknown.
        lr: Mean learning rate over the local steps of each client, ``[k]``; None if unknown.
        extras: Tensors returned by the :class:`~lightning_fl.federation.exchange.ClientPart`
            objects of the aggregator, ``[k, ...]`` by name.

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
                "clients, delta and num_samples must have shapes [k], [k, P] and [k], got"
                f" {[tuple(t.shape) for t in (self.clients, self.delta, self.num_samples)]}"
            )
        for name, value in {"num_steps": self.num_steps, "lr": self.lr, **self.extras}.items():
            if value is not None and value.shape[:1] != (k,):
                raise FederationError(
                    f"{name} must have one row for each of the {k} clients, got shape"
                    f" {tuple(value.shape)}"
                )

    def select(self, rows: Tensor) -> ClientUpdate:
        """Return the updates of selected clients.

        Args:
            rows: Boolean mask, ``[k]``, or positions.
        """

        def pick(value: Any) -> Any:
            return None if value is None else value[rows.to(value.device)]

        extras = {name: pick(value) for name, value in self.extras.items()}
        return ClientUpdate(**{n: pick(getattr(self, n)) for n in _FIELDS}, extras=extras)


@dataclass(frozen=True)
class Feedback:
    r"""Results of a round, from which a policy learns.

    Args:
        plan: Plan of the round.
        val_loss_before: Validation loss of the global model before the round; None if unknown.
        val_loss: Validation loss of the global model after the round; None if validation did not
            run.
        losses: Loss of the model at the start of the round on the first batch of each client,
            without objective terms, ``[k]``. NaN for clients with a dropped update. None if the
            policy does not learn from ``client_losses``.
        weights: Number of samples of each client divided by the total over clients with a used
            update, ``[k]``.
        contributions: Function that returns the first-order effect of each client on the
            validation loss of the global model, ``[k]``:
            :math:`p_k \langle \nabla L(w^{t+1}), w_k - w^t \rangle` with weight :math:`p_k`. NaN
            for clients with a dropped update. None if the policy does not learn from
            ``contributions``.
        metrics: Metrics logged in the round.
        dropped: Causes of dropped updates by client id.
    """

    plan: RoundPlan
    val_loss_before: float | None
    val_loss: float | None
    losses: Tensor | None = None
    weights: Tensor | None = None
    contributions: Callable[[], Tensor] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    dropped: Mapping[int, str] = field(default_factory=dict)


@runtime_checkable
class FederatedData(Protocol):
    """Interface of the data module (``lightning_fl.datamodules.FederatedDataModule``)."""

    #: Function that returns the plan of the round; set by the loop.
    plan: Callable[[], RoundPlan] | None
    #: Digest of the partition, stored in checkpoints.
    checksum: str
    #: Whether processes split the validation samples in a fit; otherwise each process reads all.
    shares_validation: bool
    #: Number of training samples per client, ``[num_clients]``.
    num_samples: Tensor
    #: Name of each client; None if clients have no names.
    client_names: list[str] | None
    #: Number of batches per local epoch of each client, ``[num_clients]``.
    batches_per_epoch: Tensor

    #: Size of a sample in bytes.
    sample_bytes: int
    #: Whether the first axis of every tensor in a batch is known to be the sample axis.
    has_samples_in_front: bool
    #: Whether the local steps of a batch can be fetched one at a time.
    can_fetch_steps: bool

    def local_steps(self, round: int, position: int) -> Callable[[int], Any]:
        """Return a function that fetches the local steps of a batch of a stepwise plan.

        Its argument is the local step; it may overwrite what it has returned before.
        """

    def advance(self, round: int) -> bool:
        """Make the samples of a round available; return whether rounds have different samples."""

    def samples_of(self, client: int) -> Iterator[Any]:
        """Yield all training samples of a client in batches."""

    def steps_of(self, client: int, generator: torch.Generator) -> Iterator[Any]:
        """Yield an infinite stream of a client's training batches, batched as in a round."""

    def example(self) -> Any:
        """Return a batch of two training samples; None if they are on other machines."""

    def batch_sizes(self, clients: Tensor, start: int, count: int) -> Tensor:
        """Return the batch sizes of ``count`` local steps of the clients, ``[count, k]``."""


def full(value: Tensor | float, clients: Tensor) -> Tensor:
    """Expand a scalar to one value per client, ``[k]``; return other tensors unchanged."""
    value = torch.as_tensor(value)
    return value.expand(len(clients)) if value.ndim == 0 else value


def first_line(error: Exception) -> str:
    r"""Return the class of an error and the first line of its message.

    Example:
        >>> first_line(ValueError("wrong\nin many words"))
        'ValueError: wrong'
    """
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def describe(rule: object) -> str:
    """Return the class name of a rule with its constructor arguments of plain types.

    Example:
        >>> from lightning_fl.partition import Dirichlet
        >>> describe(Dirichlet(alpha=0.5))
        'Dirichlet(alpha=0.5, min_size=1)'
    """
    arguments = (f"{name}={value!r}" for name, value in plain_options(rule).items())
    return f"{type(rule).__name__}({', '.join(arguments)})"


def plain_options(rule: object) -> dict[str, Any]:
    """Return the constructor arguments that a rule stores as attributes of plain types.

    Example:
        >>> from lightning_fl.partition import Dirichlet
        >>> plain_options(Dirichlet(alpha=0.5))
        {'alpha': 0.5, 'min_size': 1}
    """
    kept = {name: getattr(rule, name, ...) for name in _arguments(type(rule))}
    plain = (int, float, str, bool, list, tuple, dict, type(None))
    return {name: value for name, value in kept.items() if isinstance(value, plain)}


def _arguments(kind: type) -> list[str]:
    """Return the names of a constructor's arguments, including those passed to parent classes."""
    names: dict[str, None] = {}
    for parent in kind.__mro__:
        if init := vars(parent).get("__init__"):
            parameters = inspect.signature(init).parameters
            names |= dict.fromkeys(list(parameters)[1:])
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                break
    return list(names)


@runtime_checkable
class PersonalModel(Protocol):
    """Optional protocol of a module, or of its optimizer, with a personal model for each client."""

    def federated_personalize(self, batches: Iterable[Any]) -> bool:
        """Write the personal model into the parameters and buffers of the module, in place.

        Called on a copy of the module, with the received model and the tensors of the client.

        Args:
            batches: All training samples of the client, for methods that adapt to them.

        Returns:
            Whether the client has a personal model.
        """
