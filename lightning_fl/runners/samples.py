"""Samples of a local step, for all clients that train at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from lightning_fl.contracts.data import ClientBatches
from lightning_fl.errors import FederationError
from lightning_fl.runners.tensors import select


class Padded(NamedTuple):
    """Hold stacked samples, padded to the same number per client by the library's own loader.

    Args:
        tensors: The samples, ``[k, B, ...]``; those after a client's size are padding.
        sizes: Number of samples of each client, ``[k]``.
        is_full: Whether all clients are known to train on all ``B`` samples.
    """

    tensors: Any
    sizes: Tensor
    is_full: bool = False

    def counts(self) -> Tensor:
        """Return the number of samples of each client, ``[k]``."""
        return self.sizes

    def groups(self) -> list[tuple[Tensor, Any]]:
        """Return groups of clients with the same number of samples; see :meth:`Collated.groups`."""
        groups = []
        for size in self.sizes.unique().tolist():
            rows, tensors = (self.sizes == size).nonzero()[:, 0], self.tensors
            if len(rows) < len(self.sizes):
                tensors = tree_map(partial(select, rows=rows), tensors)
            groups.append((rows, tree_map(lambda t, size=size: t[:, :size], tensors)))
        return groups


class Collated(NamedTuple):
    """Hold batches that were collated per client; the meaning of their axes is unknown.

    Args:
        batches: The batch of each client; None for a client that is done.
    """

    batches: Sequence[Any]

    def counts(self) -> Tensor:
        """Return the batch size of each client as Lightning infers it, ``[k]``."""
        return torch.tensor([_batch_size(batch) for batch in self.batches])

    def why_not_stacked(self) -> str | None:
        """Return the reason why the batches cannot be stacked, or None."""
        for leaf in tree_leaves([batch for batch in self.batches if batch is not None]):
            if type(leaf) is not Tensor:
                kind = type(leaf).__name__
                return f"its batches contain a {kind}, but only tensors can be stacked"
            if leaf.layout != torch.strided or leaf.is_nested:
                return f"its batches contain a tensor of layout {leaf.layout}"
        return None

    def groups(self) -> list[tuple[Tensor, Any]]:
        """Return groups of clients with batches of the same structure and shapes.

        Returns:
            For each group, the rows of its clients and their stacked batches. A client's whole
            batch is one element of the stack, whatever its axes mean.
        """
        alike: dict[Any, list[int]] = {}
        for row, batch in enumerate(self.batches):
            if batch is not None:
                leaves, tree = tree_flatten(batch)
                kinds = tuple((leaf.shape, leaf.dtype, leaf.device) for leaf in leaves)
                alike.setdefault((str(tree), kinds), []).append(row)
        groups = []
        for rows in alike.values():
            batches = (self.batches[row] for row in rows)
            groups.append((torch.tensor(rows), tree_map(lambda *t: torch.stack(t), *batches)))
        return groups


Samples = Padded | Collated


def copied(samples: Any) -> Any:
    """Return a copy of a batch, or of the samples of all clients, as a step may write to it."""
    return tree_map(
        lambda part: part.clone() if isinstance(part, Tensor) else copy.deepcopy(part), samples
    )


def _batch_size(batch: Any) -> int:
    try:
        return 0 if batch is None else extract_batch_size(batch)
    except MisconfigurationException:  # no tensor in it
        return 1


class BatchSamples:
    """Split a Lightning batch into local steps.

    Args:
        batch: The samples of all steps, or of the first step if the others are fetched. Either
            batches collated per client, or tensors with the samples in the first dimension.
        sizes: Number of samples of each local step and client, ``[steps, k]``.
        active: Mask of the clients that train in each local step, ``[steps, k]``.
        fetch: Function that returns the tensors of a later step, given its index, in the memory of
            those before: the runner copies what a step keeps of its samples. None if the batch
            holds all steps.
    """

    def __init__(
        self, batch: Any, sizes: Tensor, active: Tensor, fetch: Callable[[int], Any] | None = None
    ) -> None:
        self._sizes, self._fetch = sizes, fetch
        self._batch, self._is_full = batch, list[bool]()
        if not isinstance(batch, ClientBatches):
            self._batch = _by_step(batch, len(sizes) if fetch is None else 1, sizes.shape[1])
            full = sizes == tree_leaves(self._batch)[0].shape[2]
            self._is_full = (full & active).all(1).tolist()

    def samples(self, step: int) -> Samples:
        """Return the samples of a local step, given its index in the batch."""
        count = self._sizes.shape[1]
        if isinstance(self._batch, ClientBatches):
            return Collated(self._batch[step * count : (step + 1) * count])
        batch, at = self._batch, step
        if self._fetch is not None and step:
            batch, at = _by_step(self._fetch(step), 1, count), 0
        tensors = tree_map(lambda t: t[at], batch)
        return Padded(tensors, self._sizes[step], self._is_full[step])


def _by_step(batch: Any, steps: int, clients: int) -> Any:
    """Return tensors ``[steps * clients * B, ...]`` as ``[steps, clients, B, ...]``."""
    return tree_map(lambda t: t.view(steps, clients, -1, *t.shape[1:]), batch)


def check_batch(batch: Any) -> None:
    """Check a batch after its transfer. Lightning would skip None, and with it a client's start.

    Raises:
        FederationError: If the batch is None.
    """
    if batch is None:
        raise FederationError(
            "a training batch is None after its transfer to the device, so that no step can be"
            " made with it: on_before_batch_transfer, transfer_batch_to_device and"
            " on_after_batch_transfer of the module and of the data module must return the batch"
        )


def each_of(function: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function with a batch, or with the batch of each client."""
    if not isinstance(batch, ClientBatches):
        return function(batch, *args, **kwargs)

    def of_client(own: Any) -> Any:
        if own is None:  # the client is done
            return None
        check_batch(found := function(own, *args, **kwargs))
        return found

    return ClientBatches(map(of_client, batch))
