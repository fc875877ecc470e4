"""Names of classes, by which the labels of several data sets are compared and mapped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset

from lightning_fl.datamodules.splits import labels_of
from lightning_fl.datamodules.storage import keys_of
from lightning_fl.errors import FederationError
from lightning_fl.files import short_repr
from lightning_fl.options import is_list


def class_names(data: Any) -> dict[int, str]:
    """Return the name of each label, from ``class_to_idx`` or ``classes``; empty if unknown.

    A ``target_transform`` may change labels, so that the names of its labels are unknown.
    """
    while isinstance(data, Subset):
        data = data.dataset
    if getattr(data, "target_transform", None) is not None:
        return {}
    labels = getattr(data, "class_to_idx", None)
    if isinstance(labels, Mapping):
        return {label: name for name, label in labels.items()}
    names: Any = getattr(data, "classes", None)
    is_names = is_list(names) and all(isinstance(name, str) for name in names)
    # Equal names are those of samples.
    return dict(enumerate(names)) if is_names and len(set(names)) == len(names) else {}


def check_classes(data_sets: Iterable[tuple[str, Any]]) -> None:
    """Check that a label stands for the same class in all data sets whose classes have names.

    Args:
        data_sets: Names for error messages, and data sets or None.

    Raises:
        FederationError: If a label stands for two classes.
    """
    longest, known = "", dict[int, str]()
    for name, data in data_sets:
        names = class_names(data)
        here, there = names.items() - known.items(), known.items() - names.items()
        if here and there:
            raise FederationError(
                f"the labels of {name} are the classes {short_repr(dict(here))}, but those of"
                f" {longest} are {short_repr(dict(there))}: pass classes=, the names of all classes"
                " in the order of their labels"
            )
        if len(names) > len(known):
            longest, known = name, names


def with_classes(data: Any, classes: Sequence[str] | None) -> Any:
    """Return a data set whose labels are the positions of the names of their classes.

    Args:
        data: Map-style data set, or None. If its classes have no names, nothing is changed.
        classes: Names of all classes; None changes nothing.

    Raises:
        FederationError: If a class of the data set is missing.
    """
    names = class_names(data)
    if classes is None or names.items() <= dict(enumerate(classes)).items():
        return data
    if missing := set(names.values()).difference(classes):
        raise FederationError(
            f"classes must have the names of all classes, {sorted(missing)} are missing"
        )
    return Relabeled(data, {label: classes.index(name) for label, name in names.items()}, classes)


class Relabeled(ConcatDataset[Any]):
    """Samples ``(x, ..., label)`` of a data set with other labels.

    Args:
        data: Map-style data set.
        labels: New label of each label.
        classes: Names of the new labels.
    """

    def __init__(self, data: Any, labels: Mapping[int, int], classes: Sequence[str]) -> None:
        super().__init__([data])
        self.labels_by_old, self.classes = labels, list(classes)
        old: Any = labels_of(data)
        old = None if old is None or old.ndim != 1 else old.tolist()
        self.targets = None if old is None else torch.tensor([labels[i] for i in old])
        self.keys, self.key_names = keys_of(data)

    def __getitem__(self, index: int) -> Any:
        *inputs, label = self.datasets[0][index]
        return (*inputs, self.labels_by_old[int(label)])
