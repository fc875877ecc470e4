"""Communication volume between the server and the clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lightning_fl.contracts.layout import VectorLayout
from lightning_fl.transforms import Message, UpdateTransform


class Traffic:
    """Count the bytes exchanged between the server and a client in a round.

    Trained parameters, buffers and frozen parameters that the module itself changes are sent in
    both directions. Other frozen parameters are not sent.

    Args:
        layout: Layout of the exchanged tensors; known in a fit.
        transforms: Update transforms, which can reduce the size of updates.
        bits: Bits per value of updates that are sent in full; None: as the transforms say.
    """

    def __init__(
        self, layout: VectorLayout, transforms: Sequence[UpdateTransform], bits: int | None = None
    ) -> None:
        self._layout, self._transforms, self._bits = layout, transforms, bits
        #: Slices of the frozen parameters in the vector.
        self._frozen: list[slice] = []
        self._num_trained = self._num_moved = self._extra_down = 0
        #: Bytes that a client sends in addition to its update.
        self.extra_up = 0

    def begin(self, trained: Tensor | None) -> None:
        """Set the parameters that clients train.

        Args:
            trained: Mask, ``[num_parameters]``; None means all.
        """
        n, slices, sizes = self._layout.num_parameters, list[slice](), self._layout.sizes
        if trained is not None:
            ends = zip(sizes, accumulate(sizes), strict=True)
            slices = [slice(end - size, end) for size, end in ends if size and end <= n]
            # Read at once: a parameter is trained or frozen as a whole, and each read waits.
            flags = trained[[part.start for part in slices]].tolist()
            slices = [part for part, flag in zip(slices, flags, strict=True) if not flag]
        self._frozen = slices
        self._num_trained = n - sum(part.stop - part.start for part in slices)

    def down(self, broadcast: Mapping[str, Tensor]) -> None:
        """Count the tensors that the aggregator sends to each client in addition to the model.

        Args:
            broadcast: Tensors by name.
        """
        self._extra_down = sum(map(self._bytes, broadcast.values()))

    def up(self, extras: Mapping[str, Tensor]) -> None:
        """Count the tensors that a client sends in addition to its update.

        Args:
            extras: Tensors ``[k, ...]`` by name.
        """
        self.extra_up = sum(self._bytes(tensor[0]) for tensor in extras.values())

    def _bytes(self, tensor: Tensor) -> int:
        """Return the size of a tensor; of one entry per parameter, trained ones are sent."""
        is_of_parameters = tensor.shape == (self._layout.num_parameters,)
        return self._num_trained * tensor.itemsize if is_of_parameters else tensor.nbytes

    def note_moved(self, before: Tensor, after: Tensor) -> None:
        """Count frozen parameters that the module itself changed, as they are exchanged too.

        Args:
            before: Global model before the round, ``[P]``.
            after: Global model after the round.
        """
        if not self._frozen:
            return
        # Averaging equal values may change them by rounding only.
        rounding = 16 * torch.finfo(after.dtype).eps
        has_moved = [
            (after[part] - before[part]).abs().amax() > rounding * before[part].abs().amax()
            for part in self._frozen
        ]
        flags = torch.stack(has_moved).tolist()
        moved = [part for part, flag in zip(self._frozen, flags, strict=True) if flag]
        self._num_moved = sum(part.stop - part.start for part in moved)

    def of_a_client(self, unused: int = 0) -> tuple[int, int]:
        """Return the bytes that a client sends and receives.

        Args:
            unused: Number of trained entries that the client does not exchange.
        """
        layout = self._layout
        each = layout.dtype.itemsize
        rest = (layout.size - layout.num_parameters + self._num_moved) * each
        rest += 8 * layout.num_counters
        trained = self._num_trained - unused
        message = Message(trained, 8 * each)
        for transform in self._transforms:
            message = transform.message(trained, message)
        if self._bits is not None:
            message = Message(trained, self._bits)
        up = message.bytes + rest + self.extra_up
        return up, trained * each + rest + self._extra_down
