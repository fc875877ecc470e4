"""Simulated attacks by clients, for tests of Byzantine-robust aggregation."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lightning_fl.callbacks.faults import OnUpdates
from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.errors import FederationError
from lightning_fl.federation.measures import accuracy, evaluate
from lightning_fl.functional.randomness import RandomStream, generator, run_seed
from lightning_fl.options import check_choice, check_integer, check_number

#: Maps inputs ``[n, ...]`` and labels ``[n]`` to modified ones of the same shapes.
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Attack(OnUpdates):
    """Base class of attacks by a fixed set of clients.

    Args:
        clients: Ids of the attackers, or a fraction of the clients in [0, 1), which is drawn once
            from the seed of the run.
    """

    def __init__(self, clients: float | Sequence[int] = 0.2) -> None:
        if isinstance(clients, Sequence) and not isinstance(clients, str):
            for i, client in enumerate(clients):
                check_integer(f"clients[{i}]", client, min=0)
        else:  # 1 is ambiguous: all clients or one client
            hint = "pass a fraction of the clients or a list of client ids"
            clients = check_number("clients", clients, min=0, below=1, hint=hint)
        self.clients = clients
        self._who: set[int] = set()

    def attackers(self, seed: int, count: int) -> set[int]:
        """Return the ids of the attackers. A fraction of the clients is rounded down.

        Args:
            seed: Seed of the run.
            count: Number of clients in the federation.
        """
        if not isinstance(self.clients, int | float):
            check_integer("an id in clients", max(self.clients, default=0), min=0, max=count - 1)
            return set(self.clients)
        random = generator(seed, RandomStream.ATTACKERS)
        number = math.floor(self.clients * count + 1e-9)
        return set(torch.randperm(count, generator=random)[:number].tolist())

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the attackers."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._who = self.attackers(self._loop.run_seed, len(data.parts))

    def on_client_updates(
        self, plan: RoundPlan, clients: Tensor, delta: Tensor, dropped: dict[int, str]
    ) -> Tensor:
        """Replace the updates of the attackers."""
        at = self._loop.sent_entries()
        for row, client in enumerate(clients.tolist()):
            if client in self._who:
                delta[row, at] = self.sent(plan, client, delta[row, at])
        return delta

    @abstractmethod
    def sent(self, plan: RoundPlan, client: int, update: Tensor) -> Tensor:
        """Return the update that an attacker sends, ``[n]``.

        Args:
            plan: Plan of the round.
            client: Id of the attacker.
            update: Entries of the update after local training that clients send, ``[n]``: without
                frozen parameters, and without buffers that the server keeps.
        """


class ClientAttack(Attack):
    r"""Let some clients send harmful updates.

    Args:
        clients: Ids of the attackers, or a fraction of the clients in [0, 1), which is drawn once
            from the seed of the run.
        kind: ``sign_flip`` sends :math:`-c \Delta`; ``noise`` sends Gaussian noise with
            :math:`c` times the norm of the update; ``scale`` sends :math:`c \Delta`.
        boost: Factor :math:`c`.

    Raises:
        FederationError: If an option is out of range. At the start of a fit, if a client does not
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
        self.kind = check_choice("kind", kind, "sign_flip", "noise", "scale")
        self.boost = check_number("boost", boost, min=0)

    def sent(self, plan: RoundPlan, client: int, update: Tensor) -> Tensor:
        """Return the harmful update, ``[n]``."""
        if self.kind == "noise":
            random = generator(plan.seed, RandomStream.ATTACKERS, plan.round + 1, client)
            noise = torch.randn(len(update), generator=random).to(update)
            noise *= self.boost * update.norm() / noise.norm()
            return noise
        sign = -1.0 if self.kind == "sign_flip" else 1.0
        return update * (sign * self.boost)


class Changed(Dataset[Any]):
    """Map-style data set that changes some samples when they are read."""

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
    """Return a data set with some samples changed: at once for tensors, else when read.

    Args:
        data: Data set of tuples; the first entry is the input, the last one the label.
        index: Indices of the samples to change, ``[k]``.
        change: Function that changes inputs and labels.

    Example:
        >>> data = TensorDataset(torch.zeros(3), torch.arange(3))
        >>> changed(data, torch.tensor([2]), lambda x, y: (x + 1, y - 2))[2]
        (tensor(1.), tensor(0))
    """
    # A subclass that overrides __getitem__ need not return its tensors.
    if type(data).__getitem__ is not TensorDataset.__getitem__:
        return Changed(data, index, change)
    x, *rest, y = data.tensors
    new_x, new_y = change(x[index], y[index])
    x, y = x.index_copy(0, index, new_x), y.to(new_y).index_copy(0, index, new_y)
    return TensorDataset(x, *rest, y)


class DataAttack(Attack):
    """Base class of attacks by clients that change their training samples during a fit.

    Samples are tuples; the first entry is the input, the last one the class label. The option
    ``labels`` of the data module, if given, repeats these labels.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Change the samples of the attackers before they are read."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        labels: Tensor | None = getattr(data, "class_labels", None)
        if labels is None or labels.is_floating_point() or labels.ndim != 1 or labels.min() < 0:
            raise FederationError(
                f"{type(self).__name__} changes class labels: use a FederatedDataModule with one"
                " integer class label per sample"
            )
        self._data, self._classes = data, int(labels.max()) + 1
        self.prepare(data)
        self._seed = seed = run_seed(self._loop.seed)
        who = sorted(self.attackers(seed, len(data.parts)))
        index = [self.chosen(data.parts[c], generator(seed, RandomStream.BACKDOOR, c)) for c in who]
        every = torch.cat([data.parts[0][:0], *index])
        self._loop.undo.callback(data.restore_samples)
        data.replace_samples(changed(data.train, every, self.change))

    def prepare(self, data: Any) -> None:  # most attacks fit all data
        """Check that the attack supports the data, before samples are changed.

        Args:
            data: The data module, such as a ``FederatedDataModule``.
        """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the checkpoint has the seed with which the attackers were chosen."""
        super().on_fit_start(trainer, pl_module)
        if self._loop.run_seed != self._seed:
            raise FederationError(
                f"the seed of the checkpoint is {self._loop.run_seed}, but attackers were chosen"
                f" with seed {self._seed}: set FederatedLoop(seed={self._loop.run_seed})"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the original samples, on which clients are evaluated after training."""
        self._data.restore_samples()

    def chosen(self, part: Tensor, random: torch.Generator) -> Tensor:
        """Return the indices of the samples that an attacker changes.

        Args:
            part: Indices of the attacker's training samples.
            random: Random generator of the attacker.
        """
        return part

    @abstractmethod
    def change(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return changed inputs and labels of the same shapes."""

    def sent(self, plan: RoundPlan, client: int, update: Tensor) -> Tensor:
        """Return the update unchanged: the attack is in the training samples."""
        return update


class LabelFlip(DataAttack):
    r"""Let some clients train on flipped labels (Fang et al., 2020).

    With :math:`K` classes, label :math:`y` becomes :math:`K - 1 - y`.

    Args:
        clients: Ids of the attackers, or a fraction of the clients in [0, 1), which is drawn once
            from the seed of the run.

    Raises:
        FederationError: If an option is out of range. At the start of a fit, if a client does not
            exist or samples have no class labels.

    Example:
        >>> attack = LabelFlip([0, 3])
        >>> sorted(attack.attackers(seed=0, count=10))
        [0, 3]
    """

    def change(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Flip the labels."""
        return x, self._classes - 1 - y


class Backdoor(DataAttack):
    r"""Let some clients train a backdoor into the global model (Bagdasaryan et al., 2020).

    Attackers put a trigger, a bright square, into the lower right corner of a fraction of their
    samples, label these samples with the target class, and send :math:`c \Delta`. The attackers
    dominate the average if :math:`c` is about the number of clients per round divided by the
    number of attackers. After each round, the column ``backdoor_acc`` contains the attack success
    rate: the fraction of validation samples of other classes that the global model assigns to the
    target class when they carry the trigger.

    Args:
        clients: Ids of the attackers, or a fraction of the clients in [0, 1), which is drawn once
            from the seed of the run.
        target: Target class.
        poison_fraction: Fraction of an attacker's samples that get the trigger, in (0, 1].
        boost: Factor :math:`c`.
        size: Size of the trigger along the last two dimensions of a sample, or along its only
            dimension.
        trigger_value: Value of the trigger, on the scale of the stored samples (images: 0 to 255).
            None uses the maximum of the training samples in memory.

    Raises:
        FederationError: If an option is out of range. At the start of a fit, if a client does not
            exist, samples have no class labels, or there are no validation samples.

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
    ) -> None:
        super().__init__(clients)
        self.target = check_integer("target", target, min=0)
        self.poison_fraction = check_number("poison_fraction", poison_fraction, above=0, max=1)
        self.boost = check_number("boost", boost, min=0)
        self.size = check_integer("size", size, min=1)
        #: Value of the trigger, and that of the run.
        self.trigger_value = check_number("trigger_value", trigger_value, optional=True)
        self._value = self.trigger_value

    def prepare(self, data: Any) -> None:
        """Choose the value of the trigger, and check the data."""
        tensors = data.train.tensors if isinstance(data.train, TensorDataset) else None
        if self.trigger_value is None and tensors is None:
            raise FederationError(
                "Backdoor cannot determine the maximum of samples that are not in memory: set"
                " trigger_value"
            )
        self._value = self.trigger_value
        if tensors is not None:
            shape = [*tensors[0].shape[1:]]
            most, hint = min(shape[-2:], default=0), f"samples have the shape {shape}"
            check_integer("size", self.size, min=1, max=most, hint=hint)
            if self._value is None:
                self._value = float(tensors[0].max())
            stored = torch.tensor(self._value).to(tensors[0].dtype)
            if not stored.is_floating_point() and float(stored) != self._value:
                raise FederationError(
                    f"trigger_value must be a value of stored samples ({stored.dtype}), got"
                    f" {self._value}"
                )
        if data.val is None:
            raise FederationError(
                "Backdoor requires validation samples: set val_size of the data module"
            )
        check_integer("target", self.target, min=0, max=self._classes - 1)

    def chosen(self, part: Tensor, random: torch.Generator) -> Tensor:
        """Return a random fraction of an attacker's samples."""
        count = math.ceil(self.poison_fraction * len(part))
        return part[torch.randperm(len(part), generator=random)[:count]]

    def change(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Add the trigger and set the label to the target class."""
        return self._with_trigger(x), torch.full_like(y, self.target)

    def _with_trigger(self, x: Tensor) -> Tensor:
        x, at = x.clone(), slice(-self.size, None)
        assert self._value is not None
        x[(..., at, at) if x.ndim > 2 else (..., at)] = self._value
        return x

    def sent(self, plan: RoundPlan, client: int, update: Tensor) -> Tensor:
        """Return the scaled update."""
        return update * self.boost

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the attack success rate of the global model."""
        if self._loop.plan_of_the_round is None:  # the round was interrupted
            return
        data, module = self._data, self._loop.runner.module
        asked = changed(data.val, torch.arange(len(data.val)), self._asked)

        def hits_and_samples(module: Any, batch: Any) -> Tensor:
            return torch.stack([accuracy(module, batch).sum(), (batch[-1] >= 0).sum()])

        none = torch.zeros(2, dtype=torch.float64, device=module.device)
        loader = data.evaluation_loader(asked, use="val")
        counts = sum(evaluate(trainer, module, loader, hits_and_samples, seed=0), start=none)
        hits = self._loop.fit.processes.sum(counts)
        pl_module.log("backdoor_acc", float(hits[0] / hits[1].clamp(min=1)))

    def _asked(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Add the trigger; label samples of the target class with -1, which is not counted."""
        labels = torch.full_like(y, self.target, dtype=torch.int64)
        return self._with_trigger(x), labels.where(y != self.target, -1)
