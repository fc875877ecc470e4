"""Splits of a data set over clients, the manifest that records one, and its picture."""

from __future__ import annotations

import hashlib
import heapq
import inspect
import json
import math
import operator
import os
import reprlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_fl.types import FederationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "IID",
    "ByKey",
    "ByLabel",
    "Dirichlet",
    "FromManifest",
    "Manifest",
    "Partition",
    "QuantitySkew",
    "Shards",
    "checksum",
    "plot",
]

FORMAT = "lightning_fl partition 1"


class Partition(ABC):
    """A rule that splits the samples of a data set over clients.

    A child writes `split`. Its constructor keeps every argument as an attribute of the same name:
    they are what `parameters`, `repr` and the manifest show.

    Example:
        >>> class Halves(Partition):
        ...     def split(self, labels, num_clients, generator):
        ...         return list(torch.arange(len(labels)).tensor_split(num_clients))
        >>> Halves()(torch.zeros(5), num_clients=2, generator=torch.Generator())
        [tensor([0, 1, 2]), tensor([3, 4])]
    """

    splits_by: ClassVar[Literal["labels", "keys", "samples"]] = "labels"
    """What the rule is given: classes, keys (speakers, writers...), or anything of that length."""

    @abstractmethod
    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """Assign every sample to one client; the input is already checked, order does not matter.

        Args:
            labels: Class (or key) of each sample, ``[N]``.
            num_clients: At most ``N``.
            generator: The only source of randomness.
        """

    def __call__(
        self, labels: Tensor, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        """Split the samples: disjoint, complete, no client empty.

        Args:
            labels: Class (or key, see `splits_by`) of each sample, ``[N]``.
            num_clients: From 1 to ``N``.
            generator: A CPU generator; the same state gives the same clients.

        Returns:
            One int64 tensor of ascending sample numbers a client.

        Raises:
            FederationError: If the input or the rule's parameters do not allow such a split.
        """
        if not isinstance(labels, Tensor) or labels.ndim != 1:
            got = f"shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels)
            raise FederationError(
                f"labels must be a tensor with one number a sample, [N], got {got}: "
                "pass torch.as_tensor(targets), and argmax(1) of one-hot rows"
            )
        if not isinstance(generator, torch.Generator) or generator.device.type != "cpu":
            raise FederationError(
                f"generator must be a torch.Generator on the CPU, got {generator!r}: "
                "pass torch.Generator().manual_seed(seed)"
            )
        _at_least_one("num_clients", num_clients)
        if num_clients > len(labels):
            raise FederationError(
                f"{num_clients} clients cannot share {len(labels)} samples, since each needs one: "
                f"set num_clients to at most {len(labels)} or use more data"
            )
        parts = [part.sort().values for part in self.split(labels.cpu(), num_clients, generator)]
        fault = _fault(parts, len(labels), complete=True)
        if len(parts) != num_clients:
            fault = f"it makes {len(parts)} clients"
        if fault:
            raise FederationError(
                f"{self!r} cannot split {len(labels)} samples over {num_clients} clients: {fault}; "
                "use fewer clients, other parameters, or a rule with min_size (Dirichlet)"
            )
        return parts

    def count_clients(self, labels: Tensor) -> int:
        """Return the number of clients where the rule itself knows it.

        Raises:
            FederationError: If it does not, as most rules.
        """
        raise FederationError(
            f"{type(self).__name__} splits over any number of clients: set num_clients"
        )

    def held_out(self, num_samples: int) -> Tensor | None:
        """Return the samples that the rule keeps from all clients; None leaves it to the data."""
        return None

    def parameters(self) -> dict[str, Any]:
        """The constructor's arguments by name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.parameters().items())
        return f"{type(self).__name__}({arguments})"


class IID(Partition):
    """Deal the samples at random; sizes differ by at most one (McMahan et al., 2017, section 3).

    Example:
        >>> parts = IID()(torch.zeros(7), 3, torch.Generator().manual_seed(0))
        >>> [len(part) for part in parts]
        [3, 2, 2]
    """

    splits_by = "samples"

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """See `Partition.split`."""
        return list(torch.randperm(len(labels), generator=generator).tensor_split(num_clients))


class ByLabel(Partition):
    r"""Give each client `n` classes: client `i` holds classes :math:`(i n + j) \bmod C, j < n`.

    Classes are ordered by label, which may be any integers. A class is divided as equally as
    possible among the clients that hold it. One class a client is the extreme of label skew.

    Args:
        classes_per_client: The number `n`.

    Raises:
        FederationError: If `n` exceeds the number of classes, or some class would have no client.

    Example:
        >>> labels = torch.tensor([7, 9, 7, 9, 8, 8])
        >>> ByLabel(classes_per_client=1)(labels, 3, torch.Generator())
        [tensor([0, 2]), tensor([4, 5]), tensor([1, 3])]
    """

    def __init__(self, classes_per_client: int = 1) -> None:
        self.classes_per_client = _at_least_one("classes_per_client", classes_per_client)

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """See `Partition.split`."""
        order, sizes = _by_class(labels, generator)
        n, num_classes = self.classes_per_client, len(sizes)
        if n > num_classes:
            raise FederationError(
                f"classes_per_client is {n}, but the labels have {num_classes} classes: "
                f"set it to at most {num_classes}"
            )
        if num_clients * n < num_classes:
            raise FederationError(
                f"{num_clients} clients with classes_per_client={n} leave "
                f"{num_classes - num_clients * n} of {num_classes} classes without a client: set "
                f"classes_per_client to at least {math.ceil(num_classes / num_clients)} or "
                f"num_clients to at least {math.ceil(num_classes / n)}"
            )
        # Slot s belongs to client s // n and holds class s % C, so class c has slots c, c + C, ...
        klass = torch.arange(num_classes)
        owners = (num_clients * n - 1 - klass) // num_classes + 1
        rank = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        slot = klass.repeat_interleave(sizes)
        slot = slot + num_classes * (rank % owners.repeat_interleave(sizes))
        return _group(order, slot // n, num_clients)


class Shards(Partition):
    """Sort by label, cut into equal shards, deal them at random (McMahan et al., 2017, section 3).

    With two shards "most clients will only have examples of two digits". Within a class the order
    is random.

    Args:
        shards_per_client: Shards that each client gets.

    Raises:
        FederationError: If there are more shards than samples.

    Example:
        >>> labels = torch.arange(10).repeat(6)
        >>> parts = Shards()(labels, 5, torch.Generator().manual_seed(0))
        >>> [len(labels[part].unique()) for part in parts]
        [2, 2, 2, 2, 2]
    """

    def __init__(self, shards_per_client: int = 2) -> None:
        self.shards_per_client = _at_least_one("shards_per_client", shards_per_client)

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """See `Partition.split`."""
        num_shards = num_clients * self.shards_per_client
        if num_shards > len(labels):
            raise FederationError(
                f"{num_clients} clients with shards_per_client={self.shards_per_client} need "
                f"{num_shards} samples, got {len(labels)}: set shards_per_client to at most "
                f"{len(labels) // num_clients} or use fewer clients"
            )
        order, _ = _by_class(labels, generator)
        shards = order.tensor_split(num_shards)
        deal = torch.randperm(num_shards, generator=generator).view(num_clients, -1)
        return [torch.cat([shards[i] for i in hand]) for hand in deal.tolist()]


class Dirichlet(Partition):
    r"""Divide each class over the clients in proportions :math:`p_c \sim \mathrm{Dir}_K(\alpha)`.

    This is the split of Yurochkin et al. (2019), without their retries; Hsu et al. (2019) draw the
    classes of each client instead. Small `alpha` gives clients of few classes and of very different
    sizes, large `alpha` equal ones. There is one draw: a client below `min_size` is topped up with
    random samples of whichever client is then the largest.

    Args:
        alpha: Concentration, above 0.
        min_size: Samples that every client has at least.

    Raises:
        FederationError: If the data are too few for `min_size`.

    Example:
        >>> labels = torch.arange(10).repeat(100)
        >>> rule = Dirichlet(alpha=0.01, min_size=20)
        >>> sizes = [len(part) for part in rule(labels, 30, torch.Generator().manual_seed(0))]
        >>> sum(sizes), min(sizes)
        (1000, 20)
    """

    def __init__(self, alpha: float = 0.5, min_size: int = 1) -> None:
        self.alpha = _concentration(alpha)
        self.min_size = _at_least_one("min_size", min_size)

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """See `Partition.split`."""
        return _dirichlet(labels, num_clients, self.alpha, self.min_size, generator)


class QuantitySkew(Partition):
    r"""Clients of the same classes but of sizes :math:`N p, p \sim \mathrm{Dir}_K(\alpha)`.

    Li et al. (2022, "Federated learning on non-IID data silos", section 4.3).

    Args:
        alpha: Concentration, above 0; small values give few large clients and a long tail.
        min_size: Samples that every client has at least.

    Raises:
        FederationError: If the data are too few for `min_size`.

    Example:
        >>> parts = QuantitySkew(alpha=0.5)(torch.zeros(900), 6, torch.Generator().manual_seed(0))
        >>> len(parts), sum(len(part) for part in parts)
        (6, 900)
    """

    splits_by = "samples"

    def __init__(self, alpha: float = 1.0, min_size: int = 1) -> None:
        self.alpha = _concentration(alpha)
        self.min_size = _at_least_one("min_size", min_size)

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """See `Partition.split`."""
        # One class for all: what is left of the Dirichlet rule is the sizes.
        one_class = torch.zeros(len(labels), dtype=torch.long)
        return _dirichlet(one_class, num_clients, self.alpha, self.min_size, generator)


class ByKey(Partition):
    """Natural clients, one a key (speaker, writer, device), in ascending order of the keys.

    With fewer clients than keys whole keys are dealt, the largest first, to the client that has
    fewest samples so far (Graham, 1969). Nothing is random.

    Raises:
        FederationError: If there are more clients than keys.

    Example:
        >>> ByKey()(torch.tensor([31, 8, 8, 31, 5]), 3, torch.Generator())
        [tensor([4]), tensor([1, 2]), tensor([0, 3])]
    """

    splits_by = "keys"

    def count_clients(self, labels: Tensor) -> int:
        """Return the number of keys."""
        return len(labels.unique())

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """See `Partition.split`; here `labels` are the keys."""
        keys, codes, sizes = _classes(labels)
        if num_clients > len(keys):
            raise FederationError(
                f"{num_clients} clients need as many keys, the data have {len(keys)}: "
                f"set num_clients to {len(keys)} (one client a key) or fewer"
            )
        owner = torch.arange(len(keys))
        if num_clients < len(keys):
            clients = [(0, client) for client in range(num_clients)]
            for key in sizes.argsort(descending=True, stable=True).tolist():
                size, client = clients[0]
                heapq.heapreplace(clients, (size + int(sizes[key]), client))
                owner[key] = client
        return _group(torch.arange(len(labels)), owner[codes], num_clients)


class FromManifest(Partition):
    """The split that a manifest file holds, after a check that it fits the data.

    Samples that no client of the manifest holds are held out for the server's validation again.

    Args:
        path: A file that `Manifest.write` wrote. It is read when the data are split.

    Raises:
        FederationError: If the file is damaged, or is of other data or another number of clients.

    Example:
        >>> import tempfile
        >>> labels, rng = torch.tensor([0, 1, 0, 1]), torch.Generator()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "split.json")
        ...     Manifest.of(ByLabel(), ByLabel()(labels, 2, rng), labels, seed=0).write(path)
        ...     FromManifest(path)(labels, 2, rng)
        [tensor([0, 2]), tensor([1, 3])]
    """

    splits_by = "samples"

    def __init__(self, path: str | Path) -> None:
        self.path = path

    def count_clients(self, labels: Tensor) -> int:
        """Return the manifest's number of clients."""
        return len(Manifest.read(self.path).clients)

    def held_out(self, num_samples: int) -> Tensor | None:
        """Return the samples that no client of the manifest holds."""
        manifest = Manifest.read(self.path)
        self._check("samples", manifest.num_samples, num_samples)
        free = torch.ones(num_samples, dtype=torch.bool)
        free[[index for client in manifest.clients for index in client]] = False
        return free.nonzero()[:, 0]

    def _check(self, what: str, theirs: int, ours: int) -> None:
        if theirs != ours:
            raise FederationError(
                f"{self.path} is for {theirs} {what}, the run has {ours}: use the data and "
                "num_clients that the manifest was written for, or another manifest"
            )

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """See `Partition.split`; here `labels` are those of the samples that clients hold."""
        manifest = Manifest.read(self.path)
        self._check("clients", len(manifest.clients), num_clients)
        parts = [torch.tensor(indices) for indices in manifest.clients]
        held = torch.cat(parts).sort().values
        self._check("samples that clients hold", len(held), len(labels))
        parts = [torch.searchsorted(held, part) for part in parts]
        # The same number of samples in another order would silently train on another split.
        counts = zip(manifest.class_counts, _class_counts(parts, labels), strict=True)
        for client, (written, found) in enumerate(counts):
            if written and found and written != found:
                raise FederationError(
                    f"{self.path} gives client {client} the classes {reprlib.repr(written)}, the "
                    f"data {reprlib.repr(found)}: they differ or are in another order; load the "
                    "data that the manifest was written for"
                )
        return parts


@dataclass(frozen=True)
class Manifest:
    """What a split was and how it came about, as a JSON file that people can read.

    Args:
        rule: Class name of the rule.
        parameters: Its constructor's arguments.
        seed: Seed of the generator.
        num_samples: Size ``N`` of the data set; samples that are held out have no client.
        clients: Sample numbers of each client.
        class_counts: Samples of each class, client by client; empty where labels are no integers.
        checksum: `checksum` of the clients.

    Example:
        >>> labels = torch.tensor([0, 1, 0, 1])
        >>> rule = ByLabel()
        >>> manifest = Manifest.of(rule, rule(labels, 2, torch.Generator()), labels, seed=0)
        >>> manifest.rule, manifest.parameters, manifest.clients, manifest.class_counts
        ('ByLabel', {'classes_per_client': 1}, [[0, 2], [1, 3]], [{0: 2}, {1: 2}])
    """

    rule: str
    parameters: dict[str, Any]
    seed: int
    num_samples: int
    clients: list[list[int]]
    class_counts: list[dict[int, int]]
    checksum: str

    @classmethod
    def of(cls, rule: Partition, parts: Sequence[Tensor], labels: Tensor, seed: int) -> Manifest:
        """Record a split.

        Args:
            rule: The rule that made it.
            parts: Sample numbers of each client.
            labels: Class of each sample, ``[N]``, also for a rule that splits by keys.
            seed: Seed of the generator the rule was given.

        Raises:
            FederationError: If clients are empty or share samples, or the labels do not fit.
        """
        if fault := _fault(parts, len(labels)):
            raise FederationError(
                f"no manifest for these parts of {len(labels)} samples: {fault}; pass the parts "
                "as the rule returned them, and all labels"
            )
        return cls(
            rule=type(rule).__name__,
            # As JSON reads them back: a path becomes a string, a tuple a list.
            parameters=json.loads(json.dumps(rule.parameters(), default=str)),
            seed=seed,
            num_samples=len(labels),
            clients=[part.tolist() for part in parts],
            class_counts=_class_counts(parts, labels),
            checksum=checksum(parts),
        )

    def write(self, path: str | Path) -> None:
        """Write the file, one line a client; a reader sees the old file or the new one, no half."""
        path = Path(path)
        fields = [f'"format": {json.dumps(FORMAT)}']
        for name in ("rule", "parameters", "seed", "num_samples", "checksum"):
            fields.append(f'"{name}": {json.dumps(getattr(self, name))}')
        for name in ("class_counts", "clients"):
            rows = ",\n    ".join(json.dumps(row) for row in getattr(self, name))
            fields.append(f'"{name}": [\n    {rows}\n  ]')
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_text("{\n  " + ",\n  ".join(fields) + "\n}\n", encoding="utf-8")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: str | Path) -> Manifest:
        """Read a file that `write` wrote.

        Raises:
            FederationError: If the file is missing or no manifest, if it is no split of its
                samples, or if it was changed after it was written.
        """

        def refuse(what: str) -> FederationError:
            return FederationError(
                f"partition manifest {path}: {what}; restore the file, or write it anew from the "
                "rule, its parameters and its seed"
            )

        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise refuse(f"cannot be read ({error.strerror})") from error
        except (ValueError, RecursionError) as error:
            raise refuse(f"is not JSON ({error})") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            got = data.get("format") if isinstance(data, dict) else data
            raise refuse(f"format must be {FORMAT!r}, got {reprlib.repr(got)}")
        values = []
        for name, kind in _FIELDS.items():
            # `type is`, since for isinstance true is an int.
            if type(data.get(name)) is not kind:
                got = reprlib.repr(data.get(name))
                raise refuse(f"{name!r} must be of type {kind.__name__}, got {got}")
            values.append(data[name])
        manifest = cls(*values)
        # No tensor is as large as this number, yet the indices below it have to fit into int64.
        num_samples = min(manifest.num_samples, 2**63 - 1)
        for client, indices in enumerate(manifest.clients):
            if type(indices) is not list or not all(
                type(i) is int and 0 <= i < num_samples for i in indices
            ):
                raise refuse(
                    f"client {client} must be a list of sample numbers from 0 to "
                    f"{num_samples - 1}, got {reprlib.repr(indices)}"
                )
        parts = [torch.tensor(indices, dtype=torch.long) for indices in manifest.clients]
        if fault := _fault(parts, num_samples):
            raise refuse(fault)
        if (found := checksum(parts)) != manifest.checksum:
            raise refuse(
                f"the indices were edited: their checksum is {found}, the file says "
                f"{reprlib.repr(manifest.checksum)}"
            )
        try:
            class_counts = [
                {int(label): operator.index(count) for label, count in row.items()}
                for row in manifest.class_counts
            ]
        except (AttributeError, TypeError, ValueError) as error:
            raise refuse(f"'class_counts' must map classes to counts ({error})") from error
        totals = [sum(row.values()) if row else None for row in class_counts]
        if len(totals) != len(parts) or any(
            total not in (None, len(part)) for total, part in zip(totals, parts, strict=True)
        ):
            raise refuse("'class_counts' does not add up to the sizes of the clients")
        return replace(manifest, class_counts=class_counts)


_FIELDS = {
    "rule": str,
    "parameters": dict,
    "seed": int,
    "num_samples": int,
    "clients": list,
    "class_counts": list,
    "checksum": str,
}


def checksum(parts: Sequence[Tensor]) -> str:
    """SHA-256 of the clients' sizes, then their indices, as little-endian int64: a split's name.

    Args:
        parts: Sample numbers of each client; their order counts.

    Returns:
        64 hexadecimal digits, the same on every platform.

    Example:
        >>> checksum([torch.tensor([0, 2]), torch.tensor([1])])[:16]
        '363a551de55f8c05'
    """
    numbers = torch.cat([torch.tensor([len(part) for part in parts]), *parts])
    return hashlib.sha256(numbers.numpy().astype("<i8").tobytes()).hexdigest()


def plot(
    parts: Sequence[Tensor], labels: Tensor, class_names: Sequence[str] | None = None
) -> Figure:
    """Draw which client holds how many samples of which class, and the clients' sizes above.

    Up to 50 clients are columns of dots whose area is the count, more are columns of a heat map
    whose colour follows the root of the count, as a dot's diameter does.

    Args:
        parts: Sample numbers of each client.
        labels: Class of each sample, ``[N]``, integers.
        class_names: Name of class ``i`` at place ``i``.

    Returns:
        A figure that belongs to no window: ``figure.savefig("split.png")``.

    Raises:
        FederationError: If matplotlib is missing or a class has no name.

    Example:
        >>> labels = torch.arange(10).repeat(6)
        >>> parts = ByLabel()(labels, 10, torch.Generator())
        >>> plot(parts, labels).axes[1].get_xlabel()
        'client (largest dot: 6 samples)'
    """
    try:
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise FederationError(
            f"plot needs matplotlib ({error}): pip install 'lightning_fl[demo]'"
        ) from error
    classes, codes, _ = _classes(labels)
    names = [str(label) for label in classes.tolist()]
    if class_names is not None:
        if int(classes[0]) < 0 or int(classes[-1]) >= len(class_names):
            raise FederationError(
                f"class_names has {len(class_names)} names, the labels go from {classes[0]} to "
                f"{classes[-1]}: give one name for each class, or None"
            )
        names = [class_names[label] for label in classes.tolist()]
    num_clients, num_classes = len(parts), len(classes)
    sizes = [len(part) for part in parts]
    owner = torch.arange(num_clients).repeat_interleave(torch.tensor(sizes))
    cells = codes[torch.cat(list(parts))] * num_clients + owner
    counts = cells.bincount(minlength=num_classes * num_clients).view(num_classes, -1).numpy()

    dots = num_clients <= 50 and num_classes <= 20
    cell, height = min(0.34, 12 / num_clients), min(0.34 * num_classes, 6.8)
    figure = Figure((max(3.5, 1.5 + cell * num_clients), 2.2 + height), layout="constrained")
    top, grid = figure.subplots(2, 1, sharex=True, height_ratios=[1, height])
    top.set_title(f"{num_clients} clients, {len(owner)} samples", loc="left", fontsize="medium")
    top.bar(range(num_clients), sizes, width=0.8 if dots else 1, color="#3b75af")
    top.set_ylabel("samples")
    if dots:
        row, column = counts.nonzero()
        area = (0.92 * 72 * cell) ** 2 * counts[row, column] / counts.max()
        grid.scatter(column, row, s=area, color="#3b75af", linewidths=0)
        grid.set_axisbelow(True)
        grid.grid(color="0.93")
        grid.set_xlabel(f"client (largest dot: {counts.max()} samples)")
    else:
        shade = PowerNorm(0.5, vmin=0)
        image = grid.imshow(counts, "Blues", shade, aspect="auto", interpolation="nearest")
        figure.colorbar(image, ax=grid, label="samples", pad=0.01, aspect=30)
        grid.set_xlabel("client")
    grid.set_ylabel("class")
    grid.set(xlim=(-0.6, num_clients - 0.4), ylim=(num_classes - 0.4, -0.6))
    step = 1 + num_classes // 32
    grid.set_yticks(range(0, num_classes, step), names[::step])
    ticks = MaxNLocator(min(num_clients + 1, 24), steps=[1, 2, 5, 10], integer=True)
    grid.xaxis.set_major_locator(ticks)
    for axes in (top, grid):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise FederationError(f"{name} must be an integer of at least 1, got {value!r}: set {name}")
    return value


def _concentration(alpha: float) -> float:
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise FederationError(
            f"alpha must be a finite number above 0, got {alpha!r}: small values skew the clients "
            "(0.1), large ones make them alike (100); use IID for equal clients"
        )
    return alpha


def _classes(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct labels in ascending order [C], each sample's place among them [N], sizes [C]."""
    if labels.is_floating_point() or labels.is_complex():
        raise FederationError(
            f"this rule groups samples by integers, got labels of {labels.dtype}: pass class "
            "numbers (or keys), or use IID or QuantitySkew"
        )
    classes, codes, sizes = labels.unique(return_inverse=True, return_counts=True)
    return classes, codes, sizes


def _by_class(labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Samples sorted by class and shuffled within [N], and the sizes of the classes [C]."""
    _, codes, sizes = _classes(labels)
    order = torch.randperm(len(labels), generator=generator)
    return order[codes[order].argsort(stable=True)], sizes


def _group(samples: Tensor, owner: Tensor, num_clients: int) -> list[Tensor]:
    """The samples of each client, where ``owner[i]`` is the client of ``samples[i]``."""
    sizes = owner.bincount(minlength=num_clients)
    return list(samples[owner.argsort(stable=True)].split(sizes.tolist()))


def _dirichlet(
    labels: Tensor, num_clients: int, alpha: float, min_size: int, generator: torch.Generator
) -> list[Tensor]:
    """Draw p_c ~ Dir(alpha) over clients for each class c, cut the classes, top up the clients."""
    if num_clients * min_size > len(labels):
        raise FederationError(
            f"{num_clients} clients with min_size={min_size} need {num_clients * min_size} samples,"
            f" the data have {len(labels)}: set min_size to at most {len(labels) // num_clients} or"
            f" num_clients to at most {len(labels) // min_size}"
        )
    order, sizes = _by_class(labels, generator)
    # torch has no gamma variates from a generator.
    rng = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))
    shape = (len(sizes), num_clients)
    # Gamma(a) = Gamma(a + 1) U^(1/a), as logarithms relative to the row's largest U: for small
    # alpha every plain variate is 0.
    log_u = -rng.standard_exponential(shape)
    with np.errstate(over="ignore"):
        log_u = (log_u - log_u.max(1, keepdims=True)) / alpha
    log_gamma = np.log(rng.standard_gamma(alpha + 1, shape)) + log_u
    shares = np.exp(log_gamma - log_gamma.max(1, keepdims=True)).cumsum(1)
    # One random offset a class makes the expected counts exactly p_c n_c, also where n_c < K.
    total = sizes.numpy()[:, None]
    cuts = np.floor(shares / shares[:, -1:] * total + rng.random((len(sizes), 1)))
    counts = torch.from_numpy(np.diff(np.minimum(cuts, total), prepend=0, axis=1)).long()
    owner = torch.arange(num_clients).repeat(len(sizes)).repeat_interleave(counts.flatten())
    return _top_up(_group(order, owner, num_clients), min_size, generator)


def _top_up(parts: list[Tensor], min_size: int, generator: torch.Generator) -> list[Tensor]:
    """Move random samples from whichever client is the largest to those below `min_size`."""
    short = [client for client, part in enumerate(parts) if len(part) < min_size]
    if not short:
        return parts
    hands = [part[torch.randperm(len(part), generator=generator)].tolist() for part in parts]
    largest = [(-len(hand), client) for client, hand in enumerate(hands)]
    heapq.heapify(largest)
    for client in short:
        while len(hands[client]) < min_size:
            # A client that still is short has an old entry, yet never the top one: as the samples
            # suffice for all, some client has more than min_size.
            size, donor = largest[0]
            heapq.heapreplace(largest, (size + 1, donor))
            hands[client].append(hands[donor].pop())
    return [torch.tensor(hand) for hand in hands]


def _fault(parts: Sequence[Tensor], num_samples: int, complete: bool = False) -> str | None:
    """What keeps `parts` from being a split of the samples, if anything."""
    sizes = [len(part) for part in parts]
    if not sizes or 0 in sizes:
        return f"client {sizes.index(0)} gets no sample" if sizes else "there are no clients"
    samples, position = torch.cat(list(parts)).sort()
    owner = torch.arange(len(parts)).repeat_interleave(torch.tensor(sizes))[position]
    if (outside := (samples < 0) | (samples >= num_samples)).any():
        return (
            f"client {owner[outside][0]} gets sample {samples[outside][0]}, "
            f"which is not among 0 to {num_samples - 1}"
        )
    if (twice := samples[1:] == samples[:-1]).any():
        i = int(twice.nonzero()[0])
        a, b = sorted(owner[i : i + 2].tolist())
        return f"sample {samples[i]} goes to client {a} and to client {b}"
    if complete and len(samples) < num_samples:
        gap = (samples != torch.arange(len(samples))).nonzero()
        return f"sample {int(gap[0]) if len(gap) else len(samples)} goes to no client"
    return None


def _class_counts(parts: Sequence[Tensor], labels: Tensor) -> list[dict[int, int]]:
    """Samples of each class, client by client; none for labels that are no integers."""
    if labels.is_floating_point() or labels.is_complex():
        return [{} for _ in parts]
    labels = labels.cpu().long()
    return [dict(sorted(Counter(labels[part].tolist()).items())) for part in parts]
