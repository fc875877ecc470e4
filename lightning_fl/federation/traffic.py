"""Communication volume between the server and the clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_fl.runners import ClientRunner
from lightning_fl.transforms import Message, UpdateTransform


class Traffic:
    """Count the bytes exchanged between the server and a client in a round.

    Trained parameters, buffers and frozen parameters that the module itself changes are sent in
    both directions. Other frozen parameters are not sent.

    Args:
        runner: Runner of the clients.
        transforms: Update transforms, which can reduce the size of updates.
    """

    def __init__(self, runner: ClientRunner, transforms: Sequence[UpdateTransform]) -> None:
        self._layout, self._counters = runner.layout, sum(runner.counters.sizes)
        self._bytes = torch.empty(0, dtype=runner.vector.dtype).element_size()
        self._transforms = transforms
        self._trained: Tensor | None = None
        self._num_trained = self._num_moved = self._extra_down = 0
        #: Bytes that a client sends in addition to its update.
        self.extra_up = 0

    def begin(self, trained: Tensor | None) -> None:
        """Set the parameters that clients train.

        Args:
            trained: Mask, ``[num_parameters]``; None means all.
        """
        self._trained = trained
        n = self._layout.num_parameters
        self._num_trained = n if trained is None else int(trained.sum())

    def down(self, broadcast: Mapping[str, Tensor]) -> None:
        """Count the tensors that the aggregator sends to each client in addition to the model.

        Args:
            broadcast: Tensors by name.
        """
        self._extra_down = sum(tensor.nbytes for tensor in broadcast.values())

    def up(self, extras: Mapping[str, Tensor]) -> None:
        """Count the tensors that a client sends in addition to its update.

        Args:
            extras: Tensors ``[k, ...]`` by name.
        """
        self.extra_up = sum(tensor[0].nbytes for tensor in extras.values())

    def note_moved(self, before: Tensor, after: Tensor) -> None:
        """Count frozen parameters that the module itself changed, as they are exchanged too.

        Args:
            before: Global model before the round, ``[P]``.
            after: Global model after the round.
        """
        if self._trained is None:
            return
        # Averaging equal values may change them by rounding only.
        rounding = 16 * torch.finfo(after.dtype).eps
        has_moved, sizes, at = [], [], 0
        for size in self._layout.sizes:
            if at < self._layout.num_parameters and size and not self._trained[at]:
                old, new = before[at : at + size], after[at : at + size]
                has_moved.append((new - old).abs().amax() > rounding * old.abs().amax())
                sizes.append(size)
            at += size
        moved = torch.stack(has_moved).tolist()
        self._num_moved = sum(size for size, has in zip(sizes, moved, strict=True) if has)

    def of_a_client(self) -> tuple[int, int]:
        """Return the bytes that a client sends and receives."""
        each, layout = self._bytes, self._layout
        rest = (layout.size - layout.num_parameters + self._num_moved) * each + 8 * self._counters
        message = Message(self._num_trained, 8 * each)
        for transform in self._transforms:
            message = transform.message(self._num_trained, message)
        up = message.bytes + rest + self.extra_up
        return up, self._num_trained * each + rest + self._extra_down
