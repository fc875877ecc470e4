"""Split the training samples between the server, the clients and the steps of a stream."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from lightning_fl.datamodules.storage import keys_of, sample_ids
from lightning_fl.errors import FederationError
from lightning_fl.files import short_repr
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.partition import Partition, checksum
from lightning_fl.partition.base import joined

#: Maximum number of classes that are counted.
MOST_CLASSES = 100_000


@dataclass(frozen=True)
class Split:
    """Hold the indices of the server's and each client's samples, in ascending order.

    Args:
        labels: Label of each training sample, ``[n]``; None if labels are unknown.
        names: Name of each client, the unseen ones last, from the keys of its samples; empty if the
            rule ignores keys.
        held_out: Samples that no client holds.
        parts: Training samples of each client.
        unseen: Samples for fine-tuning of each client that never trains. Their ids follow those of
            the clients that train.
        local_tests: Local test samples of each client, the unseen ones last, disjoint from
            ``parts`` and ``unseen``; empty if there are none.
        stream_steps: Training samples of each client in each step of the stream.
        seed: Seed of the split.
        samples: Checksum of the training samples; see :func:`samples_checksum`.
    """

    labels: Tensor | None = None
    names: list[str] = field(default_factory=list)
    held_out: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    parts: list[Tensor] = field(default_factory=list)
    unseen: list[Tensor] = field(default_factory=list)
    local_tests: list[Tensor] = field(default_factory=list)
    stream_steps: list[list[Tensor]] = field(default_factory=list)
    seed: int = 0
    samples: str = ""

    @property
    def clients(self) -> list[Tensor]:
        """All samples of each client, the unseen ones last, including local test samples."""
        parts = [*self.parts, *self.unseen]
        if not self.local_tests:
            return parts
        pairs = zip(parts, self.local_tests, strict=True)
        return [torch.cat(pair).sort().values for pair in pairs]

    @property
    def checksum(self) -> str:
        """Checksum of the split."""
        return checksum([part for parts in (*self.stream_steps, self.unseen) for part in parts])

    def class_counts(self, parts: list[Tensor]) -> Tensor | None:
        """Return the number of samples of each client and class, ``[num_clients, classes]``.

        Args:
            parts: Samples of each client.

        Returns:
            Counts; None if labels are unknown or not integers from 0 to ``MOST_CLASSES``.
        """
        labels = self.labels
        if labels is None or labels.is_floating_point() or int(labels.min()) < 0:
            return None
        classes = int(labels.max()) + 1
        if classes > MOST_CLASSES:  # numbers that are no classes, such as times
            return None
        samples, sizes = joined(parts)
        cells = torch.arange(len(parts)).repeat_interleave(sizes) * classes + labels[samples]
        return cells.bincount(minlength=len(parts) * classes).view(-1, classes)


def split_samples(data: Any, options: Any, seed: int, tests: list[Tensor]) -> Split:
    """Hold out validation samples and split the rest over clients.

    Args:
        data: Training samples.
        options: The data module, which has the options of the split as attributes.
        seed: Seed of the split.
        tests: Local test samples of each client, the last samples of the data; empty lets the rule
            or ``local_test_size`` choose them.

    Raises:
        FederationError: If an option does not fit the data, or a training sample is held out.
    """
    rule, num_clients, keys = options.partition, options.num_clients, options.keys
    val_size = options.val_size if options.holds_out else 0
    classes = _class_labels(data, options.labels)
    strata = torch.zeros(len(data), dtype=torch.int64) if classes is None else classes
    codes: Tensor | None = None
    key_names: list[str] = []
    if rule.splits_by == "keys":
        codes, key_names = _keys(rule, data, keys)
    else:
        _check_rule(rule, data, keys is not None, classes is not None)
    is_kept = torch.arange(len(data)) < len(data) - sum(map(len, tests))
    codes = None if codes is None else codes[is_kept]
    by = strata[is_kept] if codes is None else codes
    held = _held_out(rule, strata[is_kept], val_size, seed, codes, num_clients)
    by = by[~torch.isin(torch.arange(len(by)), held)]
    is_kept[held] = False
    clients = rule.count_clients(by) if num_clients is None else num_clients
    kept = is_kept.nonzero()[:, 0]
    rows = rule(by, clients, generator(seed, RandomStream.PARTITION))
    names = [_name(by[part].unique(), key_names) for part in rows] if key_names else []
    order, count = _unseen_last(rule, options.unseen_clients, names, len(rows), seed)
    samples, sizes = joined([rows[client] for client in order])
    del rows  # a million tensors take a gigabyte
    parts = list(kept[samples].split(sizes.tolist()))
    tests = tests or rule.local_tests()
    names, tests = [names[i] for i in order if names], [tests[i] for i in order if tests]
    if codes is not None:
        for client in range(count, len(parts)):  # the server validates on no unseen client
            theirs = torch.isin(codes[held], codes[parts[client]])
            parts[client] = torch.cat([parts[client], held[theirs]]).sort().values
            held = held[~theirs]
    if tests:
        pairs = zip(parts, tests, strict=True)
        parts = [part[~torch.isin(part, test)] for part, test in pairs]
    else:
        parts, tests = _local_tests(parts, strata, options.local_test_size, seed)
    _check_apart(data, parts, [held, *tests])
    parts, unseen = parts[:count], parts[count:]
    steps, known = _in_steps(parts, options.stream_steps, seed), samples_checksum(data, classes)
    return Split(classes, names, held, parts, unseen, tests, steps, seed, known)


def _check_rule(rule: Partition, data: Any, has_keys: bool, has_classes: bool) -> None:
    """Check that a rule that does not split by keys has what it reads."""
    if has_keys:
        raise FederationError(
            f"{type(rule).__name__} does not read keys: leave them out, or set partition=Natural()"
        )
    if rule.splits_by == "labels" and not has_classes:
        raise FederationError(
            f"{type(rule).__name__} needs a label for each training sample, but"
            f" {type(data).__name__} has none that are numbers (targets or labels): pass labels="
        )


def labels_of(data: Any) -> Tensor | None:
    """Return the labels of a data set (``targets``, ``labels`` or the last tensor), or None."""
    if isinstance(data, Subset):
        labels = labels_of(data.dataset)
        return None if labels is None else labels[torch.as_tensor(data.indices)]
    for name in ("targets", "labels"):
        if (labels := _numbers(getattr(data, name, None))) is not None:
            return labels
    return data.tensors[-1] if isinstance(data, TensorDataset) else None


def samples_checksum(data: Any, labels: Tensor | None) -> str:
    """Return a checksum of the labels and the ``sample_ids`` of samples, in order.

    It tells whether samples have the same indices as before, as far as that is known without
    reading them.

    Args:
        data: Training samples.
        labels: Their labels; None if labels are unknown.
    """
    digest = hashlib.sha256(str(len(data)).encode())
    for values in (labels, sample_ids(data)):
        if values is not None:
            exact = values.double() if values.is_floating_point() else values
            digest.update(exact.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def _class_labels(data: Any, given: Sequence[int] | None) -> Tensor | None:
    """Return one number per training sample, ``[n]``: given labels or those of the data set."""
    n, labels = len(data), labels_of(data) if given is None else _numbers(given)
    if labels is not None and labels.shape == (n,) and not labels.is_complex():
        return labels.cpu() if labels.is_floating_point() else labels.cpu().long()
    if given is not None:
        got = "none" if labels is None else f"shape {tuple(labels.shape)} of {labels.dtype}"
        raise FederationError(
            f"labels must have one number for each of the {n} training samples, got {got}: number"
            " the classes from 0, for example with np.unique(labels, return_inverse=True)"
        )
    return None


def _numbers(values: Any) -> Tensor | None:
    """Return values as a tensor; None if they are not numeric, such as names or methods."""
    try:
        if hasattr(values, "__array__") and not isinstance(values, Tensor):
            # torch would read a pandas Series by its index, and knows no reversed arrays.
            array = np.asarray(values)
            values = array.astype(array.dtype.newbyteorder("="), order="C")
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        return None


def _keys(rule: Partition, data: Any, keys: Any) -> tuple[Tensor, list[str]]:
    """Return the key of each sample, ``[n]``, as an index into the names of the keys."""
    n, key_names = len(data), None
    if keys is None:
        keys, key_names = keys_of(data)
    # As objects, because numpy would make texts of None, NaN and numbers among texts.
    objects = np.asarray([] if keys is None else keys, dtype=object)
    each = objects.ravel().tolist()
    is_missing = any(key is None or key != key for key in each)
    if objects.shape != (n,) or is_missing or len({type(key) for key in each}) > 1:
        raise FederationError(
            f"{type(rule).__name__} needs a key for each of the {n} training samples, all of one"
            f" type and none None or NaN, got {short_repr(each)}: pass keys="
        )
    distinct, codes = np.unique(np.asarray(each), return_inverse=True)
    names = [str(key) if key_names is None else key_names[key] for key in distinct.tolist()]
    return torch.as_tensor(codes), names


def _name(keys: Tensor, names: Sequence[str]) -> str:
    """Return the name of a client with these keys."""
    others = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"{names[int(keys[0])]}{others}"


def hold_out(labels: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Split indices into kept and held-out samples, stratified by label.

    Args:
        labels: Label of each sample, ``[n]``.
        count: Number of samples to hold out.
        generator: Random generator of the choice.

    Example:
        >>> kept, held = hold_out(torch.tensor([0] * 8 + [1] * 4), 3, torch.Generator())
        >>> len(kept), sorted((held >= 8).tolist())
        (9, [False, False, True])
    """
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]
    # Every n/count-th sample in the order of labels: the count of each label is its share, rounded
    # up or down.
    at = ((torch.arange(count, dtype=torch.float64) + 0.5) * len(labels) / count).long()
    mask = torch.ones(len(labels), dtype=torch.bool)
    mask[at] = False
    return order[mask].sort().values, order[~mask].sort().values


def _held_out(
    rule: Partition,
    labels: Tensor,
    val_size: int | float,
    seed: int,
    keys: Tensor | None,
    num_clients: int | None,
) -> Tensor:
    """Return the samples that no client holds: those of the rule, or else ``val_size``.

    If clients would lose all samples, one sample of each key is kept, at random.
    """
    n = len(labels)
    if (held := rule.held_out(n)) is not None:
        return held
    count = round(val_size * n) if isinstance(val_size, float) else val_size
    if count >= n or (val_size and not count):
        raise FederationError(
            f"val_size={val_size} holds out {count} of {n} training samples: set it to 0 to train"
            " without validation, or to a number of samples"
        )
    random = generator(seed, RandomStream.HOLD_OUT)
    kept, held = hold_out(labels, count, random)
    if keys is None or len(keys[kept].unique()) >= (num_clients or len(keys.unique())):
        return held
    free = _all_but_one(keys, random)
    if count > len(free):
        raise FederationError(
            f"val_size={val_size} holds out {count} of {n} samples, but {n - len(free)} clients"
            f" need at least one each: lower val_size to at most {len(free)} samples, or pass val"
        )
    return free[hold_out(labels[free], count, random)[1]]


def _unseen_last(
    rule: Partition, unseen: float | Sequence[str], names: list[str], count: int, seed: int
) -> tuple[list[int], int]:
    """Return the clients, those that never train last, and the number of those that train."""
    if last := rule.unseen_clients():
        return list(range(count)), count - last
    if isinstance(unseen, float | int):
        random = generator(seed, RandomStream.UNSEEN)
        last = max(round(unseen * count), unseen > 0)
        chosen = set(torch.randperm(count, generator=random)[:last].tolist())
    else:
        known = {name: i for i, name in enumerate(names or map(str, range(count)))}
        if wrong := [name for name in unseen if name not in known]:
            raise FederationError(
                f"unseen_clients has {wrong[0]!r}, and the clients are"
                f" {short_repr(list(known))}: name some of these, or give a share such as 0.2"
            )
        chosen = {known[name] for name in unseen}
    if len(chosen) >= count:
        raise FederationError(
            f"unseen_clients={unseen} leaves none of {count} clients to train: lower it"
        )
    return sorted(range(count), key=lambda client: client in chosen), count - len(chosen)


def _all_but_one(keys: Tensor, generator: torch.Generator) -> Tensor:
    """Return the indices of all samples but a random one of each key."""
    order = torch.randperm(len(keys), generator=generator)
    _, first = np.unique(keys[order].numpy(), return_index=True)
    is_free = torch.ones(len(keys), dtype=torch.bool)
    is_free[order[torch.as_tensor(first)]] = False
    return is_free.nonzero()[:, 0]


def _local_tests(
    parts: list[Tensor], labels: Tensor, fraction: float, seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Split the samples of each client into training samples and local test samples."""
    if not fraction:
        return parts, []
    _check_sizes(parts, 2, f"local_test_size={fraction}")
    kept, tests = [], []
    for client, part in enumerate(parts):
        count = min(max(1, round(fraction * len(part))), len(part) - 1)
        train, test = hold_out(
            labels[part], count, generator(seed, RandomStream.LOCAL_TEST, client)
        )
        kept.append(part[train])
        tests.append(part[test])
    return kept, tests


def _check_apart(data: Any, parts: list[Tensor], others: list[Tensor]) -> None:
    """Refuse a held-out sample on which a client trains in another row."""
    ids, out, rows = sample_ids(data), torch.cat(others), torch.cat(parts)
    if len(both := out[torch.isin(ids[out], ids[rows])]):
        raise FederationError(
            f"row {both[0]} is held out, but another row with the same sample is for training: hold"
            " out samples yourself, with val_size=0 and local_test_size=0, and pass them as val or"
            " as test sets of clients"
        )


def _in_steps(parts: list[Tensor], stream_steps: int, seed: int) -> list[list[Tensor]]:
    """Return the samples of each client in each step of a stream."""
    if stream_steps == 1:
        return [parts]
    _check_sizes(parts, stream_steps, f"stream_steps={stream_steps}")
    clients = []
    for client, part in enumerate(parts):
        random = generator(seed, RandomStream.ARRIVALS, client)
        order = part[torch.randperm(len(part), generator=random)]
        clients.append([chunk.sort().values for chunk in order.tensor_split(stream_steps)])
    return [list(step) for step in zip(*clients, strict=True)]


def _check_sizes(parts: list[Tensor], least: int, option: str) -> None:
    for client, part in enumerate(parts):
        if len(part) < least:
            raise FederationError(
                f"{option} needs at least {least} samples per client, but client {client} has"
                f" {len(part)}: leave out the option, or raise min_size of the partition"
            )
