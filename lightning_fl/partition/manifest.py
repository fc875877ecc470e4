"""Manifest files, which record a split, and the rule that reproduces a recorded split."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fl.errors import FederationError
from lightning_fl.files import error_context, read_text, short_repr, write_atomically
from lightning_fl.options import check_integer
from lightning_fl.partition.base import Partition, fault_of, joined

FORMAT = "lightning_fl partition 1"


@dataclass(frozen=True)
class Manifest:
    """Record a split and its rule, as a human-readable JSON file.

    Args:
        rule: Class name of the rule.
        parameters: Arguments of the rule's constructor.
        seed: Seed of the generator.
        num_samples: Size ``N`` of the data set, including held-out samples.
        clients: Sample indices of each client, including its local test samples.
        class_counts: Number of samples per class for each client; empty if labels are not integers.
        checksum: `checksum` of the clients and their local test samples.
        local_tests: Indices of the local test samples of each client; empty if there are none.
        unseen_clients: How many of the clients, the last ones, never train.

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
    local_tests: list[list[int]] = field(default_factory=list)
    unseen_clients: int = 0

    @classmethod
    def of(
        cls,
        rule: Partition,
        parts: Sequence[Tensor],
        labels: Tensor,
        seed: int,
        local_tests: Sequence[Tensor] = (),
        unseen_clients: int = 0,
    ) -> Manifest:
        """Record a split.

        Args:
            rule: Rule of the split.
            parts: Sample indices of each client.
            labels: Class of each sample, ``[N]``, even if the rule splits by keys.
            seed: Seed of the rule's generator.
            local_tests: Indices of the local test samples of each client, which are in ``parts``.
            unseen_clients: How many of the clients, the last ones, never train.
        """
        return cls(
            rule=type(rule).__name__,
            # Convert to JSON types, so that the manifest equals the one read from the file.
            parameters=json.loads(json.dumps(rule.parameters(), default=str)),
            seed=seed,
            num_samples=len(labels),
            clients=[part.tolist() for part in parts],
            class_counts=_class_counts(parts, labels),
            checksum=checksum([*parts, *local_tests]),
            local_tests=[part.tolist() for part in local_tests],
            unseen_clients=unseen_clients,
        )

    def write(self, path: str | Path) -> None:
        """Write the file atomically, one line per client."""
        fields = [f'"format": {json.dumps(FORMAT)}']
        names = ("rule", "parameters", "seed", "num_samples", "checksum")
        for name in (*names, *["unseen_clients"] * (self.unseen_clients > 0)):
            fields.append(f'"{name}": {json.dumps(vars(self)[name])}')
        for name in ("class_counts", "clients", "local_tests"):
            if rows := ",\n    ".join(json.dumps(row) for row in vars(self)[name]):
                fields.append(f'"{name}": [\n    {rows}\n  ]')
        write_atomically(path, "{\n  " + ",\n  ".join(fields) + "\n}\n")

    @classmethod
    def read(cls, path: str | Path) -> Manifest:
        """Read a file written by `write`.

        Raises:
            FederationError: If the file is missing, not a manifest, larger than
                `lightning_fl.files.MOST_BYTES`, not a valid split of its samples, or if the
                indices were changed after it was written.
        """
        what = f"partition manifest {path} (restore it, or create it again)"
        with error_context(what, Exception):  # others' files raise errors of many types
            entries = json.loads(read_text(path))
            if not isinstance(entries, dict) or entries.pop("format", None) != FORMAT:
                raise FederationError(f"format must be {FORMAT!r}")
            entries["clients"] = [[int(i) for i in indices] for indices in entries["clients"]]
            counts = entries["class_counts"]
            entries["class_counts"] = [{int(k): int(n) for k, n in row.items()} for row in counts]
            manifest = cls(**entries)
            manifest._check()
            return manifest

    def _check(self) -> None:
        # One tensor: separate tensors for millions of clients would take too much memory.
        lists, count = self.clients + self.local_tests, len(self.clients)
        sizes = torch.tensor([len(indices) for indices in lists])
        samples = torch.tensor([i for indices in lists for i in indices]).long()
        held = samples[: int(sizes[:count].sum())]
        if fault := fault_of(held, sizes[:count], int(self.num_samples)):
            raise FederationError(fault)
        check_integer("unseen_clients", self.unseen_clients, min=0, max=count - 1)
        if _digest(samples, sizes) != self.checksum:
            raise FederationError("the indices were edited, since their checksum differs")
        if (rows := len(self.class_counts)) != count:
            raise FederationError(f"class_counts has {rows} entries for {count} clients")


def checksum(parts: Sequence[Tensor]) -> str:
    """Return the SHA-256 of the clients' sizes followed by their indices, as little-endian int64.

    Args:
        parts: Sample indices of each client; the order matters.

    Returns:
        64 hexadecimal digits, the same on every platform.

    Example:
        >>> checksum([torch.tensor([0, 2]), torch.tensor([1])])[:16]
        '363a551de55f8c05'
    """
    return _digest(*joined(parts))


def _digest(samples: Tensor, sizes: Tensor) -> str:
    numbers = torch.cat([sizes, samples])
    return hashlib.sha256(numbers.numpy().astype("<i8").tobytes()).hexdigest()


def _class_counts(parts: Sequence[Tensor], labels: Tensor) -> list[dict[int, int]]:
    """Return the number of samples per class for each client; empty for non-integer labels."""
    if labels.is_floating_point() or labels.is_complex():
        return [{} for _ in parts]
    labels = labels.cpu().long()
    return [dict(sorted(Counter(labels[part].tolist()).items())) for part in parts]


class FromManifest(Partition):
    """Reproduce the split of a manifest file, after a check that the file matches the data.

    Samples that belong to no client of the manifest are held out for the server's validation. Local
    test samples and unseen clients are those of the manifest, if it has any.

    Args:
        path: File written by `Manifest.write`. It is read when the data is split.

    Raises:
        FederationError: If the file is damaged, or does not match the data or the number of
            clients.

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
        """Return the number of clients of the manifest."""
        return len(Manifest.read(self.path).clients)

    def held_out(self, num_samples: int) -> Tensor | None:
        """Return the samples that no client of the manifest holds."""
        manifest = Manifest.read(self.path)
        self._check("samples", manifest.num_samples, num_samples)
        free = torch.ones(num_samples, dtype=torch.bool)
        free[[index for client in manifest.clients for index in client]] = False
        return free.nonzero()[:, 0]

    def local_tests(self) -> list[Tensor]:
        """Return the local test samples of the clients of the manifest."""
        return [torch.tensor(test).long() for test in Manifest.read(self.path).local_tests]

    def unseen_clients(self) -> int:
        """Return the number of unseen clients of the manifest."""
        return Manifest.read(self.path).unseen_clients

    def _check(self, what: str, theirs: int, ours: int) -> None:
        if theirs != ours:
            raise FederationError(
                f"{self.path} is for {theirs} {what}, but the run has {ours}: use the data and "
                "num_clients of the manifest, or another manifest"
            )

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """See `Partition.split`. `labels` are the labels of the samples that are not held out."""
        manifest = Manifest.read(self.path)
        self._check("clients", len(manifest.clients), num_clients)
        parts = [torch.tensor(indices) for indices in manifest.clients]
        held = torch.cat(parts).sort().values
        self._check("samples that clients hold", len(held), len(labels))
        parts = [torch.searchsorted(held, part) for part in parts]
        # The same samples in another order would silently give another split.
        counts = zip(manifest.class_counts, _class_counts(parts, labels), strict=True)
        for client, (written, found) in enumerate(counts):
            if written and found and written != found:
                raise FederationError(
                    f"{self.path} gives client {client} the classes {short_repr(written)}, but "
                    f"the data gives {short_repr(found)}: the samples differ or are in another "
                    "order; load the data of the manifest"
                )
        return parts
