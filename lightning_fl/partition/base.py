"""Base class of partition rules, and helpers that the rules share."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fl.errors import FederationError
from lightning_fl.options import check_integer


class Partition(ABC):
    """Base class of rules that split the samples of a data set over clients.

    Subclasses implement `split`. The constructor must store each argument as an attribute of the
    same name, because `parameters`, `repr` and the manifest read them.

    Example:
        >>> class Halves(Partition):
        ...     def split(self, labels, num_clients, generator):
        ...         return list(torch.arange(len(labels)).tensor_split(num_clients))
        >>> Halves()(torch.zeros(5), num_clients=2, generator=torch.Generator())
        [tensor([0, 1, 2]), tensor([3, 4])]
    """

    splits_by: Literal["labels", "keys", "samples"] = "labels"
    """Input of the rule: classes, keys (such as speakers), or any values, one per sample."""

    @abstractmethod
    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """Assign every sample to one client, in any order. `__call__` has validated the input.

        Args:
            labels: Class (or key, see `splits_by`) of each sample, ``[N]``.
            num_clients: Number of clients, from 1 to ``N``.
            generator: CPU generator, the only source of randomness.
        """

    def __call__(
        self, labels: Tensor, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        """Split the samples into disjoint, non-empty parts that cover all samples.

        Args:
            labels: Class (or key, see `splits_by`) of each sample, ``[N]``.
            num_clients: Number of clients, from 1 to ``N``.
            generator: CPU generator; the same state gives the same split.

        Returns:
            One int64 tensor of ascending sample indices per client.

        Raises:
            FederationError: If the input or the rule's parameters do not allow such a split.
        """
        if labels.ndim != 1:
            raise FederationError(
                "labels must be a tensor with one number per sample, [N], got shape "
                f"{tuple(labels.shape)}: pass argmax(1) of one-hot labels"
            )
        hint = "each client needs a sample"
        check_integer("num_clients", num_clients, min=1, max=len(labels), hint=hint)
        samples, sizes = joined(self.split(labels.cpu(), num_clients, generator))
        fault: str | None = f"it returns {len(sizes)} clients"
        if len(sizes) == num_clients:
            fault = fault_of(samples, sizes, len(labels), complete=True)
        if fault:
            raise FederationError(
                f"{self!r} cannot split {len(labels)} samples over {num_clients} clients: {fault}; "
                "use fewer clients, other parameters, or a rule with min_size (Dirichlet)"
            )
        owner = torch.arange(num_clients).repeat_interleave(sizes)
        samples = samples[(owner * len(labels) + samples).argsort()]
        return list(samples.split(sizes.tolist()))

    def count_clients(self, labels: Tensor) -> int:
        """Return the number of clients, for rules that determine it.

        Raises:
            FederationError: If the rule does not determine it, as for most rules.
        """
        raise FederationError(
            f"{type(self).__name__} does not determine the number of clients: set num_clients"
        )

    def held_out(self, num_samples: int) -> Tensor | None:
        """Return the samples to hold out; None lets the data module choose them."""
        return None

    def local_tests(self) -> list[Tensor]:
        """Return the local test samples of each client; none lets the data module choose them."""
        return []

    def unseen_clients(self) -> int:
        """Return how many clients, the last ones, never train; 0 lets the data module choose."""
        return 0

    def parameters(self) -> dict[str, Any]:
        """Return the arguments of the constructor by name."""
        return {name: vars(self)[name] for name in inspect.signature(type(self)).parameters}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.parameters().items())
        return f"{type(self).__name__}({arguments})"


def joined(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the samples of clients in one tensor, ``[n]``, and their numbers, ``[clients]``.

    A million clients take seconds one by one.
    """
    sizes = torch.tensor([part.shape[0] for part in parts], dtype=torch.int64)
    return torch.cat([torch.zeros(0, dtype=torch.int64), *parts]), sizes


def classes_of(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct labels, ascending, [C], each sample's index into them [N], counts [C]."""
    if labels.is_floating_point() or labels.is_complex():
        raise FederationError(
            f"this rule needs integer labels, got {labels.dtype}: pass integer class labels "
            "(or keys), or use IID or QuantitySkew"
        )
    classes, codes, sizes = labels.unique(return_inverse=True, return_counts=True)
    return classes, codes, sizes


def fault_of(
    samples: Tensor, sizes: Tensor, num_samples: int, complete: bool = False
) -> str | None:
    """Return why the concatenated samples of clients are no valid split; None if they are one."""
    if not len(sizes):
        return "there are no clients"
    if not sizes.all():
        return f"client {sizes.tolist().index(0)} gets no sample"
    samples, position = samples.sort()
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)[position]
    if (outside := (samples < 0) | (samples >= num_samples)).any():
        return (
            f"client {owner[outside][0]} gets sample {samples[outside][0]}, "
            f"which is not in [0, {num_samples - 1}]"
        )
    if (twice := samples[1:] == samples[:-1]).any():
        i = int(twice.nonzero()[0])
        a, b = sorted(owner[i : i + 2].tolist())
        return f"sample {samples[i]} is assigned to client {a} and to client {b}"
    if complete and len(samples) < num_samples:
        gap = (samples != torch.arange(len(samples))).nonzero()
        return f"sample {int(gap[0]) if len(gap) else len(samples)} is assigned to no client"
    return None
