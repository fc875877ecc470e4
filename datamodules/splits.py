"""Which training samples are the server's, a client's, or a client's in a step of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.partition import Manifest, Partition, checksum
from lightning_fl.types import FederationError


@dataclass(frozen=True)
class Split:
    """Indices of the training samples that the server and each client hold, in ascending order.

    Args:
        labels: Label of each training sample, ``[n]``; None if labels are unknown.
        held_out: Samples that no client holds.
        parts: Training samples of each client.
        local_tests: Each client's own test samples, which are in no part; empty if there are none.
        stream_steps: Training samples of each client in each step of a stream.
    """

    labels: Tensor | None = None
    held_out: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    parts: list[Tensor] = field(default_factory=list)
    local_tests: list[Tensor] = field(default_factory=list)
    stream_steps: list[list[Tensor]] = field(default_factory=list)

    @property
    def clients(self) -> list[Tensor]:
        """All samples of each client, its own test samples too."""
        if not self.local_tests:
            return self.parts
        pairs = zip(self.parts, self.local_tests, strict=True)
        return [torch.cat(pair).sort().values for pair in pairs]

    @property
    def checksum(self) -> str:
        """A digest of the split."""
        return checksum([part for parts in self.stream_steps for part in parts])

    def class_counts(self, parts: list[Tensor]) -> Tensor | None:
        """Return the number of samples of each client and class, ``[num_clients, classes]``.

        Args:
            parts: Samples of each client.

        Returns:
            The counts; None if labels are unknown or no numbers from 0 up.
        """
        labels = self.labels
        if labels is None or labels.is_floating_point() or int(labels.min()) < 0:
            return None
        classes = int(labels.max()) + 1
        return torch.stack([labels[part].bincount(minlength=classes) for part in parts])

    def manifest(self, rule: Partition, n: int, seed: int) -> Manifest:
        """Describe the split.

        Args:
            rule: The rule that made it.
            n: Number of training samples.
            seed: Seed of the split.
        """
        labels = torch.zeros(n) if self.labels is None else self.labels  # floating: no classes
        # With the test samples: a run with the manifest splits them off again.
        return Manifest.of(rule, self.clients, labels, seed)


def split_samples(
    data: Any,
    rule: Partition,
    num_clients: int | None,
    *,
    labels: Sequence[int] | None,
    keys: Sequence[int | str] | None,
    val_size: int | float,
    local_test_size: float,
    stream_steps: int,
    seed: int,
) -> Split:
    """Hold out validation samples and split the rest over clients.

    Args:
        data: The training samples.
        rule: The rule that splits.
        num_clients: Number of clients; None asks the rule.
        labels: Labels that replace those of the data set.
        keys: Keys that replace those of the data set.
        val_size: Fraction or number of samples to hold out.
        local_test_size: Fraction of each client's samples that are its own test samples.
        stream_steps: Number of steps of the stream.
        seed: Seed of the split.

    Raises:
        FederationError: If an option does not fit the data.
    """
    classes = _class_labels(data, labels)
    strata = torch.zeros(len(data)) if classes is None else classes
    held = _held_out(rule, strata, val_size, seed)
    is_kept = torch.ones(len(data), dtype=torch.bool)
    is_kept[held] = False
    by = _split_by(rule, data, classes, keys)[is_kept]
    clients = rule.count_clients(by) if num_clients is None else num_clients
    kept = is_kept.nonzero()[:, 0]
    parts = [kept[part] for part in rule(by, clients, generator(seed, RandomStream.PARTITION))]
    parts, tests = _local_tests(parts, strata, local_test_size, seed)
    return Split(classes, held, parts, tests, _in_steps(parts, stream_steps, seed))


def labels_of(data: Any) -> Tensor | None:
    """Return the labels that a data set provides (``targets``, ``labels``, last tensor)."""
    if isinstance(data, Subset):
        labels = labels_of(data.dataset)
        return None if labels is None else labels[torch.as_tensor(data.indices)]
    if isinstance(data, TensorDataset):
        return data.tensors[-1]
    for name in ("targets", "labels"):
        if (labels := _numbers(getattr(data, name, None))) is not None:
            return labels
    return None


def _class_labels(data: Any, given: Sequence[int] | None) -> Tensor | None:
    """Return one number per training sample, ``[n]``: the given, or those of the data set."""
    n, labels = len(data), labels_of(data) if given is None else _numbers(given)
    if labels is not None and labels.shape == (n,):
        return labels
    if given is not None:
        got = "none" if labels is None else f"shape {tuple(labels.shape)}"
        raise FederationError(
            f"labels must be one number for each of the {n} training samples, got {got}"
        )
    return None


def _numbers(values: Any) -> Tensor | None:
    """Return values as a tensor; None for names, boxes, methods and the like."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        return None


def _split_by(
    rule: Partition, data: Any, labels: Tensor | None, keys: Sequence[int | str] | None
) -> Tensor:
    """Return what the rule splits by, ``[n]``: keys, labels, or values that it ignores."""
    n, name = len(data), type(rule).__name__
    if rule.splits_by == "keys":
        keys = getattr(data, "keys", None) if keys is None else keys
        if keys is None or callable(keys):
            raise FederationError(f"{name} needs a key for each training sample: pass keys=")
        # Names and numbers alike: clients come in ascending order of their keys.
        by = torch.as_tensor(np.unique(np.asarray(keys), return_inverse=True)[1])
        if by.shape != (n,):
            raise FederationError(
                f"{name} needs one key for each of the {n} training samples, got {tuple(by.shape)}"
            )
        return by
    if labels is None and rule.splits_by == "labels":
        raise FederationError(
            f"{name} needs a label for each training sample, and {type(data).__name__} has"
            " neither targets nor labels (one number a sample): pass labels="
        )
    return torch.zeros(n, dtype=torch.int64) if labels is None else labels


def hold_out(labels: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Split indices into (kept, held out); the held-out ones have the labels' proportions.

    Args:
        labels: Label of each sample, ``[n]``.
        count: Number of samples to hold out.
        generator: Source of the choice.

    Example:
        >>> kept, held = hold_out(torch.tensor([0] * 8 + [1] * 4), 3, torch.Generator())
        >>> len(kept), sorted((held >= 8).tolist())
        (9, [False, False, True])
    """
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]
    # Sorted by label, every n/count-th sample: each label gets its share, rounded up or down.
    at = ((torch.arange(count, dtype=torch.float64) + 0.5) * len(labels) / count).long()
    mask = torch.ones(len(labels), dtype=torch.bool)
    mask[at] = False
    return order[mask].sort().values, order[~mask].sort().values


def _held_out(rule: Partition, labels: Tensor, val_size: int | float, seed: int) -> Tensor:
    """Return the samples that no client holds: those that the rule leaves out, else a part."""
    n = len(labels)
    if (held := rule.held_out(n)) is not None:
        return held
    count = round(val_size * n) if isinstance(val_size, float) else val_size
    if count >= n:
        raise FederationError(
            f"val_size={val_size} holds out all of the {n} training samples: lower it"
        )
    return hold_out(labels, count, generator(seed, RandomStream.HOLD_OUT))[1]


def _local_tests(
    parts: list[Tensor], labels: Tensor, fraction: float, seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Split the samples of each client into training samples and its own test samples."""
    if not fraction:
        return parts, []
    kept, tests = [], []
    for client, part in enumerate(parts):
        if len(part) < 2:
            raise FederationError(
                f"local_test_size={fraction}, but client {client} has one sample alone: give every"
                " client two or more (min_size of a partition), or set it to 0"
            )
        count = min(max(1, round(fraction * len(part))), len(part) - 1)
        train, test = hold_out(
            labels[part], count, generator(seed, RandomStream.LOCAL_TEST, client)
        )
        kept.append(part[train])
        tests.append(part[test])
    return kept, tests


def _in_steps(parts: list[Tensor], stream_steps: int, seed: int) -> list[list[Tensor]]:
    """Return the samples of each client in each step of a stream."""
    if stream_steps == 1:
        return [parts]
    clients = []
    for client, part in enumerate(parts):
        if len(part) < stream_steps:
            raise FederationError(
                f"stream_steps={stream_steps}, but client {client} has {len(part)} samples, less"
                " than one for each step: lower it, or give every client more (min_size of a"
                " partition)"
            )
        random = generator(seed, RandomStream.ARRIVALS, client)
        order = part[torch.randperm(len(part), generator=random)]
        clients.append([chunk.sort().values for chunk in order.tensor_split(stream_steps)])
    return [list(step) for step in zip(*clients, strict=True)]
