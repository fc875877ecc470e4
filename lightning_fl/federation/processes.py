"""Communication between the processes of a fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.errors import FederationError
from lightning_fl.strategies import ClientParallelStrategy, gathered


class Processes:
    """Processes that train different clients, or the same client on different samples.

    Args:
        trainer: The Trainer of the fit.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.rank, self.count = trainer.global_rank, trainer.world_size
        strategy = trainer.strategy
        self._strategy = strategy if isinstance(strategy, ClientParallelStrategy) else None
        #: Whether the strategy distributes clients, also if there is a single process.
        self.share_clients = self._strategy is not None
        #: Whether processes train the same client on different samples (``ddp``).
        self.share_samples = self.count > 1 and not self.share_clients

    def check_same(self, what: str, value: str) -> None:
        """Check that a value is the same on all processes. Must be called on all processes.

        Args:
            what: Name of the value, with the remedy, for the error message.
            value: The value on this process.

        Raises:
            FederationError: If it differs.
        """
        every = gathered(value) if self.count > 1 else [value]
        if wrong := [rank for rank, other in enumerate(every) if other != every[0]]:
            raise FederationError(f"processes 0 and {wrong[0]} have different {what}")

    def wait(self, is_idle: bool) -> None:
        """Set whether this process is idle in a batch: its strategy then makes an empty step."""
        if self._strategy is not None:
            self._strategy.is_idle = is_idle

    def repeat_validation(self, is_repeated: bool) -> None:
        """Set whether each process validates on all samples, which needs no reduction."""
        if self._strategy is not None:
            self._strategy.repeats_validation = is_repeated

    def place(self, plan: RoundPlan) -> RoundPlan:
        """Return the plan of a round for this process."""
        return replace(plan, rank=self.rank, world_size=self.count) if self.share_clients else plan

    def _share(self, num_samples: int) -> float:
        """Return the fraction of the samples of a batch on this process."""
        return len(range(self.rank, num_samples, self.count)) / num_samples

    def scale(self, num_samples: int) -> float:
        r"""Return the factor by which the mean loss of this process is scaled.

        DDP averages the gradients of :math:`W` processes. The gradient of a process with
        :math:`n_r` of the :math:`n` samples of a batch is scaled by :math:`W n_r / n`.

        Args:
            num_samples: Number of samples of the whole batch, which processes share, :math:`n`.
        """
        return self._share(num_samples) * self.count

    def mean(self, losses: Tensor, num_samples: int) -> Tensor:
        """Return the mean losses of a whole batch from those on the samples of each process."""
        return self.sum(losses * self._share(num_samples))

    def gather(self, value: Any) -> list[Any]:
        """Return the distinct values of all processes. Must be called on all processes.

        Args:
            value: Results of the clients of this process.

        Returns:
            One value per process; this one alone if there is no ``client_parallel``.
        """
        return gathered(value) if self.share_clients else [value]

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes. Must be called on all processes."""
        if self.count == 1:
            return tensor
        total = tensor.clone()
        torch.distributed.all_reduce(total)
        return total

    def same(self, tensor: Tensor) -> Tensor:
        """Return the tensor of process 0 if processes train the same client."""
        return _of_first(tensor) if self.share_samples else tensor

    def same_start(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors of process 0 to all processes. Must be called on all processes.

        Hooks may have written different values on each process, at the start of a fit or of a
        round.
        """
        if self.count > 1:
            for tensor in tensors:
                tensor.detach().copy_(_of_first(tensor))


def _of_first(tensor: Tensor) -> Tensor:
    whole = tensor.detach().contiguous()
    torch.distributed.broadcast(whole, 0)
    return whole
