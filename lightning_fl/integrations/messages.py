"""What a server and its clients send to each other, and the one place where it is checked.

A transport says who has sent a message. Nothing else in it is trusted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self, get_args, get_type_hints

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl import __version__
from lightning_fl.contracts.update import ServerState
from lightning_fl.errors import FederationError
from lightning_fl.files import one_line, short_repr

#: Dtypes of extras, with which every rule calculates.
#:
#: :meta hide-value:
REAL = {torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16}
REAL |= {torch.float32, torch.float64}
#: Numbers of samples and clients are smaller.
MOST = 2**40
#: A client's mean learning rate is at most so many times the one that it was sent, or 1: warm-ups
#: and hooks of a module change it, and rules multiply with it.
MOST_LR = 1000


def check_version(version: str, other: str, own: str) -> None:
    """Check that the program at the other end trains and aggregates as this one does.

    Args:
        version: Version of this package there.
        other: Name of the other program for the message.
        own: Name of this program.

    Raises:
        FederationError: If the versions differ.
    """
    if version != __version__:
        raise FederationError(
            f"{other} has version {one_line(version)} of lightning_fl, and {own} {__version__}:"
            " install the same version on both"
        )


def checked(name: str, value: Any, kind: type) -> Any:
    """Return an entry of a message.

    Raises:
        FederationError: If it is missing, or has another type; integers have 64 bits.

    Example:
        >>> checked("client", 3, int)
        3
    """
    is_right = isinstance(value, Tensor) if kind is Tensor else type(value) is kind
    if not is_right or (kind is int and not -(2**63) <= value < 2**63):
        raise FederationError(f"its {name} is not the {kind.__name__} that lightning_fl sends")
    return value


class Packable:
    """Base of dataclasses of numbers, texts, tensors, and mappings of one of them."""

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the numbers and texts by name, and the tensors.

        An entry of a mapping has a name such as ``values.lr``.
        """
        flat: dict[str, Any] = {}
        for name, value in vars(self).items():
            is_many = isinstance(value, Mapping)
            flat |= {f"{name}.{key}": v for key, v in value.items()} if is_many else {name: value}
        tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
        return {name: value for name, value in flat.items() if name not in tensors}, tensors

    @classmethod
    def unpack(cls, about: Any, tensors: Mapping[str, Any]) -> Self:
        """Return the message of which :meth:`pack` has returned the parts.

        Args:
            about: Numbers and texts.
            tensors: Tensors or arrays.

        Raises:
            FederationError: If it is another message.
        """
        flat: dict[Any, Any] = dict(about) if isinstance(about, Mapping) else {}
        try:
            flat |= {f"{name}": torch.as_tensor(value) for name, value in tensors.items()}
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            what = cls.__name__.lower()
            raise FederationError(f"its message is not a {what}: {one_line(error)}") from error
        values: dict[str, Any] = {}
        for name, kind in get_type_hints(cls).items():
            if kinds := get_args(kind):  # of the names and the values of a mapping
                some = {key: v for key, v in flat.items() if str(key).startswith(f"{name}.")}
                values[name] = {
                    key.removeprefix(f"{name}."): checked(name, v, kinds[1])
                    for key, v in some.items()
                }
            else:
                values[name] = checked(name, flat.get(name), kind)
        return cls(**values)


@dataclass(frozen=True)
class Hello(Packable):
    """Hold what a client says before the first round.

    Args:
        client: Id of the client.
        num_samples: Number of training samples.
        batches_per_epoch: Number of batches in a local epoch.
        version: Version of this package on the client.
    """

    client: int
    num_samples: int
    batches_per_epoch: int
    version: str = __version__


@dataclass(frozen=True)
class Task(Packable):
    """Hold what the server sends to a client in a round.

    Args:
        update: Id of the update that the client will send: a random number from 1.
        last: Id of the client's last update that the server has used; 0 if there is none.
        round: Index of the round.
        client: Id of the client.
        num_clients: Number of clients in the federation.
        num_rounds: Number of rounds of the run, the client's ``Trainer.max_epochs``.
        seed: Seed of the run.
        num_steps: Number of local steps.
        rule: The server's aggregation rule if it has client-side work, else empty.
        exchanged: Digest of what is exchanged.
        num_trained: Number of exchanged entries that clients train if the rule needs their mask,
            else -1.
        frozen: Digest of the frozen parameters that ``model`` leaves out; empty if it has them.
        version: Version of this package on the server.
        model: ``state_dict`` of the module from which the client starts.
        unsaved: Non-persistent buffers of this module.
        values: Hyperparameters of the client, by name. Without ``lr``, the client uses that of its
            own optimizer.
        broadcast: Tensors of ``Aggregator.broadcast``.
    """

    update: int
    last: int
    round: int
    client: int
    num_clients: int
    num_rounds: int
    seed: int
    num_steps: int
    rule: str
    exchanged: str
    num_trained: int
    frozen: str
    version: str
    model: Mapping[str, Tensor]
    unsaved: Mapping[str, Tensor]
    values: Mapping[str, float]
    broadcast: Mapping[str, Tensor]


@dataclass(frozen=True)
class Reply(Packable):
    """Hold what a client sends back.

    Args:
        client: Id of the client.
        update: Id of the update, from the task.
        num_samples: Number of training samples.
        lr: Mean learning rate over the local steps.
        loss: Loss of the received model in the first local step.
        dropped: Why there is no usable update; empty if there is one.
        delta: Update of the client, ``[P]``; empty if the client has no usable update.
        counters: Integer buffers, ``[C]``.
        extras: Tensors of the rule's client parts.
    """

    client: int
    update: int
    num_samples: int
    lr: float
    loss: float
    dropped: str
    delta: Tensor
    counters: Tensor
    extras: Mapping[str, Tensor]

    def problem(self, ids: tuple[int, int, int], lr: float, start: ServerState) -> str:
        """Return what is wrong with the reply; empty if a rule may see it.

        Values that are not finite are dropped by the round, as in a simulation. A rule checks the
        names and shapes of its extras before it adds an update.

        Args:
            ids: Ids of the client and of the updates of the round, and the number of samples that
                the client has declared.
            lr: Learning rate that it was sent.
            start: Model from which it has started.
        """
        if (self.client, self.update) != ids[:2]:
            return f"it sent an earlier reply, or that of client {self.client}"
        if self.num_samples != ids[2]:
            return f"it trained {self.num_samples} samples, and had {ids[2]} before"
        if not 0 <= self.lr <= MOST_LR * max(lr, 1):
            return f"it trained with the learning rate {self.lr:g}, and was sent {lr:g}"
        for own, known in ((self.delta, start.vector), (self.counters, start.counters)):
            if (own.shape, own.layout, own.dtype) != (known.shape, known.layout, known.dtype):
                other = f"and the model has {known.numel()} in {known.dtype}"
                return f"it sent {own.numel()} values in {own.dtype}, {other}"
        for name, value in self.extras.items():
            is_one = value.shape[:1] == (1,) and value.layout == torch.strided
            if not (is_one and value.dtype in REAL):
                kind = f"{list(value.shape)} in {value.dtype}"
                return f"it sent {short_repr(name)} of shape {kind}, not numbers of one client"
        return ""


class Members:
    """Clients of a server: a number belongs to the sender that has come with it first.

    It is free again when the transport no longer knows this sender. What a client has declared
    when the run begins holds for the whole run.

    Args:
        sender: Word for a sender, such as "node".
        num_clients: Number of clients; None if the senders decide it.
    """

    def __init__(self, sender: str, num_clients: int | None = None) -> None:
        self.sender, self.num_clients = sender, num_clients
        #: Client of each sender, and why senders are not used.
        self.clients: dict[Any, int] = {}
        self.refused: dict[Any, str] = {}
        #: What clients have declared.
        self.declared: dict[int, Hello] = {}
        self.is_begun = False

    def name(self, sender: Any) -> str:
        """Return the name of a sender for messages."""
        return f"{self.sender} {one_line(sender)}"

    def keep(self, senders: Collection[Any]) -> None:
        """Forget all other senders: their numbers are free."""
        self.clients = {each: i for each, i in self.clients.items() if each in senders}
        self.refused = {each: why for each, why in self.refused.items() if each in senders}

    def admit(self, sender: Any, message: Any) -> None:
        """Take a sender up as the client that its first message names, or note why not.

        Args:
            sender: The sender.
            message: Values of :class:`Hello` by name.
        """
        try:
            said = Hello.unpack(message, {})
            check_version(said.version, f"client {said.client}", "the server")
            self._check(sender, said)
            self.clients[sender], self.declared[said.client] = said.client, said
        except FederationError as error:
            self.refuse(sender, error)

    def _check(self, sender: Any, said: Hello) -> None:
        """Refuse a sender that cannot be the client that it says."""
        client, samples, batches = said.client, said.num_samples, said.batches_per_epoch
        most = self.num_clients or MOST
        if not 0 <= client < most:
            others = f"there are {most} clients: number them from 0"
            raise FederationError(f"it is client {client}, and {others}")
        if not 1 <= batches <= samples < MOST:
            raise FederationError(f"client {client} has {samples} samples in {batches} batches")
        for owner, other in self.clients.items():
            if (owner == sender) != (other == client):
                remedy = f"give each {self.sender} another number"
                first = f"client {client} is {self.name(owner)}, which came first"
                raise FederationError(f"{first}: {remedy}")
        if self.is_begun and said != self.declared.get(client):
            remedy = "to use them, stop the run and resume it"
            raise FederationError(f"client {client} has come back with other samples: {remedy}")

    def refuse(self, sender: Any, why: object) -> None:
        """Note why a sender is not used, with a warning."""
        self.refused[sender] = one_line(why, 500)
        rank_zero_warn(f"{self.name(sender)} is not used: {self.refused[sender]}")

    def refusals(self) -> str:
        """Return the end of a message with the senders that are not used."""
        return "".join(f"; {self.name(each)} is not used: {w}" for each, w in self.refused.items())

    def work(self) -> tuple[list[int], list[int]]:
        """Return the numbers of samples and of batches of the clients; the run begins with them."""
        self.is_begun = True
        known = [self.declared[client] for client in range(len(self.declared))]
        return [each.num_samples for each in known], [each.batches_per_epoch for each in known]
