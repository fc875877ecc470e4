"""How many processes train, and what they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, final

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_fl.strategies import ClientParallelStrategy, gathered
from lightning_fl.types import RoundPlan


class Processes(ABC):
    """What one process does with the results of all.

    Args:
        trainer: The Trainer of the fit.
    """

    #: Whether they train the same client. Each then has the updates of all clients.
    share_samples: ClassVar[bool]
    #: Whether they train different clients.
    share_clients: ClassVar[bool] = False

    def __init__(self, trainer: Trainer) -> None:
        self.rank, self.count = trainer.global_rank, trainer.world_size

    def wait(self, is_idle: bool) -> None:  # noqa: B027  # only some processes wait
        """Note whether this process has no client in a batch, in which it waits for others."""

    def repeat_validation(self, is_repeated: bool) -> None:  # noqa: B027  # only some share it
        """Note whether each process validates on all samples."""

    @abstractmethod
    def place(self, plan: RoundPlan) -> RoundPlan:
        """Return the plan of a round for this process."""

    @abstractmethod
    def scale(self, num_samples: int) -> float:
        r"""Return the factor of this process's mean loss of a batch.

        Lightning's DDP takes the mean of the gradients of :math:`W` processes. With :math:`n_r` of
        the :math:`n` samples a process's gradient has to count :math:`W n_r / n` times.

        Args:
            num_samples: Samples of the whole batch, :math:`n`.
        """

    @abstractmethod
    def mean(self, losses: Tensor, num_samples: int) -> Tensor:
        """Return mean losses of a whole batch.

        Args:
            losses: Mean losses of this process's samples.
            num_samples: Samples of the whole batch.
        """

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Return what the processes know of their clients; all have to call it."""

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes; all have to call it."""

    @abstractmethod
    def same(self, tensor: Tensor) -> Tensor:
        """Return process 0's tensor where the processes train the same client."""

    @abstractmethod
    def same_model(self, module: nn.Module) -> None:
        """Give a client's model of process 0 to all processes that train the same client.

        Running statistics are those of each process's own samples, and rounding may differ.
        """


@final
class Alone(Processes):
    """One process."""

    share_samples = False

    def place(self, plan: RoundPlan) -> RoundPlan:
        """Return the plan."""
        return plan

    def scale(self, num_samples: int) -> float:
        """Return 1."""
        return 1.0

    def mean(self, losses: Tensor, num_samples: int) -> Tensor:
        """Return the losses."""
        return losses

    def gather(self, value: Any) -> list[Any]:
        """Return the value."""
        return [value]

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def same(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def same_model(self, module: nn.Module) -> None:
        """Leave the model as it is."""


@final
class ClientsShared(Processes):
    """Processes that train different clients (``client_parallel``)."""

    share_samples = False
    share_clients = True

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        assert isinstance(trainer.strategy, ClientParallelStrategy)
        self._strategy = trainer.strategy

    def wait(self, is_idle: bool) -> None:
        """Tell the strategy, which makes a step without a client in an idle batch."""
        self._strategy.is_idle = is_idle

    def repeat_validation(self, is_repeated: bool) -> None:
        """Tell the strategy, which reduces nothing of a repeated validation."""
        self._strategy.repeats_validation = is_repeated

    def place(self, plan: RoundPlan) -> RoundPlan:
        """Return the plan with this process's rank."""
        return replace(plan, rank=self.rank, world_size=self.count)

    def scale(self, num_samples: int) -> float:
        """Return 1: a batch is on one process."""
        return 1.0

    def mean(self, losses: Tensor, num_samples: int) -> Tensor:
        """Return the losses: a batch is on one process."""
        return losses

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in their order."""
        return gathered(value)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes."""
        return _all_reduced(tensor)

    def same(self, tensor: Tensor) -> Tensor:
        """Return the tensor: clients are others on other processes."""
        return tensor

    def same_model(self, module: nn.Module) -> None:
        """Leave the model as it is: clients are others on other processes."""


@final
class SamplesShared(Processes):
    """Processes that train the same client on different samples (Lightning's ``ddp``)."""

    share_samples = True

    def place(self, plan: RoundPlan) -> RoundPlan:
        """Return the plan: each process trains all clients."""
        return plan

    def _share(self, num_samples: int) -> float:
        """Return this process's part of the samples of a batch."""
        return len(range(self.rank, num_samples, self.count)) / num_samples

    def scale(self, num_samples: int) -> float:
        """Return this process's part of the samples, times the number of processes."""
        return self._share(num_samples) * self.count

    def mean(self, losses: Tensor, num_samples: int) -> Tensor:
        """Return the mean over the samples of all processes."""
        return _all_reduced(losses * self._share(num_samples))

    def gather(self, value: Any) -> list[Any]:
        """Return the value: all processes know the same."""
        return [value]

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes."""
        return _all_reduced(tensor)

    def same(self, tensor: Tensor) -> Tensor:
        """Return process 0's tensor."""
        whole = tensor.detach().contiguous()
        torch.distributed.broadcast(whole, 0)
        return whole

    def same_model(self, module: nn.Module) -> None:
        """Copy process 0's parameters and buffers."""
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.detach().copy_(self.same(tensor))


def processes_of(trainer: Trainer) -> Processes:
    """Return the processes of a Trainer."""
    if isinstance(trainer.strategy, ClientParallelStrategy):
        return ClientsShared(trainer)
    return SamplesShared(trainer) if trainer.world_size > 1 else Alone(trainer)


def _all_reduced(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    torch.distributed.all_reduce(total)
    return total
