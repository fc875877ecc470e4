"""Communication between the processes of a fit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, final

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.errors import FederationError
from lightning_fl.runners.constants import digest
from lightning_fl.strategies import ClientParallelStrategy, gathered


class Processes(ABC):
    """Base class of the ways to split training over processes.

    Args:
        trainer: The Trainer of the fit.
    """

    #: Whether processes train the same client on different samples.
    share_samples: ClassVar[bool]
    #: Whether processes train different clients.
    share_clients: ClassVar[bool] = False

    def __init__(self, trainer: Trainer) -> None:
        self.rank, self.count = trainer.global_rank, trainer.world_size

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

    def wait(self, is_idle: bool) -> None:  # noqa: B027  # only some processes wait
        """Set whether this process is idle in a batch and waits for the others."""

    def repeat_validation(self, is_repeated: bool) -> None:  # noqa: B027  # only some share it
        """Set whether each process validates on all samples."""

    @abstractmethod
    def place(self, plan: RoundPlan) -> RoundPlan:
        """Return the plan of a round for this process."""

    @abstractmethod
    def scale(self, num_samples: int) -> float:
        r"""Return the factor by which the mean loss of this process is scaled.

        DDP averages the gradients of :math:`W` processes. The gradient of a process with
        :math:`n_r` of the :math:`n` samples of a batch is scaled by :math:`W n_r / n`.

        Args:
            num_samples: Number of samples of the whole batch, :math:`n`.
        """

    @abstractmethod
    def mean(self, losses: Tensor, num_samples: int) -> Tensor:
        """Return the mean losses of the whole batch.

        Args:
            losses: Mean losses on the samples of this process.
            num_samples: Number of samples of the whole batch.
        """

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Return the distinct values of all processes. Must be called on all processes.

        Args:
            value: Results of the clients of this process.

        Returns:
            One value per process, or a single value if it is the same on all processes.
        """

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes. Must be called on all processes."""

    @abstractmethod
    def same(self, tensor: Tensor) -> Tensor:
        """Return the tensor of process 0 if processes train the same client."""

    def same_start(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors of process 0 to all processes. Must be called on all processes.

        Hooks at the start of a fit may have written different values on each process.
        """
        for tensor in tensors:
            tensor.detach().copy_(_of_first(tensor))

    def same_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Copy the buffers of process 0 that differ to all processes, as DDP does, and warn.

        Must be called on all processes, at the start of each round but the first.

        Args:
            buffers: Buffers by name.
        """
        if self.count == 1:
            return
        every = gathered({name: digest({name: buffer}) for name, buffer in buffers.items()})
        names = [n for n in buffers if any(other[n] != every[0][n] for other in every)]
        if names:
            rank_zero_warn(
                f"processes have written other values to the buffer {names[0]} since the last"
                " round, as validation_step does with its share of the samples. Each round starts"
                " from those of process 0, so that results depend on the number of processes:"
                " write to buffers in training_step only"
            )
        self.same_start(buffers[name] for name in names)

    @abstractmethod
    def same_model(self, module: nn.Module) -> None:
        """Copy the model of process 0 to all processes that train the same client.

        Otherwise running statistics, which depend on the samples of a process, and rounding could
        differ.
        """


class WholeClients(Processes):
    """Base class of the ways in which a client trains on one process."""

    share_samples = False

    def scale(self, num_samples: int) -> float:
        """Return 1, as a batch is on one process."""
        return 1.0

    def mean(self, losses: Tensor, num_samples: int) -> Tensor:
        """Return the losses, as a batch is on one process."""
        return losses

    def same(self, tensor: Tensor) -> Tensor:
        """Return the tensor, as other processes train other clients."""
        return tensor

    def same_model(self, module: nn.Module) -> None:
        """Keep the model, as other processes train other clients."""


@final
class Alone(WholeClients):
    """Training in a single process."""

    def same_start(self, tensors: Iterable[Tensor]) -> None:
        """Keep the tensors."""

    def place(self, plan: RoundPlan) -> RoundPlan:
        """Return the plan."""
        return plan

    def gather(self, value: Any) -> list[Any]:
        """Return the value."""
        return [value]

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor


@final
class ClientsShared(WholeClients):
    """Training of different clients in each process (``client_parallel``)."""

    share_clients = True

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        assert isinstance(trainer.strategy, ClientParallelStrategy)
        self._strategy = trainer.strategy

    def wait(self, is_idle: bool) -> None:
        """Notify the strategy, which makes an empty step in an idle batch."""
        self._strategy.is_idle = is_idle

    def repeat_validation(self, is_repeated: bool) -> None:
        """Notify the strategy, which does not reduce the results of a repeated validation."""
        self._strategy.repeats_validation = is_repeated

    def place(self, plan: RoundPlan) -> RoundPlan:
        """Return the plan with the rank of this process."""
        return replace(plan, rank=self.rank, world_size=self.count)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes in the order of their ranks."""
        return gathered(value)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes."""
        return _all_reduced(tensor)


@final
class SamplesShared(Processes):
    """Training of the same client on different samples in each process (``ddp``)."""

    share_samples = True

    def place(self, plan: RoundPlan) -> RoundPlan:
        """Return the plan, as each process trains all clients."""
        return plan

    def _share(self, num_samples: int) -> float:
        """Return the fraction of the samples of a batch on this process."""
        return len(range(self.rank, num_samples, self.count)) / num_samples

    def scale(self, num_samples: int) -> float:
        """Return the fraction of the samples on this process times the number of processes."""
        return self._share(num_samples) * self.count

    def mean(self, losses: Tensor, num_samples: int) -> Tensor:
        """Return the mean over the samples of all processes."""
        return _all_reduced(losses * self._share(num_samples))

    def gather(self, value: Any) -> list[Any]:
        """Return the value, as it is the same on all processes."""
        return [value]

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes."""
        return _all_reduced(tensor)

    def same(self, tensor: Tensor) -> Tensor:
        """Return the tensor of process 0."""
        return _of_first(tensor)

    def same_model(self, module: nn.Module) -> None:
        """Copy the parameters and buffers of process 0."""
        self.same_start((*module.parameters(), *module.buffers()))


def processes_of(trainer: Trainer) -> Processes:
    """Return the processes of a Trainer."""
    if isinstance(trainer.strategy, ClientParallelStrategy):
        return ClientsShared(trainer)
    return SamplesShared(trainer) if trainer.world_size > 1 else Alone(trainer)


def _of_first(tensor: Tensor) -> Tensor:
    whole = tensor.detach().contiguous()
    torch.distributed.broadcast(whole, 0)
    return whole


def _all_reduced(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    torch.distributed.all_reduce(total)
    return total
