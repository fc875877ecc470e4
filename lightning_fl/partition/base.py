"""Base class of partition rules, and helpers that the rules share."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
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
        hint = "each client needs a sample"
        check_integer("num_clients", num_clients, min=1, max=len(labels), hint=hint)
        parts = [part.sort().values for part in self.split(labels.cpu(), num_clients, generator)]
        are_clients = len(parts) == num_clients and all(map(len, parts))
        if not are_clients or not torch.cat(parts).sort().values.equal(torch.arange(len(labels))):
            raise FederationError(
                f"{self!r} cannot split {len(labels)} samples over {num_clients} clients so that"
                " each sample has one client and each client a sample: use fewer clients, other"
                " parameters, or a rule with min_size (Dirichlet)"
            )
        return parts

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


def classes_of(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct labels, ascending, [C], each sample's index into them [N], counts [C]."""
    classes, codes, sizes = labels.unique(return_inverse=True, return_counts=True)
    return classes, codes, sizes
