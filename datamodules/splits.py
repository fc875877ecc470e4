"""Split the training samples between the server, the clients and the steps of a stream."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset, TensorDataset

from lightning_fl.datamodules.storage import InMemory, keys_of
from lightning_fl.functional.randomness import RandomStream, generator, seeded_rng
from lightning_fl.partition import Manifest, Natural, Partition, checksum
from lightning_fl.runners.samples import copied
from lightning_fl.runners.tensors import is_equal
from lightning_fl.types import FederationError

#: Maximum number of classes that are counted.
MOST_CLASSES = 100_000


@dataclass(frozen=True)
class Split:
    """Hold the indices of the server's and each client's samples, in ascending order.

    Args:
        labels: Label of each training sample, ``[n]``; None if labels are unknown.
        names: Name of each client, from the keys of its samples; empty if the rule ignores keys.
        held_out: Samples that no client holds.
        parts: Training samples of each client.
        local_tests: Local test samples of each client, disjoint from ``parts``; empty if there are
            none.
        stream_steps: Training samples of each client in each step of the stream.
        seed: Seed of the split.
        samples: Checksum of the training samples; see :func:`samples_checksum`.
    """

    labels: Tensor | None = None
    names: list[str] = field(default_factory=list)
    held_out: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    parts: list[Tensor] = field(default_factory=list)
    local_tests: list[Tensor] = field(default_factory=list)
    stream_steps: list[list[Tensor]] = field(default_factory=list)
    seed: int = 0
    samples: str = ""

    @property
    def clients(self) -> list[Tensor]:
        """All samples of each client, including its local test samples."""
        if not self.local_tests:
            return self.parts
        pairs = zip(self.parts, self.local_tests, strict=True)
        return [torch.cat(pair).sort().values for pair in pairs]

    @property
    def checksum(self) -> str:
        """Checksum of the split."""
        return checksum([part for parts in self.stream_steps for part in parts])

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
        return torch.stack([labels[part].bincount(minlength=classes) for part in parts])

    def manifest(self, rule: Partition, n: int) -> Manifest:
        """Return the manifest of the split.

        Args:
            rule: Rule of the split.
            n: Number of training samples.
        """
        # Float labels stand for unknown classes.
        labels = torch.zeros(n) if self.labels is None else self.labels
        # Including local test samples: a run with this manifest splits them off again.
        return Manifest.of(rule, self.clients, labels, self.seed)


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
        data: Training samples.
        rule: Rule of the split.
        num_clients: Number of clients; None if the rule determines it.
        labels: Labels that replace those of the data set.
        keys: Keys that replace those of the data set.
        val_size: Fraction or number of samples to hold out.
        local_test_size: Fraction of each client's samples to hold out as local test samples.
        stream_steps: Number of steps of the stream.
        seed: Seed of the split.

    Raises:
        FederationError: If an option does not fit the data.
    """
    classes = _class_labels(data, labels)
    strata = torch.zeros(len(data)) if classes is None else classes
    if rule.splits_by == "labels" and labels is None and classes is not None:
        _warn_of_no_classes(data, classes, rule)
    by, key_names = _split_by(rule, data, classes, keys)
    required = by if rule.splits_by == "keys" else None
    held = _held_out(rule, strata, val_size, seed, required, num_clients)
    is_kept = torch.ones(len(data), dtype=torch.bool)
    is_kept[held] = False
    by = by[is_kept]
    clients = rule.count_clients(by) if num_clients is None else num_clients
    if key_names and isinstance(rule, Natural) and clients < (count := len(by.unique())):
        rank_zero_info(
            f"The {count} keys of the training samples are assigned to {clients} clients. For one"
            " client per key, set num_clients=None"
        )
    kept = is_kept.nonzero()[:, 0]
    rows = rule(by, clients, generator(seed, RandomStream.PARTITION))
    names = [_name(by[part].unique(), key_names) for part in rows] if key_names else []
    parts, tests = _local_tests([kept[part] for part in rows], strata, local_test_size, seed)
    steps, samples = _in_steps(parts, stream_steps, seed), samples_checksum(data, classes)
    return Split(classes, names, held, parts, tests, steps, seed, samples)


def labels_of(data: Any) -> Tensor | None:
    """Return the labels of a data set (``targets``, ``labels`` or the last tensor), or None."""
    if isinstance(data, Subset):
        labels = labels_of(data.dataset)
        return None if labels is None else labels[torch.as_tensor(data.indices)]
    if isinstance(data, TensorDataset):
        return data.tensors[-1]
    for name in ("targets", "labels"):
        if (labels := _numbers(getattr(data, name, None))) is not None:
            return labels
    return None


def samples_checksum(data: Any, labels: Tensor | None) -> str:
    """Return a checksum of the labels of samples, and of the indices of a ``Subset``, in order.

    It tells whether samples have the same indices as before, as far as that is known without
    reading them.

    Args:
        data: Training samples.
        labels: Their labels; None if labels are unknown.
    """
    digest = hashlib.sha256(str(len(data)).encode())
    known, part = [labels], data
    while isinstance(part, Subset):
        known.append(torch.as_tensor(part.indices))
        part = part.dataset
    if isinstance(part, InMemory) and part.indices is not None:
        known.append(torch.as_tensor(part.indices))
    for values in known:
        if values is not None and values.layout == torch.strided:
            exact = values.double() if values.is_floating_point() else values
            digest.update(exact.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def warn_of_other_labels(data: Any, labels: Tensor) -> None:
    """Warn if labels are not those of the samples. A few samples are read.

    Args:
        data: Training samples.
        labels: Label of each training sample, from the data set as a whole.
    """
    for index in torch.linspace(0, len(labels) - 1, 5).long().unique().tolist():
        label = _label_of_sample(data, index)
        if label is not None and label != labels[index]:
            rank_zero_warn(
                f"sample {index} has the label {label}, but the labels of {type(data).__name__} as"
                f" a whole (targets or labels) have {labels[index]}, as before a target_transform."
                f" The split and class counts use them; if they are wrong, {remedy(data, 'labels')}"
            )
            return


def _warn_of_no_classes(data: Any, labels: Tensor, rule: Partition) -> None:
    """Warn if the labels of a data set number its samples, as the last tensor may do."""
    n = len(labels)
    if n > 2 and len(labels.unique()) == n:
        source = "last tensor" if isinstance(data, TensorDataset) else "targets or labels"
        rank_zero_warn(
            f"{type(rule).__name__} splits the samples by class, but each of the {n} training"
            f" samples has a label of its own in the {source} of {type(data).__name__}: if these"
            f" are not the classes, {remedy(data, 'labels')}"
        )


def read_sample(data: Any, index: int) -> Any:
    """Return a sample, without a change of the global random generators.

    Args:
        data: Map-style data set.
        index: Index of the sample.
    """
    with seeded_rng(0):  # transforms may draw random numbers
        return data[index]


def warn_of_own_random_numbers(data: Any) -> None:
    """Warn if a sample changes when it is read again with the same seeds. A few samples are read.

    Args:
        data: Training samples.
    """
    if isinstance(data, InMemory):
        return
    for index in torch.linspace(0, len(data) - 1, 3).long().unique().tolist():
        try:
            first = copied(tree_leaves(read_sample(data, index)))  # a transform may write to it
            second = tree_leaves(read_sample(data, index))
            is_same = len(first) == len(second) and all(map(_is_same, first, second))
        except Exception:  # of a user's data set: the fit reads it, too, and reports the error
            return
        if not is_same:
            rank_zero_warn(
                f"sample {index} of {type(data).__name__} is another one when it is read again with"
                " the same seeds: the data set has a random generator, or another state, of its"
                " own. Results depend on the order of clients and on num_workers, and a resumed run"
                " differs. Draw from the global generators of torch, NumPy or Python, which are"
                " seeded for each batch, or seed its generator from them for each sample"
            )
            return


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two leaves of a sample are equal. Those of unknown types count as equal."""
    if isinstance(a, np.generic | np.ndarray) and a.dtype.kind in "biufc":
        a, b = torch.as_tensor(np.array(a)), torch.as_tensor(np.array(b))
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and is_equal([a], [b])
    return not isinstance(a, str | bytes | int | float) or a == b or (a != a and b != b)


def _label_of_sample(data: Any, index: int) -> int | None:
    """Return the label of a sample; None if it is not the integer of a pair."""
    try:
        sample = read_sample(data, index)
    except Exception:  # of a user's data set: the fit reads it, too, and reports the error
        return None
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        return None
    label = sample[1]
    if isinstance(label, Tensor | np.generic) and label.ndim == 0:
        label = label.item()
    return int(label) if isinstance(label, int) else None


def remedy(data: Any, option: str) -> str:
    """Return how to provide the labels or keys of a data set, for error messages.

    Args:
        data: Training samples. The attribute ``remedies`` has other advice than the option.
        option: ``labels`` or ``keys``.
    """
    while isinstance(data, Subset):
        data = data.dataset
    remedies: dict[str, str] = getattr(data, "remedies", {})
    return remedies.get(option, f"pass {option}=")


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


def _split_by(
    rule: Partition, data: Any, labels: Tensor | None, keys: Sequence[int | str] | None
) -> tuple[Tensor, Sequence[str]]:
    """Return the rule's input, ``[n]``: keys, labels, or zeros for rules that ignore it.

    Also return the names of the keys, if the rule splits by keys. A data set whose ``keys`` are
    indices has their names in ``key_names``.
    """
    n, name = len(data), type(rule).__name__
    if rule.splits_by == "keys":
        key_names = None
        if keys is None:
            keys, key_names = keys_of(data)
        if keys is None:
            advice = remedy(data, "keys")
            raise FederationError(f"{name} needs a key for each training sample: {advice}")
        distinct, codes = _distinct(keys, name)
        by = torch.as_tensor(codes)
        if by.shape != (n,):
            raise FederationError(
                f"{name} needs one key for each of the {n} training samples, got {tuple(by.shape)}"
            )
        if key_names is not None:
            return by, [key_names[key] for key in distinct.tolist()]
        return by, [str(key) for key in distinct.tolist()]
    if keys is not None:
        rank_zero_warn(
            f"keys has no effect, since {name} does not read it: for one client per key, set"
            " partition=Natural()"
        )
    if labels is None and rule.splits_by == "labels":
        raise FederationError(
            f"{name} needs a label for each training sample, but {type(data).__name__} has"
            f" neither targets nor labels (one number per sample): {remedy(data, 'labels')}"
        )
    return (torch.zeros(n, dtype=torch.int64) if labels is None else labels), []


def _distinct(keys: Any, rule: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the distinct keys, ascending, and each sample's index into them.

    Keys may be names or numbers.

    Raises:
        FederationError: If a sample has no key, or keys cannot be sorted.
    """
    values = np.asarray(keys)
    # numpy makes names of the None and NaN of a list.
    each: Any = keys if isinstance(keys, list | tuple) else list(values.flat)
    if values.dtype.kind in "OUSfM" and (missing := sum(map(_is_missing, each))):
        raise FederationError(
            f"{rule} needs a key for each training sample, but {missing} of {len(values)} keys are"
            " missing (None or NaN): remove these samples, or give them a key"
        )
    kinds = sorted({type(key).__name__ for key in each}) if values.dtype.kind in "OU" else []
    try:
        if values.dtype.kind == "U" and len(kinds) > 1:  # numpy has made names of numbers
            raise TypeError
        return np.unique(values, return_inverse=True)
    except TypeError as error:
        raise FederationError(
            f"{rule} sorts clients by their keys, but keys of the types {', '.join(kinds)} cannot"
            " be sorted: make all of them names or numbers"
        ) from error


def _is_missing(key: Any) -> bool:
    try:
        return key is None or bool(key != key)
    except (TypeError, ValueError):  # pandas' NA; a key that is an array
        return not isinstance(key, np.ndarray | Tensor)


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
    if count >= n:
        raise FederationError(
            f"val_size={val_size} holds out all {n} training samples: lower val_size"
        )
    if val_size and not count:
        rank_zero_warn(
            f"val_size={val_size} holds out none of {n} samples: raise it, or set it to 0 to train"
            " without validation"
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
    kept, tests = [], []
    for client, part in enumerate(parts):
        if len(part) < 2:
            raise FederationError(
                f"local_test_size={fraction} needs at least 2 samples per client, but client"
                f" {client} has 1: raise min_size of the partition, or set local_test_size to 0"
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
                f"stream_steps={stream_steps} needs at least {stream_steps} samples per client, but"
                f" client {client} has {len(part)}: lower stream_steps, or raise min_size of the"
                " partition"
            )
        random = generator(seed, RandomStream.ARRIVALS, client)
        order = part[torch.randperm(len(part), generator=random)]
        clients.append([chunk.sort().values for chunk in order.tensor_split(stream_steps)])
    return [list(step) for step in zip(*clients, strict=True)]
