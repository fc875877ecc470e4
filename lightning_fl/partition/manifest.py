"""The file that records a split, and the rule that repeats it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fl.files import read_text, short_repr, write_atomically
from lightning_fl.partition.base import Partition, fault_of, fault_of_samples
from lightning_fl.types import FederationError

FORMAT = "lightning_fl partition 1"


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
        >>> from lightning_fl.partition import ByLabel
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
        if fault := fault_of(parts, len(labels)):
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
        fields = [f'"format": {json.dumps(FORMAT)}']
        for name in ("rule", "parameters", "seed", "num_samples", "checksum"):
            fields.append(f'"{name}": {json.dumps(getattr(self, name))}')
        for name in ("class_counts", "clients"):
            rows = ",\n    ".join(json.dumps(row) for row in getattr(self, name))
            fields.append(f'"{name}": [\n    {rows}\n  ]')
        write_atomically(path, "{\n  " + ",\n  ".join(fields) + "\n}\n")

    @classmethod
    def read(cls, path: str | Path) -> Manifest:
        """Read a file that `write` wrote.

        Raises:
            FederationError: If the file is missing, no manifest, or larger than
                `lightning_fl.files.MOST_BYTES`, if it is no split of its samples, or if it was
                changed after it was written.
        """

        def refuse(what: str) -> FederationError:
            return FederationError(
                f"partition manifest {path}: {what}; restore the file, or write it anew from the "
                "rule, its parameters and its seed"
            )

        try:
            data = json.loads(read_text(path), object_pairs_hook=_without_repetition)
        except OSError as error:
            raise refuse(f"cannot be read ({error.strerror})") from error
        except (ValueError, RecursionError) as error:
            raise refuse(f"is not JSON ({error})") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            got = data.get("format") if isinstance(data, dict) else data
            raise refuse(f"format must be {FORMAT!r}, got {short_repr(got)}")
        values = []
        for name, kind in _FIELDS.items():
            # `type is`, since for isinstance true is an int.
            if type(data.get(name)) is not kind:
                got = short_repr(data.get(name))
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
                    f"{num_samples - 1}, got {short_repr(indices)}"
                )
        if not manifest.clients:
            raise refuse("there are no clients")
        # All in one: a tensor for each of millions of clients would take much memory.
        sizes = torch.tensor([len(indices) for indices in manifest.clients])
        samples = torch.tensor([i for indices in manifest.clients for i in indices]).long()
        if fault := fault_of_samples(samples, sizes, num_samples):
            raise refuse(fault)
        if (found := _digest(samples, sizes)) != manifest.checksum:
            raise refuse(
                f"the indices were edited: their checksum is {found}, the file says "
                f"{short_repr(manifest.checksum)}"
            )
        try:
            class_counts = [_counts(row) for row in manifest.class_counts]
        except (AttributeError, TypeError, ValueError) as error:
            raise refuse(f"'class_counts' must map classes to counts ({error})") from error
        totals = [sum(row.values()) if row else None for row in class_counts]
        if len(totals) != len(sizes) or any(
            total not in (None, size) for total, size in zip(totals, sizes.tolist(), strict=True)
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


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dictionary, in which JSON would let the last of equal names win."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {short_repr(name)} is there twice")
    return found


def _counts(row: dict[Any, Any]) -> dict[int, int]:
    found = {int(label): count for label, count in row.items()}
    for label, count in zip(row, found.values(), strict=True):
        if type(count) is not int or count < 0 or str(int(label)) != label:
            raise ValueError(f"got {short_repr(label)}: {short_repr(count)}")
    return found


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
    return _digest(torch.cat(list(parts)), torch.tensor([len(part) for part in parts]))


def _digest(samples: Tensor, sizes: Tensor) -> str:
    numbers = torch.cat([sizes, samples])
    return hashlib.sha256(numbers.numpy().astype("<i8").tobytes()).hexdigest()


def _class_counts(parts: Sequence[Tensor], labels: Tensor) -> list[dict[int, int]]:
    """Samples of each class, client by client; none for labels that are no integers."""
    if labels.is_floating_point() or labels.is_complex():
        return [{} for _ in parts]
    labels = labels.cpu().long()
    return [dict(sorted(Counter(labels[part].tolist()).items())) for part in parts]


class FromManifest(Partition):
    """The split that a manifest file holds, after a check that it fits the data.

    Samples that no client of the manifest holds are held out for the server's validation again.

    Args:
        path: A file that `Manifest.write` wrote. It is read when the data are split.

    Raises:
        FederationError: If the file is damaged, or is of other data or another number of clients.

    Example:
        >>> import tempfile
        >>> from lightning_fl.partition import ByLabel
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
                    f"{self.path} gives client {client} the classes {short_repr(written)}, the "
                    f"data {short_repr(found)}: they differ or are in another order; load the "
                    "data that the manifest was written for"
                )
        return parts
