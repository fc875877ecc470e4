"""Clients that mean harm, to test rules that shall stand them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lightning_fl.callbacks.faults import OnUpdates
from lightning_fl.federation.measures import accuracy, evaluating, on_device
from lightning_fl.functional.randomness import RandomStream, generator, run_seed
from lightning_fl.types import FederationError, RoundPlan

#: From inputs and labels, ``[n, ...]`` and ``[n]``, to others of the same shapes.
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Attack(OnUpdates):
    """Some clients attack, round after round.

    Args:
        clients: Who: numbers, or a fraction of all below 1, drawn once by the run's seed.
    """

    def __init__(self, clients: float | Sequence[int]) -> None:
        if isinstance(clients, Sequence) and not isinstance(clients, str):
            is_right = all(type(client) is int and client >= 0 for client in clients)
        else:  # 1 could be everyone or one client
            is_right = isinstance(clients, int | float) and 0 <= clients < 1
            is_right &= not isinstance(clients, bool)
        if not is_right:
            raise FederationError(
                "clients must be a fraction from 0 to below 1, or a list of clients' numbers, got"
                f" {clients!r}"
            )
        self.clients = clients
        self._who: set[int] = set()

    def attackers(self, seed: int, count: int) -> set[int]:
        """Return who attacks; of a fraction that is no whole number, the lower one.

        Args:
            seed: The run's.
            count: Clients of the federation.
        """
        if not isinstance(self.clients, int | float):
            found = set(self.clients)
            if beyond := sorted(client for client in found if client >= count):
                raise FederationError(f"clients names client {beyond[0]}, there are {count}")
            return found
        random = generator(seed, RandomStream.ATTACKERS)
        number = math.floor(self.clients * count + 1e-9)
        return set(torch.randperm(count, generator=random)[:number].tolist())

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose who attacks."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._who = self.attackers(self._loop.run_seed, len(data.parts))

    def on_client_updates(
        self, plan: RoundPlan, clients: Tensor, delta: Tensor, dropped: dict[int, str]
    ) -> Tensor:
        """Let attackers send something else; see :class:`OnUpdates`."""
        for row, client in enumerate(clients.tolist()):
            if client in self._who:
                delta[row] = self.sent(plan, client, delta[row])
        return delta

    @abstractmethod
    def sent(self, plan: RoundPlan, client: int, update: Tensor) -> Tensor:
        """Return what an attacker sends instead of its update, ``[P]``."""


class ClientAttack(Attack):
    r"""Let some clients send what harms.

    Args:
        clients: Who: numbers, or a fraction of all below 1, drawn once by the run's seed.
        kind: ``sign_flip`` sends :math:`-c \Delta`; ``noise`` a vector of normal numbers with
            :math:`c` times the update's norm; ``scale`` sends :math:`c \Delta`.
        boost: :math:`c`, the factor.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if a client does not
            exist.

    Example:
        >>> ClientAttack(0.2, "noise", boost=10.0).kind
        'noise'
    """

    def __init__(
        self,
        clients: float | Sequence[int] = 0.2,
        kind: Literal["sign_flip", "noise", "scale"] = "sign_flip",
        boost: float = 1.0,
    ) -> None:
        super().__init__(clients)
        if kind not in ("sign_flip", "noise", "scale"):
            raise FederationError(f"kind must be sign_flip, noise or scale, got {kind!r}")
        if not 0 <= boost < math.inf:
            raise FederationError(f"boost must be at least 0, got {boost}")
        self.kind, self.boost = kind, boost

    def sent(self, plan: RoundPlan, client: int, update: Tensor) -> Tensor:
        """Return what an attacker sends; see :class:`ClientAttack`."""
        if self.kind == "noise":
            random = generator(plan.seed, RandomStream.ATTACKERS, plan.round + 1, client)
            noise = torch.randn(len(update), generator=random).to(update)
            noise *= self.boost * update.norm() / noise.norm()
            return noise
        sign = -1.0 if self.kind == "sign_flip" else 1.0
        return update * (sign * self.boost)


@runtime_checkable
class ReplaceableData(Protocol):
    """What an attack on data needs of a data module (``datamodules.FederatedDataModule``)."""

    train: Any
    val: Any
    #: Training samples of each client.
    parts: list[Tensor]
    #: Class of each training sample, ``[n]``.
    class_labels: Tensor | None

    def replace_samples(self, train: Dataset[Any]) -> None:
        """Train on other samples at the same indices, until :meth:`restore_samples`."""

    def restore_samples(self) -> None:
        """Train on the original samples again."""

    def evaluation_loader(self, data: Dataset[Any]) -> Iterable[Any]:
        """Return a loader of any samples, in order."""


class Changed(Dataset[Any]):
    """A map-style data set, some of whose samples are changed when they are read."""

    def __init__(self, data: Any, index: Tensor, change: Change) -> None:
        self.data, self.index, self.change = data, set(index.tolist()), change

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        x, *rest, y = self.data[i]
        if i in self.index:
            (x,), (label,) = self.change(x[None], torch.as_tensor(y)[None])
            y = label if isinstance(y, Tensor) else int(label)
        return (x, *rest, y)


def changed(data: Any, index: Tensor, change: Change) -> Dataset[Any]:
    """Return a data set some of whose samples are changed: tensors at once, others when read.

    Args:
        data: Samples are tuples; the first part is the input, the last the label.
        index: Indices of the samples to change, ``[k]``.
        change: The change.

    Example:
        >>> data = TensorDataset(torch.zeros(3), torch.arange(3))
        >>> changed(data, torch.tensor([2]), lambda x, y: (x + 1, y - 2))[2]
        (tensor(1.), tensor(0))
    """
    # A child class with its own __getitem__ may return something else than its tensors.
    if type(data).__getitem__ is not TensorDataset.__getitem__:
        return Changed(data, index, change)
    x, *rest, y = data.tensors
    new_x, new_y = change(x[index], y[index])
    return TensorDataset(x.index_copy(0, index, new_x), *rest, y.index_copy(0, index, new_y))


class DataAttack(Attack):
    """Some clients train on samples that they have changed, for the duration of a fit.

    Samples are tuples whose first part is the input and whose last is the number of a class.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Change the attackers' samples before they are read."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, ReplaceableData) or (labels := data.class_labels) is None:
            raise FederationError(
                f"{type(self).__name__} changes the labels of samples: it needs a"
                " FederatedDataModule whose samples have classes"
            )
        if labels.is_floating_point() or labels.ndim != 1:
            raise FederationError(
                f"{type(self).__name__} needs labels that are numbers of classes, one a sample"
            )
        self._data, self._classes = data, int(labels.max()) + 1
        self.prepare(data)
        self._seed = seed = run_seed(self._loop.seed)
        who = sorted(self.attackers(seed, len(data.parts)))
        index = [self.chosen(data.parts[c], generator(seed, RandomStream.BACKDOOR, c)) for c in who]
        every = torch.cat([data.parts[0][:0], *index])
        self._loop.undo.callback(data.restore_samples)
        data.replace_samples(changed(data.train, every, self.change))

    def prepare(self, data: ReplaceableData) -> None:  # most attacks fit all data
        """Refuse data that do not fit the attack, before samples are changed."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a checkpoint with another seed: it has chosen others."""
        super().on_fit_start(trainer, pl_module)
        if self._loop.run_seed != self._seed:
            raise FederationError(
                f"the checkpoint's seed is {self._loop.run_seed}, and attackers were chosen by"
                f" {self._seed}: set the seed of the FederatedLoop to the former"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the samples back: who measures clients then measures them on their own."""
        self._data.restore_samples()

    def chosen(self, part: Tensor, random: torch.Generator) -> Tensor:
        """Return which of an attacker's samples are changed."""
        return part

    @abstractmethod
    def change(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return changed samples, of the same shapes."""

    def sent(self, plan: RoundPlan, client: int, update: Tensor) -> Tensor:
        """Return the update: it was trained on what was changed."""
        return update


class LabelFlip(DataAttack):
    r"""Let some clients train on wrong labels, :math:`y \mapsto K - 1 - y` of :math:`K` classes.

    (Fang et al., 2020).

    Args:
        clients: Who: numbers, or a fraction of all below 1, drawn once by the run's seed.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if a client does not
            exist or samples have no classes.

    Example:
        >>> attack = LabelFlip([0, 3])
        >>> sorted(attack.attackers(seed=0, count=10))
        [0, 3]
    """

    def __init__(self, clients: float | Sequence[int] = 0.2) -> None:
        super().__init__(clients)

    def change(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Flip labels; see :class:`LabelFlip`."""
        return x, self._classes - 1 - y


class Backdoor(DataAttack):
    r"""Let clients teach the model to answer a trigger with a class (Bagdasaryan et al., 2020).

    Attackers put a bright square into the lower right corner of a part of their samples, label
    these with the target, and send :math:`c \Delta`, which takes over the average if :math:`c` is
    about the number of clients in a round over that of attackers. After each round column
    ``backdoor_acc`` is the part of the validation samples of other classes that the server's model
    takes for the target once they have the trigger.

    Args:
        clients: Who: numbers, or a fraction of all below 1, drawn once by the run's seed.
        target: The class.
        poison_fraction: The part of an attacker's samples that get the trigger, in (0, 1].
        boost: :math:`c`, the factor.
        size: Of the trigger, in each of the last two dimensions of a sample (one, where there is
            one).
        trigger_value: Of the trigger, on the scale of the samples as they are stored (pictures: 0
            to 255); None is the largest number among the training samples in memory.
        name: Of the column.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if a client does not
            exist, samples have no classes, or the server has none to validate on.

    Example:
        >>> attack = Backdoor([0], size=1, trigger_value=9.0)
        >>> attack.change(torch.zeros(1, 2, 2), torch.tensor([3]))
        (tensor([[[0., 0.],
                 [0., 9.]]]), tensor([0]))
    """

    def __init__(
        self,
        clients: float | Sequence[int] = 0.2,
        target: int = 0,
        poison_fraction: float = 0.5,
        boost: float = 1.0,
        size: int = 3,
        trigger_value: float | None = None,
        name: str = "backdoor_acc",
    ) -> None:
        super().__init__(clients)
        if not 0 < poison_fraction <= 1:
            raise FederationError(f"poison_fraction must be in (0, 1], got {poison_fraction}")
        if not 0 <= boost < math.inf:
            raise FederationError(f"boost must be at least 0, got {boost}")
        for option, number, least in (("target", target, 0), ("size", size, 1)):
            if number < least or int(number) != number:
                raise FederationError(f"{option} must be a whole number from {least}, got {number}")
        if trigger_value is not None and not math.isfinite(trigger_value):
            raise FederationError(f"trigger_value must be finite, got {trigger_value}")
        self.target, self.poison_fraction, self.boost = target, poison_fraction, boost
        self.size, self.trigger_value, self.name = size, trigger_value, name

    def prepare(self, data: ReplaceableData) -> None:
        """Choose the value of the trigger, and refuse data that do not fit the options."""
        tensors = data.train.tensors if isinstance(data.train, TensorDataset) else None
        if self.trigger_value is None and tensors is None:
            raise FederationError(
                "Backdoor cannot look for the largest number in samples that are not in"
                " memory: set trigger_value, of the trigger"
            )
        if tensors is not None:
            self._check(tensors[0])
            self.trigger_value = (
                float(tensors[0].max()) if self.trigger_value is None else self.trigger_value
            )
        if data.val is None:
            raise FederationError(
                "Backdoor is measured on validation samples, and the server has none: set val_size"
            )
        if self.target >= self._classes:
            raise FederationError(f"target must be below {self._classes}, got {self.target}")

    def _check(self, x: Tensor) -> None:
        """Refuse a trigger that samples have no room for."""
        if self.size > min(x.shape[1:][-2:], default=0):
            raise FederationError(
                f"size={self.size} does not fit into samples of shape {tuple(x.shape[1:])}"
            )
        if self.trigger_value is not None and not x.is_floating_point():
            limits = torch.iinfo(x.dtype)
            if not limits.min <= self.trigger_value <= limits.max:
                raise FederationError(
                    f"trigger_value must be from {limits.min} to {limits.max}, as samples are"
                    f" stored, got {self.trigger_value}"
                )

    def chosen(self, part: Tensor, random: torch.Generator) -> Tensor:
        """Return a part of an attacker's samples."""
        count = math.ceil(self.poison_fraction * len(part))
        return part[torch.randperm(len(part), generator=random)[:count]]

    def change(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Put the trigger in, and change the label."""
        return self._with_trigger(x), torch.full_like(y, self.target)

    def _with_trigger(self, x: Tensor) -> Tensor:
        x, at = x.clone(), slice(-self.size, None)
        assert self.trigger_value is not None
        x[(..., at, at) if x.ndim > 2 else (..., at)] = self.trigger_value
        return x

    def sent(self, plan: RoundPlan, client: int, update: Tensor) -> Tensor:
        """Return the update, scaled."""
        return update * self.boost

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure how often the model falls for it."""
        if self._loop.plan_of_the_round is None:  # the round was cut short
            return
        data, module = self._data, self._loop.runner.module
        asked = changed(data.val, torch.arange(len(data.val)), self._asked)
        hits = torch.zeros(2, dtype=torch.float64, device=module.device)
        with evaluating(module), torch.no_grad():
            for batch in data.evaluation_loader(asked):
                moved = on_device(trainer, batch)
                hits += torch.stack([accuracy(module, moved).sum(), (moved[-1] >= 0).sum()])
        if trainer.world_size > 1:
            torch.distributed.all_reduce(hits)
        pl_module.log(self.name, float(hits[0] / hits[1].clamp(min=1)))

    def _asked(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Put the trigger in; samples of the target's class get a label that there is not."""
        return self._with_trigger(x), torch.full_like(y, self.target).where(y != self.target, -1)
